"""The processes that work beside training: charts, the tracker, the second copy."""

from __future__ import annotations

from processes.watchdog import Watchdog
from reporting.chart_process import ChartProcess
from reporting.clock import CHART, PhaseClock
from reporting.console import Console
from reporting.tracker_process import TrackerProcess
from trainer.budget import Budget
from trainer.second_copy import SecondCopy
from trainer.startup import PreparedRun


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
        self._second_copy = SecondCopy(self._run, prepared.copy_dir,
                                       from_step=prepared.first_step,
                                       heartbeat=watchdog.heartbeat)

    def copy(self) -> None:
        """Bring the second copy up to date, as soon as the process is free. Any thread."""
        self._second_copy.update()

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
        self._warn_of_copy(self._second_copy.take_failure())

    def finish_charts(self) -> None:
        """Wait for the last charts."""
        with self._clock.phase(CHART):
            self._warn_of_charts(self._charts.finish(
                lambda: self._limit(self._watchdog.deadlines.charts)))

    def finish(self) -> None:
        """Wait for all: the summary is written, whose figures are the tracker's last ones.

        After a stop signal little time is left: the copy goes before the charts.
        """
        self._tracker.end()
        deadlines, is_stopping = self._watchdog.deadlines, bool(self._watchdog.stop_signal)
        self._warn_of_copy(self._second_copy.finish(
            deadlines.last_write if is_stopping else deadlines.second_copy))
        if is_stopping:
            self.finish_charts()
        self._warn_of_tracker(self._tracker.finish(lambda: self._limit(deadlines.tracker)))

    def _limit(self, seconds: float) -> float:
        """Return how many seconds the last charts or records are waited for."""
        if self._watchdog.stop_signal:
            seconds = self._watchdog.deadlines.last_write
        return max(0.0, min(seconds, Budget(self._run.train, self._clock).seconds_left()))

    def _warn_of_charts(self, failure: str) -> None:
        self._console.warn("charts are not up to date", failure)

    def _warn_of_tracker(self, failure: str) -> None:
        self._console.warn(f"tracker {self._run.train.tracker}", failure)

    def _warn_of_copy(self, failure: str) -> None:
        self._console.warn(f"the second copy in {self._prepared.copy_dir} is not up to date",
                           failure)
