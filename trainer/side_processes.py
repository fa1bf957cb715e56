"""What runs beside training: charts, tracker, `--after-checkpoint`; and after it: `--when-done`."""

import gc
import math
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import torch

from basics.checkpoint_files import read_identity
from basics.errors import FAILED, UserError, drop_unwritable_output, one_line, print_line
from basics.failpoints import failpoint
from checkpointing import best_of, list_checkpoints
from processes import beside
from processes.beside import LOWEST, POLL_SECONDS, Beside, end_group, environment
from processes.command_line import Options
from processes.distributed import Process
from processes.signals import Deadlines, stop_signals
from processes.watchdog import Watchdog
from reporting.clock import CHART, PhaseClock, nearest_limit
from reporting.metrics_file import fsync_records
from reporting.run_log import RunLog
from reporting.summary import BEHIND, BUDGET, FINISHED, duration, read_summary, record_when_done
from reporting.tracker import begin_tracking, tracker_process
from run_config import Run

EXIT_SECONDS = 1.0  # between the end of the last wait and the exit, after a stop signal
LEAST_COMMAND_SECONDS = 60.0  # for --after-checkpoint where the budget is spent
CHARTS_FAILED, COMMAND_FAILED = "charts are not up to date", "--after-checkpoint"  # warnings
LOG = "after-checkpoint.log"  # in the run directory: what the last --after-checkpoint printed
GRACE_SECONDS = 5.0  # from a stop signal to SIGKILL; torchrun kills its processes after 30


class SideProcesses:
    """Starts these processes, warns of what fails in them, and waits for them at the end. Rank 0.

    Nothing that fails, hangs or is slow there stops training.
    """

    def __init__(
        self, run: Run, options: Options, *, log: RunLog, clock: PhaseClock, watchdog: Watchdog
    ) -> None:
        self._run, self._starts_over = run, options.fresh
        self._log, self._clock, self._watchdog = log, clock, watchdog
        self.charts = Beside("chart", lambda: beside.start_module("reporting.charts", run.run_dir))
        self.tracker = tracker_process(run)
        self.after_checkpoint = after_checkpoint(options.after_checkpoint, run)
        self._tracker_failed = f"tracker {run.config.tracker}"  # how a warning of it begins

    def track(self) -> None:
        """Start the tracker, once the records of steps that are repeated are gone."""
        if self._run.config.tracker != "none":
            try:
                begin_tracking(self._run, starts_over=self._starts_over)
                self.tracker.start()
            except OSError as error:
                self._log.warn(self._tracker_failed, str(error))

    def draw_charts(self) -> None:
        """Start to draw the charts, and the tracker again if it has failed."""
        with self._clock.phase(CHART):
            self.charts.start()
            self.tracker.start()

    def warn(self) -> None:
        self._log.warn(CHARTS_FAILED, self.charts.pop_failure())
        self._log.warn(self._tracker_failed, self.tracker.pop_failure())
        self._log.warn(COMMAND_FAILED, self.after_checkpoint.pop_failure())

    def finish_charts(self) -> None:
        with self._clock.phase(CHART):
            failure = self.charts.finish(
                self._until(self._watchdog.deadlines.charts), heartbeat=self._watchdog.heartbeat
            )
        self._log.warn(CHARTS_FAILED, failure)

    def finish(self) -> str:
        """Wait for all, once the summary is written, whose figures are the tracker's last ones.

        After a stop signal all share the time that is left until the exit; the command is first.
        Returns what failed in --after-checkpoint; after a stop signal that is only a warning.
        """
        watchdog, deadlines = self._watchdog, self._watchdog.deadlines
        tracker_until = self._until(deadlines.tracker)
        command_until = self._until(deadlines.after_checkpoint, least=LEAST_COMMAND_SECONDS)
        self.after_checkpoint.start()
        failure = self.after_checkpoint.finish(
            lambda: (
                watchdog.stop_by - deadlines.after_command
                if watchdog.stop_signal
                else command_until()
            ),
            heartbeat=watchdog.heartbeat,
        )
        if watchdog.stop_signal:
            self._log.warn(COMMAND_FAILED, failure)
            failure = ""
            self.finish_charts()
        self._log.warn(
            self._tracker_failed, self.tracker.finish(tracker_until, heartbeat=watchdog.heartbeat)
        )
        return failure

    def _until(self, seconds: float, *, least: float = 0.0) -> Callable[[], float]:
        """Return when a wait ends that begins now, after a stop signal or within the budget."""
        began, watchdog = time.monotonic(), self._watchdog
        left, _ = nearest_limit(self._run.config, self._clock)
        planned = began + min(seconds, max(least, left))
        stopped = began + min(seconds, watchdog.deadlines.after_command)
        return lambda: (
            min(stopped, watchdog.stop_by - EXIT_SECONDS) if (watchdog.stop_signal) else planned
        )


def after_checkpoint(command: str | None, run: Run) -> Beside:
    def launch() -> subprocess.Popen[bytes]:
        with (run.run_dir / LOG).open("w") as output:
            return start_command(command or "", run_facts(run), output, priority=LOWEST)

    return Beside(
        "after-checkpoint",
        launch if command else None,
        advice=f"; {run.run_dir / LOG} has its output",
    )


