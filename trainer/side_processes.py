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
        self._run, self._console = prepared.run, console
        self._clock, self._watchdog = clock, watchdog
        self._charts = Beside("chart", "reporting.charts", self._run.run_dir,
                              heartbeat=watchdog.heartbeat)
        self._tracker = TrackerProcess(self._run, starts_over=prepared.options.fresh,
                                       heartbeat=watchdog.heartbeat)
        self.after_checkpoint = AfterCheckpoint(prepared.options.after_checkpoint, self._run,
                                                heartbeat=watchdog.heartbeat)

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
        self._warn_of_charts(self._charts.take_failure())
        self._warn_of_tracker(self._tracker.take_failure())
        self._console.warn("--after-checkpoint", self.after_checkpoint.take_failure())

    def finish_charts(self) -> None:
        """Wait for the last charts."""
        with self._clock.phase(CHART):
            self._charts.hurry()
            self._warn_of_charts(self._charts.finish(
                self._until(self._watchdog.deadlines.charts)))

    def finish(self) -> str:
        """Wait for all, once the summary is written, whose figures are the tracker's last ones.

        After a stop signal all share the time that is left until the exit; the command is first.

        Returns:
            What failed in --after-checkpoint; empty if nothing, or after a stop signal: then it is
            only a warning.
        """
        self._tracker.tell_end()
        tracker_until = self._until(self._watchdog.deadlines.tracker)
        self.after_checkpoint.start()
        failure = self.after_checkpoint.finish(self._command_until())
        if self._watchdog.stop_signal:
            self._console.warn("--after-checkpoint", failure)
            failure = ""
            self.finish_charts()
        self._warn_of_tracker(self._tracker.finish(tracker_until))
        return failure

    def _until(self, seconds: float) -> Callable[[], float]:
        """Return when the wait for the last charts or records ends that begins now."""
        began, watchdog = time.monotonic(), self._watchdog
        planned = began + min(seconds, max(0.0, nearest_limit(self._run.train, self._clock)[0]))
        after_signal = began + min(seconds, watchdog.deadlines.after_command)
        return lambda: min(after_signal, watchdog.stop_by - EXIT_SECONDS) if (
            watchdog.stop_signal) else planned

    def _command_until(self) -> Callable[[], float]:
        """Return when the wait for --after-checkpoint ends that begins now."""
        affordable = max(LEAST_COMMAND_SECONDS, nearest_limit(self._run.train, self._clock)[0])
        watchdog = self._watchdog
        planned = time.monotonic() + min(watchdog.deadlines.after_checkpoint, affordable)
        return lambda: watchdog.stop_by - watchdog.deadlines.after_command if (
            watchdog.stop_signal) else planned

    def _warn_of_charts(self, failure: str) -> None:
        self._console.warn("charts are not up to date", failure)

    def _warn_of_tracker(self, failure: str) -> None:
        self._console.warn(f"tracker {self._run.train.tracker}", failure)
