"""Train the runs of a sweep, several at once if asked for, within a budget, until a signal."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from basics.errors import NON_FINITE, STOP_SIGNALS, cannot_be_written, print_line, writing_to
from basics.files import lock_file, write_atomically
from basics.json_files import found_object, read_json_object, to_json
from basics.text import counted
from lab.runs import NO_SUMMARY, Result, read_run
from lab.sweep.definition import PlannedRun, Sweep
from lab.sweep.shares import Share
from processes.signals import end_with_parent, stop_signals
from reporting.reference import (
    REFERENCES,
    WARNING_LOSS,
    WARNING_STD,
    ReferenceCurve,
    mean_curve,
    report_noise,
    write_reference,
)
from reporting.summary import BEHIND, BUDGET, FINISHED

SCRIPT = Path(__file__).parents[2] / "ddp_train.py"
OUTPUT_NAME = "output.log"  # in a run's directory: what it prints, if several are trained at once
LAST_BYTES = 2000  # of it, where the reason of a failure is looked for
CLAIM = "claim.lock"  # in a run's directory: locked by the command that trains it
DIVERGED, NOT_STARTED, PRUNED, AT_LIMIT = "diverged", "not started", "pruned", "at its limit"
ENDED_BY = {BEHIND: PRUNED, BUDGET: AT_LIMIT}  # the run's own settings; it would end so again
NOT_FINITE = "were not finite"  # in the reason of a run whose gradients were not
REFERENCE = "baseline"  # the curve of the baseline, in `references.json` of the sweep
# Of its tokens: nothing is pruned before. Runs with twice the baseline's rate were behind after 40%
# of their tokens, and ended ahead (docs/sweeps.md).
FIRST_SHARE = 0.5
MAX_POINTS = 1000
REPORTS = 2  # validations in a row
# With another value of these, the loss at the same number of tokens is another: nothing is pruned.
OTHER_CURVE = {
    "dataset",
    "vocab_size",
    "context_length",
    "grow",
    "min_train_tokens",
    "microbatch_size",
    "validation",
    "start_val_token",
    "validation_sequences",
    "validation_batches",
}
POLL_SECONDS = 0.1  # between two looks at what has ended
OTHERS_SECONDS = 5.0  # between two looks at runs that other commands train


@dataclass(frozen=True)
class Outcome:
    """What one run has come to."""

    run: PlannedRun
    result: Result
    state: str  # finished, diverged, pruned, at its limit, not started, or why it has not finished
    loss: float | None  # the last validation loss; None unless finished or at its limit

    @classmethod
    def read(cls, run: PlannedRun, exit_status: int = 0) -> Self:
        """Read the files of a run; the status is that of its launch here, if there was one."""
        result = read_run(run.run_dir)
        summary = found_object(run.run_dir / "summary.json")
        state = NOT_STARTED if result.status == NO_SUMMARY and not result.records else result.status
        has_no_loss = state == FINISHED and result.validation_loss is None
        if has_no_loss or exit_status == NON_FINITE or NOT_FINITE in (result.reason or ""):
            state = DIVERGED
        elif state == "stopped" and summary.get("stopped_by") in ENDED_BY:
            state = ENDED_BY[summary["stopped_by"]]
        elif exit_status and state not in (FINISHED, "stopped"):
            if exit_status - 128 not in STOP_SIGNALS:
                state = f"failed (status {exit_status})"
        loss = result.validation_loss if state in (FINISHED, AT_LIMIT) else None
        return cls(run, result, state, loss)

    @property
    def is_settled(self) -> bool:
        """Whether the run is not trained again: it would come to the same."""
        return self.state in (FINISHED, DIVERGED, PRUNED, AT_LIMIT)


def total(outcomes: Iterable[Outcome], key: str) -> float:
    """Return the sum of a figure over runs; one that is not known counts as 0."""
    return sum(one.result.value(key) or 0.0 for one in outcomes)


def claim(run_dir: Path) -> int | None:
    """Claim a run, without waiting; None if another command trains it.

    Returns the descriptor of a locked file, which its launch inherits. The claim ends when this
    process has closed it and the launch has ended, however they end.

    Raises: UserError: the file cannot be made or locked.
    """
    try:
        return lock_file(run_dir / CLAIM)
    except BlockingIOError:
        return None
    except OSError as error:
        raise cannot_be_written(run_dir, error) from None


def start(
    command: list[str], share: Share, output: IO[bytes] | None, lock: int
) -> subprocess.Popen:
    """Start a launch that shares the claim of its run, and gets SIGTERM if this process dies.

    Its process group is its own: Ctrl-C in a terminal reaches it once, through this process.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        if share.cores:
            os.sched_setaffinity(0, share.cores)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | share.environment,
        pass_fds=[lock],
        process_group=0,
        preexec_fn=prepare,
    )


