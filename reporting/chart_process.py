"""Draws a run's charts while it trains on: `python -m reporting.chart_process RUN_DIR NICE PID`.

Needs no torch. A drawing reads `metrics.jsonl` itself, so it shows the records of when it began.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from basics.errors import describe
from basics.failpoints import failpoint
from processes.helper_process import failure_of, kill, start_module
from processes.run_lock import end_with_parent

LOWEST, NORMAL = 19, 0  # priorities, as `nice` counts
MAX_SECONDS = 900  # of a drawing; on a machine without spare cores it may take minutes
POLL_SECONDS = 0.25  # between two heartbeats while a drawing is waited for


class ChartProcess:
    """Draws a run's charts in a process of its own, one drawing at a time. Rank 0.

    A failure is returned as text by the next call. On Linux the process ends with this one,
    however that ends.

    Args:
        heartbeat: called while a drawing is waited for.
    """

    def __init__(self, run_dir: Path, *, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._run_dir, self._heartbeat = run_dir, heartbeat
        self._process: subprocess.Popen[bytes] | None = None
        self._is_behind = False  # a drawing was due while another one ran

    def start(self) -> str:
        """Start to draw all records so far, unless a drawing runs; then `finish` does it."""
        failure = self.take_failure()
        try:
            failpoint("chart")
        except Exception as error:
            return describe(error)
        self._is_behind = self._process is not None
        return failure if self._is_behind else self._start(LOWEST) or failure

    def take_failure(self) -> str:
        """Return why the last drawing failed, once; empty if it did not, or still runs."""
        if self._process is None or self._process.poll() is None:
            return ""
        process, self._process = self._process, None
        return failure_of(process, "drawing")

    def finish(self, limit_seconds: Callable[[], float]) -> str:
        """Wait until the charts show all records; end a drawing that takes longer than the limit.

        What still runs is started anew with normal priority: no training is slowed down any more,
        and at the lowest priority another run on this machine could stop it.
        """
        failure = self.take_failure()
        if self._process is not None or self._is_behind:
            self._end()
            failure = self._start(NORMAL) or failure
        waited = 0.0
        while self._process is not None and self._process.poll() is None:
            self._heartbeat()
            if waited >= limit_seconds():
                self._end()
                return f"the drawing took longer than {waited:g} s"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)
            waited += POLL_SECONDS
        return self.take_failure() or failure

    def _start(self, niceness: int) -> str:
        self._is_behind = False
        try:
            self._process = start_process(self._run_dir, niceness)
        except Exception as error:
            return describe(error)
        return ""

    def _end(self) -> None:
        """Kill the drawing that runs, if any, and what it has started."""
        if self._process is None:
            return
        process, self._process = self._process, None
        kill(process)
        for partial in self._run_dir.glob(".*-chart.png.partial"):
            partial.unlink(missing_ok=True)


def start_process(run_dir: Path, niceness: int) -> subprocess.Popen[bytes]:
    """Start a process that draws; return at once."""
    return start_module("reporting.chart_process", str(run_dir.resolve()), str(niceness),
                        str(os.getpid()))


def main(run_dir: Path, niceness: int, parent: int) -> None:
    """Be the process that draws. An error is one line on stderr and exit status 1."""
    os.nice(niceness)
    signal.alarm(MAX_SECONDS)
    end_with_parent()
    if os.getppid() != parent:  # it has ended before
        return
    warnings.simplefilter("ignore")  # nobody reads stderr while this runs: a pipe would fill up
    logging.disable(logging.WARNING)
    try:
        failpoint("draw")
        from reporting.charts import draw_charts  # after the priority is set: this takes a second
        from reporting.metrics_file import read_metrics

        draw_charts(run_dir, read_metrics(run_dir / "metrics.jsonl"))
    except Exception as error:
        sys.exit(describe(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
