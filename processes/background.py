"""Processes that work beside training, for rank 0: none of them holds it up, or outlives it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import Any

import psutil

from basics.errors import describe, one_line
from basics.failpoints import failpoint
from basics.machine import PROJECT_DIR
from processes.signals import end_with_parent

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0  # from SIGTERM to SIGKILL
TOLD = 1  # exit status of a process that has said why
LOWEST = ["nice", "-n", "19"]  # priority
# What torchrun and a launch tell their own processes: another launch would take it for its own.
PRIVATE = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|TORCH_NCCL_ASYNC_ERROR_HANDLING|DDP_TRAIN_(\w+_SECONDS|LAUNCH))"
)
THREADS = "OMP_NUM_THREADS"
FEW_RESOURCES = {
    "CUDA_VISIBLE_DEVICES": "",
    THREADS: "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class BackgroundProcess:
    """Runs one process at a time, in a thread: training never waits for its start or its end.

    `pop_failure` returns what the process wrote to standard error. If it failed in another way than
    with status `TOLD` and a line, it also returns how the process ended.

    Args:
        name: the failpoint of `start`, and the name of the thread.
        launch: starts the process, in the thread; None if there is nothing to run.
        advice: appended to what `pop_failure` returns.
    """

    def __init__(
        self, name: str, launch: Callable[[], subprocess.Popen[Any]] | None, *, advice: str = ""
    ) -> None:
        self._name, self._advice = name, advice
        self._launch: Callable[[], subprocess.Popen[Any]] | None = launch  # until it is given up
        self._requests: Queue[None] = Queue(maxsize=1)  # one while another one is worked on
        self._process: subprocess.Popen[Any] | None = None
        self._said: deque[str] = deque()  # by and of the last process
        # One thread for the life of this process: after `end_with_parent`, Linux ends a child when
        # the thread that started it ends.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def start(self) -> None:
        """Start the process; if one runs, another one when it has ended. Any thread."""
        try:
            failpoint(self._name)
            self._requests.put_nowait(None)
        except Full:
            pass  # the one that waits is enough
        except Exception as error:  # it must not end training
            self._said.append(describe(error))

    def pop_failure(self) -> str:
        """Return what was said and failed since the last call; empty if all is well."""
        text = "; ".join(self._said.popleft() for _ in range(len(self._said)))
        return text and text + self._advice

    def finish(
        self, until: Callable[[], float], *, heartbeat: Callable[[], None] = lambda: None
    ) -> str:
        """Wait until nothing runs or is due; return what `pop_failure` does.

        Args:
            until: returns when it is ended, by `time.monotonic`; that may change meanwhile.
        """
        began = time.monotonic()
        while self._requests.unfinished_tasks:
            if time.monotonic() >= until():
                self._launch = None  # a request that waits must not start another process
                if process := self._process:
                    end_group(process)
                return f"not done after {time.monotonic() - began:.0f} s{self._advice}"
            heartbeat()
            time.sleep(POLL_SECONDS)
        return self.pop_failure()

    def _work(self) -> None:
        while True:
            self._requests.get()
            if launch := self._launch:
                self._run(launch)
            self._requests.task_done()

    def _run(self, launch: Callable[[], subprocess.Popen[Any]]) -> None:
        self._said.clear()
        try:
            with launch() as process:
                self._process = process
                if self._launch is None:  # `finish` gave up while this process started
                    end_group(process)
                for line in process.stderr or ():
                    self._said.append(one_line(line.decode(errors="replace").rstrip("\n")))
        except Exception as error:  # it must not end training
            self._said.append(describe(error))
            return
        finally:
            self._process = None  # its id may soon be another process's
        status = process.returncode
        if status < 0:
            self._said.append(
                f"its process was ended by signal {-status} ({signal.strsignal(-status)})"
            )
        elif status and not (status == TOLD and self._said):
            self._said.append(f"ended with status {status}")


def start_module(module: str, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start a module of this project; it inherits no files, so no lock of the run.

    It gets its own process group, so Ctrl-C does not reach it. It stays in this session: Linux may
    divide the cores between sessions, and a priority counts only inside one.
    """
    return subprocess.Popen(
        [*LOWEST, sys.executable, "-m", module, str(run_dir.absolute()), str(os.getpid())],
        cwd=PROJECT_DIR,
        env=environment() | FEW_RESOURCES,
        process_group=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def environment() -> dict[str, str]:
    """Return the environment of this process without what torchrun and the launch have added."""
    added = {THREADS} if torchrun_limits_threads() else set()
    return {
        name: value
        for name, value in os.environ.items()
        if not PRIVATE.fullmatch(name) and name not in added
    }


def torchrun_limits_threads() -> bool:
    """Return whether `THREADS` is 1 because torchrun has set it, which it does if nobody else has.

    The system keeps the environment that a process began with: torchrun's has what a person set.
    """
    if os.environ.get(THREADS) != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        return THREADS not in psutil.Process(os.getppid()).environ()
    except psutil.Error:  # torchrun has just ended, or the system does not tell
        return True


def end_group(process: subprocess.Popen[Any], grace_seconds: float = GRACE_SECONDS) -> None:
    """End a process and what it has started: SIGTERM, after the grace SIGKILL."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk does not end
        process.wait(1)


def serve(work: Callable[[Path, Callable[[str], None]], None]) -> None:
    """Call `work` in the started process, with the run directory and a function `say(line)`."""
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
