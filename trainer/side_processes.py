"""The processes that work beside training: charts, the tracker, --after-checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from processes.watchdog import Watchdog
from reporting.chart_process import ChartProcess
from reporting.clock import CHART, PhaseClock
from reporting.console import Console
from reporting.tracker_process import TrackerProcess
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
        self._prepared, self._run = prepared, prepared.run
        self._console, self._clock, self._watchdog = console, clock, watchdog
        self._charts = ChartProcess(self._run.run_dir, heartbeat=watchdog.heartbeat)
        self._tracker = TrackerProcess(self._run, heartbeat=watchdog.heartbeat)
        self.after_checkpoint = AfterCheckpoint(prepared.options.after_checkpoint, self._run,
                                                heartbeat=watchdog.heartbeat)

    def track(self) -> None:
        """Start the tracker, once the records of steps that are repeated are gone."""
        self._warn_of_tracker(self._tracker.start(
            self._prepared.first_step, starts_over=self._prepared.options.fresh))

    def draw_charts(self) -> None:
        """Start to draw the charts."""
        with self._clock.phase(CHART):
            self._warn_of_charts(self._charts.start())

    def warn(self) -> None:
        """Warn of what has failed since the last call."""
        self._warn_of_charts(self._charts.take_failure())
        self._warn_of_tracker(self._tracker.take_failure())
        self._console.warn("--after-checkpoint", self.after_checkpoint.take_failure())

    def finish_charts(self) -> None:
        """Wait for the last charts."""
        with self._clock.phase(CHART):
            self._warn_of_charts(self._charts.finish(
                self._limit(self._watchdog.deadlines.charts)))

    def finish(self) -> str:
        """Wait for all, once the summary is written, whose figures are the tracker's last ones.

        After a stop signal all share the time that is left until the exit; the command is first.

        Returns:
            What failed in --after-checkpoint; empty if nothing, or after a stop signal: then it is
            only a warning.
        """
        deadlines = self._watchdog.deadlines
        self._tracker.end()
        tracker_limit = self._limit(deadlines.tracker)
        failure = self.after_checkpoint.finish(self._command_limit())
        if self._watchdog.stop_signal:
            self._console.warn("--after-checkpoint", failure)
            failure = ""
            self.finish_charts()
        self._warn_of_tracker(self._tracker.finish(tracker_limit))
        return failure

    def _limit(self, seconds: float) -> Callable[[], float]:
        """Return how many seconds, from now on, the last charts or records are waited for."""
        began, deadlines = time.monotonic(), self._watchdog.deadlines

        def limit() -> float:
            left, longest = nearest_limit(self._run.train, self._clock)[0], seconds
            if self._watchdog.stop_signal:
                left = self._seconds_to_stop() - EXIT_SECONDS
                longest = min(seconds, deadlines.after_command)
            return max(0.0, min(longest, time.monotonic() - began + left))

        return limit

    def _command_limit(self) -> Callable[[], float]:
        """Return how many seconds, from now on, --after-checkpoint is waited for."""
        began, deadlines = time.monotonic(), self._watchdog.deadlines
        affordable = max(LEAST_COMMAND_SECONDS, nearest_limit(self._run.train, self._clock)[0])

        def limit() -> float:
            if self._watchdog.stop_signal:
                return time.monotonic() - began + self._seconds_to_stop() - deadlines.after_command
            return min(deadlines.after_checkpoint, affordable)

        return limit

    def _seconds_to_stop(self) -> float:
        """Return the seconds that a stop signal has left to this process."""
        return self._watchdog.stop_by - time.monotonic()

    def _warn_of_charts(self, failure: str) -> None:
        self._console.warn("charts are not up to date", failure)

    def _warn_of_tracker(self, failure: str) -> None:
        self._console.warn(f"tracker {self._run.train.tracker}", failure)