def limit_to(sweep: Sweep, baselines: list[Result]) -> dict[str, Any]:
    """Save the validation curve of baselines that have ended; return the keys that compare with it.

    Empty if there is no curve. With one seed its noise is not known, and the limit is a loss.

    Raises: UserError: the sweep's references are wrong, or cannot be written.
    """
    records = [result.records for result in baselines]
    points = mean_curve(records, "validation_loss", max_points=MAX_POINTS)
    if not points:
        return {}
    first_tokens = FIRST_SHARE * points[-1][0]
    curve = ReferenceCurve(
        name=REFERENCE,
        about=f"{sweep.base.name}, the baseline of this sweep",
        vocab_size=sweep.base.model.vocab_size,
        num_runs=len(records),
        validation=tuple(point for point in points if point[0] >= first_tokens),
        validation_std=report_noise(records, "validation_loss", reports=1),
    )
    write_reference(sweep.sweep_dir / REFERENCES, curve)
    limit = {"std": WARNING_STD} if curve.validation_std else {"loss": WARNING_LOSS}
    return {"reference": REFERENCE, "stop_if_behind": limit | {"reports": REPORTS}}


@dataclass
class LaunchedRun:
    """A run that is being trained, until `process` has ended and `lock` is closed."""

    run: PlannedRun
    share: Share
    process: subprocess.Popen
    lock: int
    began: float  # by time.monotonic

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass
class Execution:
    """Trains the runs of a sweep: how each is started, and what all together may spend."""

    datasets_dir: Path
    nproc_per_node: int | None = None
    usd_per_hour: float | None = None
    budget_hours: float | None = None
    budget_usd: float | None = None
    prune: bool = False
    shares: list[Share] = field(default_factory=lambda: [Share()])  # one for each run at once
    exit_status: int = 0  # of the sweep: 128 + n after signal n, or that of a failed baseline
    stop_reason: str = ""  # why not all runs were trained
    outcomes: dict[Path, Outcome] = field(default_factory=dict)  # by directory, of all runs
    launches: list[LaunchedRun] = field(default_factory=list)
    num_elsewhere: int = 0  # runs that other commands train
    _launched: set[Path] = field(default_factory=set)  # their outcomes have an exit status
    _signal: int = 0
    _limit: dict[str, Any] | None = None  # the keys that prune a run; None until they are known

    @property
    def price(self) -> float | None:
        """US$ an hour of one run: its share of the machine."""
        return self.usd_per_hour and self.usd_per_hour / len(self.shares)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Pass signals to stop on to the runs that are being trained; they save and end."""

        def stop(number: int, _: object) -> None:
            self.exit_status, self.stop_reason = 128 + number, STOP_SIGNALS[number]
            self._signal = number
            self._send(number)

        before = {number: signal.signal(number, stop) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def train(self, sweep: Sweep, refresh: Callable[[], None] = lambda: None) -> None:
        """Train all runs that have not finished, until a signal or the budget stops it.

        A baseline that fails stops it too: there would be nothing to compare with. What an earlier
        call has launched is not launched again. Runs that other commands train are waited for:
        where one of them dies, its run is trained here.

        Args:
            refresh: called again and again, to show what has changed.
        """
        runs = [run for run in sweep.runs if run.run_dir not in self.outcomes]
        self.outcomes |= {run.run_dir: Outcome.read(run) for run in runs}
        places = {run.run_dir: f"[{i}/{len(runs)}]" for i, run in enumerate(runs, start=1)}
        waiting = [run for run in runs if not self.outcomes[run.run_dir].is_settled]
        has_told = False
        look_at = 0.0  # when runs that other commands train may have become free
        while self.launches or (waiting and not self.stop_reason):
            if self._collect_ended():
                look_at = 0.0
            self._stop_at_budget()
            while time.monotonic() >= look_at and len(self.launches) < len(self.shares):
                found = self._next(sweep, waiting)
                if found is None:
                    look_at = time.monotonic() + OTHERS_SECONDS
                    if self.num_elsewhere and not self.launches and not has_told:
                        has_told = True
                        count = counted(self.num_elsewhere, "run")
                        print_line(f"waiting for {count} that other commands train")
                    break
                run, lock = found
                share = self._free_share()
                place = f" ({share.name})" if share.name else ""
                print_line(f"{places[run.run_dir]} {run.label}{place}")
                self._launch(sweep, run, lock, share)
            refresh()
            time.sleep(POLL_SECONDS)

    def outcomes_of(self, sweep: Sweep) -> dict[Path, Outcome]:
        """Return what all runs have come to, those of other commands as their files say now."""
        outcomes = {}
        for run in sweep.runs:
            known = self.outcomes.get(run.run_dir)
            if known is None or not (known.is_settled or run.run_dir in self._launched):
                known = Outcome.read(run)
            outcomes[run.run_dir] = known
        return outcomes

    def _collect_ended(self) -> bool:
        """Read what launches that have ended have come to; return whether there are any."""
        ended = [launch for launch in self.launches if launch.process.poll() is not None]
        for launch in ended:
            run, status = launch.run, launch.process.returncode
            status = status if status >= 0 else 128 - status
            self.launches.remove(launch)
            os.close(launch.lock)
            outcome = self.outcomes[run.run_dir] = Outcome.read(run, status)
            if outcome.loss is None and not self.stop_reason:
                why = self._last_error(run) if outcome.state.startswith("failed") else ""
                print_line(f"{run.label}: {outcome.state}{why}")
            elif len(self.shares) > 1:
                loss = "" if outcome.loss is None else f", validation loss {outcome.loss:.4f}"
                print_line(f"{run.label}: {outcome.state}{loss}")
            is_failed = bool(status) and not outcome.is_settled
            if is_failed and not run.changes and not self.stop_reason:
                self.exit_status = status
                self.stop_reason = f"{run.label}, failed with status {status}"
        return bool(ended)

    def _last_error(self, run: PlannedRun) -> str:
        """Return the last error that a run has written to its file, if it has one."""
        path = run.run_dir / OUTPUT_NAME
        if len(self.shares) == 1:  # it was seen
            return ""
        with suppress(OSError):
            lines = path.read_bytes()[-LAST_BYTES:].decode(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith("Error: ")]
            return f": {errors[-1].removeprefix('Error: ')}" if errors else f": see {path}"
        return ""

    def _next(self, sweep: Sweep, waiting: list[PlannedRun]) -> tuple[PlannedRun, int] | None:
        """Take the next run that nobody trains out of those that wait, with its claim.

        None if there is none now, or if the budget is spent. To prune, all baselines come first.
        """
        baselines = [run for run in (*waiting, *(one.run for one in self.launches))]
        waits_for_baseline = self.prune and any(not run.changes for run in baselines)
        self.num_elsewhere = 0
        for run in list(waiting):
            if self.stop_reason or (waits_for_baseline and run.changes):
                continue
            lock = claim(run.run_dir)
            # Another command may have trained it since it was last read, or trains it.
            outcome = self.outcomes[run.run_dir] = Outcome.read(run)
            if lock is None:
                self.num_elsewhere += 1
                continue
            is_spent = not outcome.is_settled and self._seconds_left() <= 0
            if is_spent:
                self.stop_reason = f"budget: it was spent before {run.label}"
            else:
                waiting.remove(run)
            if not (is_spent or outcome.is_settled):
                return run, lock
            os.close(lock)
        return None

    def _free_share(self) -> Share:
        used = [launch.share for launch in self.launches]
        return next(share for share in self.shares if used.count(share) < self.shares.count(share))

    def _seconds_left(self) -> float:
        """Return the seconds of runs that the budget leaves; infinite without one."""
        # Of a run that is being trained, the outcome is that before its launch.
        outcomes = self.outcomes.values()
        running = sum(launch.seconds for launch in self.launches)
        left = math.inf
        if self.budget_hours is not None:
            left = self.budget_hours * 3600 - total(outcomes, "seconds") - running
        if self.budget_usd is not None:
            usd = self.budget_usd - total(outcomes, "usd")
            left = min(left, usd / self.price * 3600 - running)
        return left

    def _stop_at_budget(self) -> None:
        """Stop the runs that are being trained once the budget is spent."""
        if self.launches and not self._signal and self._seconds_left() <= 0:
            names = " and ".join(launch.run.label for launch in self.launches)
            which = "which was stopped" if len(self.launches) == 1 else "which were stopped"
            self.stop_reason = f"budget: spent during {names}, {which}"
            self._signal = signal.SIGTERM
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for launch in self.launches:
            launch.process.send_signal(number)

    def _set_limit(self, sweep: Sweep, run: PlannedRun) -> None:
        """Write into a run's `train.json` that it ends where it is behind the baseline's curve."""
        if self._limit is None:
            baselines = [one for one in self.outcomes.values() if not one.run.changes]
            self._limit = limit_to(sweep, [one.result for one in baselines if one.loss is not None])
            if not self._limit:
                print_line("nothing is pruned: no baseline has finished")
        if self._limit and not OTHER_CURVE & {key.partition(".")[0] for key in run.changes}:
            path = run.run_dir / "train.json"
            with writing_to(path):
                text = to_json(read_json_object(path) | self._limit, indent=4)
                write_atomically(path, f"{text}\n")

    def _launch(self, sweep: Sweep, run: PlannedRun, lock: int, share: Share) -> None:
        """Start to train or resume one run, whose claim this process has."""
        if self.prune and run.changes:
            self._set_limit(sweep, run)
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
        if self.price is not None:
            command += ["--usd-per-hour", str(self.price)]
        with ExitStack() as files:
            output = None
            if len(self.shares) > 1:
                path = run.run_dir / OUTPUT_NAME
                with writing_to(path):
                    output = files.enter_context(path.open("ab"))
            process = start(command, share, output, lock)
        self._launched.add(run.run_dir)
        self.launches.append(LaunchedRun(run, share, process, lock, time.monotonic()))
        if self._signal:  # it came before there was a process to pass it on to
            process.send_signal(self._signal)