def command_failed(name: str, how: str, status: int = FAILED) -> UserError:
    return UserError(f"the launch is over, and {name} {how}; run the same command again", status)


def run_when_done(
    run: Run, options: Options, process: Process, *, was_finished: bool, stop_signal: int
) -> None:
    """Run the command of --when-done if the run is over. Every rank; rank 0 runs it.

    If the run was finished before this launch, --after-checkpoint is repeated first: the last
    one may have failed. All files are on disk, and the process group is gone. The machine may be
    shut down under this process.

    Raises: UserError: a command failed, or a signal ended it.
    """
    if not process.is_main:
        return
    if was_finished and options.after_checkpoint:
        run_command(
            "--after-checkpoint",
            options.after_checkpoint,
            run,
            limit_seconds=Deadlines.read().after_checkpoint,
        )
    if options.when_done is None:
        return
    if reason := _why_not(read_summary(run), stop_signal, has_trained=not was_finished):
        return print_line(f"when-done: not run: {reason}")
    gc.collect()
    torch.cuda.empty_cache()  # the command may need the GPU
    with suppress(OSError):
        fsync_records(run.run_dir)
    record_when_done(run, None)
    failpoint("when-done")
    print_line(f"when-done: running {one_line(options.when_done)}")
    drop_unwritable_output()  # else the command fails where it prints
    began = time.monotonic()
    run_command(
        "--when-done", options.when_done, run, record=lambda status: record_when_done(run, status)
    )
    print_line(f"when-done: ended with status 0 after {duration(time.monotonic() - began)}")


def _why_not(summary: dict[str, Any], stop_signal: int, *, has_trained: bool) -> str:
    """Return why the command is not run; empty if the run or its budget is over, or it is behind.

    A launch of a run that was finished before runs it again unless it has succeeded.
    """
    if stop_signal:
        return f"{signal.Signals(stop_signal).name} ended the launch"
    if summary.get("status") == FINISHED:
        has_succeeded = not has_trained and summary.get("when_done") == {"status": 0}
        return "it has succeeded after an earlier launch" if has_succeeded else ""
    if summary.get("stopped_by") in (BUDGET, BEHIND):
        return ""
    reason = summary.get("reason")
    return f"{reason} ended the launch" if reason else "the run has not ended"


def run_facts(run: Run) -> dict[str, str]:
    """Return what a command learns of a run, as environment variables; unknown ones are empty."""
    summary, checkpoints = read_summary(run), list_checkpoints(run.checkpoints_dir)
    best, newest = best_of(checkpoints), checkpoints[-1] if checkpoints else None
    if newest and "global_step" not in summary:  # it trains
        summary = summary | newest.meta.model_dump(include={"global_step", "tokens", "train_loss"})
        summary["validation_loss"] = newest.validation and newest.validation.loss
    loss = summary.get("validation_loss")
    identity = read_identity(run.run_dir)
    facts = {
        "RUN": run.name,
        "RUN_DIR": run.run_dir.absolute(),
        "IDENTITY": identity and identity.name,
        "STATUS": summary.get("status"),
        "REASON": summary.get("reason"),
        "STEP": summary.get("global_step", -1) + 1,
        "NUM_STEPS": summary.get("num_steps"),
        "TOKENS": summary.get("tokens"),
        "LOSS": summary.get("train_loss") if loss is None else loss,
        "CHECKPOINT": newest and newest.path.absolute(),
        "BEST": best and best.path.absolute(),
        "SECONDS": sum((summary.get("seconds") or {}).values()),
        "USD": (summary.get("usd") or {}).get("total"),
    }
    return {
        f"DDP_TRAIN_{name}": "" if value is None else str(value) for name, value in facts.items()
    }


def start_command(
    command: str, facts: dict[str, str], output: IO[str] | None = None, *, priority: list[str]
) -> subprocess.Popen[bytes]:
    """Start a command by `sh -c`, in a session of its own that can be ended as a whole.

    Its environment is that of the launch, as far as it is known, and the facts; `{run}`,
    `{run_dir}`, `{checkpoint}` and `{identity}` in the command become the facts of that name.
    """
    command = re.sub(
        r"(?<!\$)\{(run|run_dir|checkpoint|identity)\}",
        lambda found: shlex.quote(facts[f"DDP_TRAIN_{found[1].upper()}"]),
        command,
    )
    return subprocess.Popen(
        [*priority, "sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment() | facts,
        start_new_session=True,
    )


def run_command(
    name: str,
    command: str,
    run: Run,
    *,
    limit_seconds: float = math.inf,
    record: Callable[[int], None] = lambda status: None,
) -> None:
    """Run a command; a stop signal ends it. What it prints goes where this process prints.

    `record` is called with its exit status, 128 + n if signal n ended it.

    Raises: UserError: it failed, or a stop signal came.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in stop_signals()
    }
    try:
        process = start_command(command, run_facts(run), priority=[])
        until = time.monotonic() + limit_seconds
        while process.poll() is None and not received and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if process.poll() is None:
            end_group(process, GRACE_SECONDS)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = status if status >= 0 else 128 - status
    record(status)
    if received:
        raise command_failed(
            name, f"was ended by {signal.Signals(received[0]).name}", 128 + received[0]
        )
    if status:
        raise command_failed(name, f"ended with status {status}")
