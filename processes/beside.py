"""Processes that work beside training, for rank 0: none of them holds it up, or outlives it.

`Beside` is their parent; `serve` is what a module calls that is such a process.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from basics.errors import describe, one_line
from basics.failpoints import failpoint
from processes.signals import end_with_parent

PROJECT_DIR = Path(__file__).resolve().parents[1]
LOWEST, NORMAL = 19, 0  # priorities, as `nice` counts
POLL_SECONDS = 0.2
TOLD = 1  # exit status of a process that has said why
# What torchrun and a launch tell their own processes: another launch would take it for its own.
PRIVATE = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING|DDP_TRAIN_(\w+_SECONDS|LAUNCH))")
FEW_RESOURCES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                 "MKL_NUM_THREADS": "1"}


class Beside:
    """Runs one process at a time. Any thread may ask for another one; the newest request wins.

    What it writes to standard error is for the user, and how it ended if it failed otherwise.

    Args:
        name: of the failpoint at its start.
        module: that calls `serve`; Linux ends the process with this one, however that ends.
        heartbeat: called while it is waited for.
        advice: follows what is said of its end.
    """

    grace_seconds = 0.0  # from SIGTERM to SIGKILL
    retry_seconds = math.inf  # from an end that was not asked for to the next start

    def __init__(self, name: str, module: str, run_dir: Path, *,
                 heartbeat: Callable[[], None] = lambda: None, advice: str = "") -> None:
        self._name, self._module, self._run_dir = name, module, run_dir
        self._heartbeat, self._advice = heartbeat, advice
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at, self._niceness = math.inf, LOWEST
        self._said = self._failure = ""  # what it has said, and how it failed: not told yet

    def start(self) -> None:
        """Start the process; if one runs, another one as soon as it is seen to have ended."""
        with self._lock:
            self._start_at = 0.0
            self._go_on()

    def take_failure(self) -> str:
        """Return what was said, and what failed, since the last call; empty if all is well."""
        with self._lock:
            self._go_on()
            said = _joined(self._said, self._failure)
            self._said = self._failure = ""
            return said

    def hurry(self) -> None:
        """Begin what is not done yet again, with normal priority: no training is slowed down."""
        with self._lock:
            self._niceness = NORMAL
            if self._process is not None and self._process.poll() is None:
                self._end(self._process)
                self._start_at = 0.0

    def tell_end(self) -> None:
        """Tell the process on standard input that nothing more comes, and start no other one."""
        self.retry_seconds = self._start_at = math.inf
        if self._process is not None:
            with suppress(OSError):
                self._process.stdin.write(b"end\n")  # type: ignore[union-attr]

    def finish(self, until: Callable[[], float]) -> str:
        """Wait until nothing runs or is due; return what `take_failure` does.

        Args:
            until: returns when it is ended, by `time.monotonic`; that may change meanwhile.
        """
        began = time.monotonic()
        while True:
            with self._lock:
                self._go_on()
                if self._process is None:
                    break
                if time.monotonic() >= until():
                    self._end(self._process)
                    return f"it was ended after {time.monotonic() - began:.0f} s{self._advice}"
            self._heartbeat()
            time.sleep(POLL_SECONDS)
        return self.take_failure()

    def _go_on(self) -> None:
        """Note what the process says, and its end; start it if that is due."""
        if self._process is not None:
            status = self._process.poll()  # before the last words are read
            self._said = _joined(self._said, self._words(self._process))
            if status == 0:
                self._failure = ""  # what failed before is done now
            if status is not None:
                has_told = status == TOLD and self._process.stderr
                if (status or self.retry_seconds < math.inf) and not has_told:
                    end = f"ended with status {status}" if status >= 0 else (
                        f"its process was ended by signal {-status} ({signal.strsignal(-status)})")
                    self._failure = _joined(self._failure, end + self._advice)
                self._forget(self._process)
        if self._process is None and time.monotonic() >= self._start_at:
            self._start_at = math.inf
            try:
                failpoint(self._name)
                self._process = self._launch()
            except Exception as error:  # it must not end training
                self._failure = _joined(self._failure, f"{describe(error)}{self._advice}")
                self._start_at = time.monotonic() + self.retry_seconds

    def _launch(self) -> subprocess.Popen[bytes]:
        return start_module(self._module, self._run_dir, self._niceness)

    def _words(self, process: subprocess.Popen[bytes]) -> str:
        """Return what the process has written; the pipe does not block, others may hold it open."""
        text = (process.stderr.read() if process.stderr else b"") or b""
        return one_line(text.decode(errors="replace").strip().replace("\n", "; "))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        end_group(process, self.grace_seconds)
        self._forget(process)
        self._start_at = math.inf

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in filter(None, (process.stdin, process.stderr)):
            pipe.close()
        self._process = None
        self._start_at = min(self._start_at, time.monotonic() + self.retry_seconds)


def _joined(before: str, more: str) -> str:
    return before if more in before else "; ".join(filter(None, (before, more)))


def start_module(module: str, run_dir: Path, niceness: int) -> subprocess.Popen[bytes]:
    """Start a module of this project; it inherits no files, so no lock of the run.

    A process group of its own: Ctrl-C does not reach it. No session of its own: Linux may share
    the cores out by sessions, and a priority counts inside one.
    """
    process = subprocess.Popen(
        ["nice", "-n", str(niceness), sys.executable, "-m", module, str(run_dir.absolute()),
         str(os.getpid())],
        cwd=PROJECT_DIR, env=environment() | FEW_RESOURCES, process_group=0, bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    os.set_blocking(process.stderr.fileno(), False)  # type: ignore[union-attr]
    return process


def environment() -> dict[str, str]:
    """Return the environment of this process without what torchrun and the launch have added."""
    return {name: value for name, value in os.environ.items() if not PRIVATE.fullmatch(name)}


def end_group(process: subprocess.Popen, grace_seconds: float) -> None:
    """End a process and what it has started: SIGTERM, after the grace SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk does not end
        process.wait(1)


def serve(work: Callable[[Path, Callable[[str], None]], None]) -> None:
    """Be the process: call `work` with the run directory, and what says a line to the user."""
    end_with_parent(int(sys.argv[2]))
    words = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # of packages: it is not shown
    warnings.simplefilter("ignore")

    def say(line: str) -> None:
        with suppress(OSError):
            words.write(one_line(line) + "\n")

    try:
        work(Path(sys.argv[1]), say)
    except BaseException as error:
        say(describe(error))
        os._exit(TOLD)  # packages may wait at the end, for what does not come
