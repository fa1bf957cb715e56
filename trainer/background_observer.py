"""A process beside training as an observer: what fails in it is a warning."""

import time
from collections.abc import Callable

from processes.background import BackgroundProcess
from reporting.clock import nearest_limit
from reporting.run_log import Report, RunLog
from trainer.launch import Launch
from trainer.observer import Observer

EXIT_SECONDS = 1.0  # between the end of the last wait and the exit, after a stop signal


class BackgroundObserver(Observer):
    """Warns at each report of what has failed in a process that works beside training.

    Nothing that fails, hangs or is slow there stops training. `what` begins the warnings.
    """

    def __init__(
        self, launch: Launch, log: RunLog, background: BackgroundProcess, what: str
    ) -> None:
        self.launch, self.log, self.background, self._what = launch, log, background, what

    def report(self, report: Report) -> None:
        self.warn(self.background.pop_failure())

    def checkpoint(self) -> None:
        self.warn(self.background.pop_failure())  # before another start forgets it

    def warn(self, failure: str) -> None:
        self.log.warn(self._what, failure)

    def wait(self, until: Callable[[], float]) -> str:
        """Wait for the process until a time, by `time.monotonic`; return what has failed."""
        return self.background.finish(until, heartbeat=self.launch.watchdog.heartbeat)

    def until(self, seconds: float, *, least: float = 0.0) -> Callable[[], float]:
        """Return when a wait ends that begins now, after a stop signal or within the budget."""
        began, watchdog = time.monotonic(), self.launch.watchdog
        left, _ = nearest_limit(self.launch.config, self.launch.clock)
        planned = began + min(seconds, max(least, left))
        stopped = began + min(seconds, watchdog.deadlines.after_command)
        return lambda: (
            min(stopped, watchdog.stop_by - EXIT_SECONDS) if watchdog.stop_signal else planned
        )
