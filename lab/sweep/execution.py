"""Train the runs of a sweep one after the other, within a budget, until a signal stops it."""

import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from basics.errors import NON_FINITE, STOP_SIGNALS, print_line
from lab.compare.results import Figures, Result, read_result
from lab.runs import NO_SUMMARY
from lab.sweep.definition import PlannedRun, Sweep
from processes.signals import end_with_parent, stop_signals
from reporting.summary import FINISHED

SCRIPT = Path(__file__).parents[2] / "ddp_train.py"
DIVERGED, NOT_STARTED = "diverged", "not started"
NOT_FINITE = "were not finite"  # in the reason of a run whose gradients were not


@dataclass(frozen=True)
class Outcome:
    """What one run has come to."""

    run: PlannedRun
    result: Result
    state: str  # finished, diverged, not started, or why it has not finished

    @classmethod
    def read(cls, run: PlannedRun, exit_status: int = 0) -> Self:
        """Read the files of a run; the status is that of its launch here, if there was one."""
        result = read_result(run.run_dir)
        state = NOT_STARTED if result.status == NO_SUMMARY and not result.records else result.status
        has_no_loss = state == FINISHED and result.figures["validation_loss"] is None
        if has_no_loss or exit_status == NON_FINITE or NOT_FINITE in result.reason:
            state = DIVERGED
        elif exit_status and state not in (FINISHED, "stopped"):
            if exit_status - 128 not in STOP_SIGNALS:
                state = f"failed (status {exit_status})"
        return cls(run, result, state)

    @property
    def figures(self) -> Figures:
        return self.result.figures

    @property
    def loss(self) -> float | None:
        """The final validation loss; None unless finished."""
        return self.figures["validation_loss"] if self.state == FINISHED else None


def total(outcomes: Iterable[Outcome], key: str) -> float:
    """Return the sum of a figure over runs; one that is not known counts as 0."""
    return sum(one.figures[key] or 0.0 for one in outcomes)


def start(command: list[str]) -> subprocess.Popen:
    """Start a command that gets SIGTERM if this process dies.

    Its process group is its own: Ctrl-C in a terminal reaches it once, through this process.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )


@dataclass
class Execution:
    """Trains the runs of a sweep: how each is started, and what all together may spend."""

    datasets_dir: Path
    nproc_per_node: int | None = None
    usd_per_hour: float | None = None
    budget_hours: float | None = None
    budget_usd: float | None = None
    exit_status: int = 0  # of the sweep: 128 + n after signal n, or that of a failed baseline
    stop_reason: str = ""  # why not all runs were trained
    outcomes: dict[Path, Outcome] = field(default_factory=dict)  # by directory, of all runs
    _process: subprocess.Popen | None = None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass signals to stop on to the run that is being trained; it saves and ends."""

        def stop(number: int, _: object) -> None:
            self.exit_status, self.stop_reason = 128 + number, STOP_SIGNALS[number]
            if self._process:
                self._process.send_signal(number)

        before = {number: signal.signal(number, stop) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def train(self, sweep: Sweep) -> None:
        """Train all runs that have not finished, until a signal or the budget stops it.

        A baseline that fails stops it too: there would be nothing to compare with. What an earlier
        call has launched is not launched again.
        """
        runs = [run for run in sweep.runs if run.run_dir not in self.outcomes]
        self.outcomes |= {run.run_dir: Outcome.read(run) for run in runs}
        for i, run in enumerate(runs, start=1):
            if self.outcomes[run.run_dir].state in (FINISHED, DIVERGED):
                continue
            seconds_left = self._seconds_left(run)
            if self.stop_reason:
                return
            print_line(f"[{i}/{len(runs)}] {run.label}")
            status = self._launch(run, seconds_left)
            outcome = self.outcomes[run.run_dir] = Outcome.read(run, status)
            if self.stop_reason:
                return
            if outcome.state != FINISHED:
                print_line(f"{run.label}: {outcome.state}")
            if status and not run.changes and outcome.state != DIVERGED:
                self.exit_status = status
                self.stop_reason = f"{run.label}, failed with status {status}"
                return

    def _seconds_left(self, run: PlannedRun) -> float:
        """Return the seconds that the budget leaves; set a reason to stop if a run takes more.

        A run takes the seconds per token of the finished runs, of the same variant if there are
        any, times the tokens that are left; nothing is known until a run has finished.
        """
        outcomes = self.outcomes.values()
        left, needed = math.inf, 0.0
        if self.budget_hours is not None:
            left = self.budget_hours * 3600 - total(outcomes, "seconds")
        if self.budget_usd is not None:
            usd = self.budget_usd - total(outcomes, "usd")
            left = min(left, usd / self.usd_per_hour * 3600)
        finished = [
            one
            for one in outcomes
            if one.state == FINISHED and one.figures["seconds"] and one.figures["tokens"]
        ]
        if alike := [one for one in finished if one.run.changes == run.changes] or finished:
            seconds = statistics.fmean(one.figures["seconds"] for one in alike)
            tokens = statistics.fmean(one.figures["tokens"] for one in alike)
            wanted = tokens if run.config.min_train_tokens == -1 else run.config.min_train_tokens
            done = self.outcomes[run.run_dir].figures["tokens"] or 0.0
            needed = seconds / tokens * max(0.0, wanted - done)
        if left <= 0:
            self.stop_reason = f"budget: it was spent before {run.label}"
        elif needed > left:
            self.stop_reason = (
                f"budget: {run.label} would take about {needed / 3600:.3g} hours,"
                f" {left / 3600:.3g} are left"
            )
        return left

    def _launch(self, run: PlannedRun, seconds_left: float) -> int:
        """Train or resume one run; return its exit status, 128 + n if signal n ended it."""
        command = [
            sys.executable,
            str(SCRIPT),
            run.run_dir.name,
            "--runs-dir",
            str(run.run_dir.parent),
            "--datasets-dir",
            str(self.datasets_dir),
        ]
        if self.nproc_per_node is not None:
            command += ["--nproc-per-node", str(self.nproc_per_node)]
        if self.usd_per_hour is not None:
            command += ["--usd-per-hour", str(self.usd_per_hour)]
        self._process = start(command)
        if self.stop_reason:  # a signal came before there was a process to pass it on to
            self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(None if math.isinf(seconds_left) else seconds_left)
        except subprocess.TimeoutExpired:
            self.stop_reason = f"budget: spent during {run.label}, which was stopped"
            self._process.send_signal(signal.SIGTERM)
            status = self._process.wait()
        self._process = None
        return status if status >= 0 else 128 - status
