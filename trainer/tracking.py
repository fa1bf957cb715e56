"""Sends a run's records to its tracker, in a process beside training."""

import time
from collections.abc import Callable

from reporting.run_log import RunLog
from reporting.tracker import begin_tracking, tracker_process
from trainer.background_observer import BackgroundObserver
from trainer.launch import Launch
from trainer.startup import OpenedDir


class Tracking(BackgroundObserver):
    """The process of a tracker, which is started again with each checkpoint if it has failed."""

    def __init__(self, launch: Launch, log: RunLog) -> None:
        super().__init__(
            launch, log, tracker_process(launch.run), f"tracker {launch.config.tracker}"
        )
        self._until: Callable[[], float] = time.monotonic

    def start(self, opened: OpenedDir) -> None:
        """Start it, once the records of steps that are repeated are gone."""
        try:
            begin_tracking(self.launch.run, starts_over=self.launch.options.fresh)
            self.background.start()
        except OSError as error:
            self.warn(str(error))

    def checkpoint(self) -> None:
        super().checkpoint()
        self.background.start()

    def end(self) -> dict[str, object]:
        """Begin its time; the summary, written next, has the last figures that it sends."""
        self._until = self.until(self.launch.watchdog.deadlines.tracker)
        return {}

    def finish(self) -> None:
        self.warn(self.wait(self._until))
