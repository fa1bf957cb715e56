"""Draws the charts of a run beside training, after each checkpoint."""

from processes import beside
from processes.beside import Beside
from reporting.clock import CHART
from reporting.run_log import RunLog
from trainer.launch import Launch
from trainer.side_process import SideProcess


class ChartDrawing(SideProcess):
    """The process that draws charts. The last ones are waited for before the summary is written.

    After a stop signal they are waited for at the very end: other files are more important.
    """

    def __init__(self, launch: Launch, log: RunLog) -> None:
        run_dir = launch.run.run_dir
        process = Beside("chart", lambda: beside.start_module("reporting.charts", run_dir))
        super().__init__(launch, log, process, "charts are not up to date")

    def checkpoint(self) -> None:
        with self.launch.clock.phase(CHART):
            self.beside.start()
        self.warn(self.beside.pop_failure())

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
