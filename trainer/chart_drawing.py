"""Draws the charts of a run beside training, after each checkpoint."""

from processes import background
from processes.background import BackgroundProcess
from reporting.clock import CHART
from reporting.run_log import RunLog
from trainer.background_observer import BackgroundObserver
from trainer.launch import Launch


class ChartDrawing(BackgroundObserver):
    """The process that draws charts. The last ones are waited for before the summary is written.

    After a stop signal they are waited for at the very end: other files are more important.
    """

    def __init__(self, launch: Launch, log: RunLog) -> None:
        run_dir = launch.run.run_dir
        process = BackgroundProcess(
            "chart",
            lambda: background.start_module("reporting.charts", run_dir),
            advice="; the next launch draws them",
        )
        super().__init__(launch, log, process, "charts are not up to date")

    def checkpoint(self) -> None:
        super().checkpoint()
        with self.launch.clock.phase(CHART):
            self.background.start()

    def end(self) -> dict[str, object]:
        if not self.launch.watchdog.stop_signal:
            self._wait_for_last()
        return {}

    def finish(self) -> None:
        if self.launch.watchdog.stop_signal:
            self._wait_for_last()

    def _wait_for_last(self) -> None:
        with self.launch.clock.phase(CHART):
            self.warn(self.wait(self.until(self.launch.watchdog.deadlines.charts)))
