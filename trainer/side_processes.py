"""What works beside training: charts, the tracker, --after-checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from processes.beside import Beside
from processes.watchdog import Watchdog
from reporting.clock import CHART, PhaseClock
from reporting.console import Console
from reporting.tracker import TrackerProcess
from trainer.budget import nearest_limit
from trainer.startup import PreparedRun
from trainer.user_commands import AfterCheckpoint

EXIT_SECONDS = 1.0  # between the end of the last wait and the exit, after a stop signal
LEAST_COMMAND_SECONDS = 60.0  # for --after-checkpoint where the budget is spent


class SideProcesses:
    """Starts these processes, warns of what fails in them, and waits for them at the end. Rank 0.

    Nothing that fails, hangs or is slow there stops training.
    """

    def __init__(self, prepared: PreparedRun, *, console: Console, clock: PhaseClock,
                 watchdog: Watchdog) -> None:
        run, heartbeat = prepared.run, watchdog.heartbeat
        self._train, self._console = run.train, console
        self._clock, self._watchdog = clock, watchdog
        self._charts = Beside("chart", "reporting.charts", run.run_dir, heartbeat=heartbeat)
        self._tracker = TrackerProcess(run, starts_over=prepared.options.fresh,
                                       heartbeat=heartbeat)
        self.after_checkpoint = AfterCheckpoint(prepared.options.after_checkpoint, run,
                                                heartbeat=heartbeat)

    def track(self) -> None:
        """Start the tracker, once the records of steps that are repeated are gone."""
        self._tracker.start()
        self.warn()

    def draw_charts(self) -> None:
        """Start to draw the charts."""
        with self._clock.phase(CHART):
            self._charts.start()
            self.warn()

    def warn(self) -> None:
        """Warn of what has failed since the last call."""
        self._console.warn("charts are not up to date", self._charts.take_failure())
        self._console.warn(f"tracker {self._train.tracker}", self._tracker.take_failure())
        self._console.warn("--after-checkpoint", self.after_checkpoint.take_failure())

    def finish_charts(self) -> None:
        """Wait for the last charts."""
        with self._clock.phase(CHART):
            self._charts.hurry()
            failure = self._charts.finish(self._until(self._watchdog.deadlines.charts))
            self._console.warn("charts are not up to date", failure)

    def finish(self) -> str:
        """Wait for all, once the summary is written, whose figures are the tracker's last ones.

        After a stop signal all share the time that is left until the exit; the command is first.

        Returns:
            What failed in --after-checkpoint; empty if nothing, or after a stop signal: then it is
            only a warning.
        """
        watchdog, deadlines = self._watchdog, self._watchdog.deadlines
        self._tracker.tell_end()
        tracker_until = self._until(deadlines.tracker)
        command_until = self._until(deadlines.after_checkpoint, least=LEAST_COMMAND_SECONDS)
        self.after_checkpoint.start()
        failure = self.after_checkpoint.finish(
            lambda: watchdog.stop_by - deadlines.after_command if watchdog.stop_signal
            else command_until())
        if watchdog.stop_signal:
            self._console.warn("--after-checkpoint", failure)
            failure = ""
            self.finish_charts()
        self._console.warn(f"tracker {self._train.tracker}", self._tracker.finish(tracker_until))
        return failure

    def _until(self, seconds: float, *, least: float = 0.0) -> Callable[[], float]:
        """Return when a wait ends that begins now, after a stop signal or within the budget."""
        began, watchdog = time.monotonic(), self._watchdog
        planned = began + min(seconds, max(least, nearest_limit(self._train, self._clock)[0]))
        stopped = began + min(seconds, watchdog.deadlines.after_command)
        return lambda: min(stopped, watchdog.stop_by - EXIT_SECONDS) if (
            watchdog.stop_signal) else planned
