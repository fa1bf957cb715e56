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

from basics.errors import describe, one_line
from basics.failpoints import failpoint
from processes.run_lock import end_with_parent

PROJECT_DIR = Path(__file__).resolve().parents[1]
LOWEST, NORMAL = 19, 0  # priorities, as `nice` counts
MAX_SECONDS = 900  # of a drawing; on a machine without spare cores it may take minutes
POLL_SECONDS = 0.25  # between two heartbeats while a drawing is waited for
TORCHRUN = "MASTER_", "TORCHELASTIC_"  # beginnings of its variables; others end as follows
TORCHRUN_ENDS = "RANK", "WORLD_SIZE"
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1"}


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
        return failure_of(process, "the drawing process")

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
        end_helper(process)
        for partial in self._run_dir.glob(".*-chart.png.partial"):
            partial.unlink(missing_ok=True)


def start_process(run_dir: Path, niceness: int) -> subprocess.Popen[bytes]:
    """Start a process that draws; return at once."""
    return start_helper(["reporting.chart_process", str(run_dir.resolve()), str(niceness),
                         str(os.getpid())])


def start_helper(module: list[str], *,
                 stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a module in a process of its own. It inherits no files, so no lock of the run.

    A process group of its own: Ctrl-C does not reach it. No session of its own: Linux may share
    the cores out by sessions, and a priority counts inside one.

    Args:
        module: its name, and its arguments.
    """
    environment = {key: value for key, value in os.environ.items()
                   if not (key.startswith(TORCHRUN) or key.endswith(TORCHRUN_ENDS))}
    process = subprocess.Popen(
        [sys.executable, "-m", *module], cwd=PROJECT_DIR, env=environment | SETTINGS,
        process_group=0, bufsize=0, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    os.set_blocking(process.stderr.fileno(), False)  # what it has started may keep it open
    return process


def end_helper(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start_helper` has started, and what it has started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk does not end
        process.wait(1)
    process.stderr.close()


def failure_of(process: subprocess.Popen[bytes], name: str) -> str:
    """Return why a process that has ended failed: the last line that it wrote."""
    lines = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
    process.stderr.close()
    if process.returncode < 0:
        number = -process.returncode
        return f"{name} was ended by signal {number} ({signal.strsignal(number)})"
    if process.returncode:
        return one_line(lines[-1]) if lines else f"exit status {process.returncode}"
    return ""


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
