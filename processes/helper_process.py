"""Processes that work beside training, for rank 0: they end with it and inherit nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from basics.errors import one_line

PROJECT_DIR = Path(__file__).resolve().parents[1]
TORCHRUN = "MASTER_", "TORCHELASTIC_"  # beginnings of its variables; others end as follows
TORCHRUN_ENDS = "RANK", "WORLD_SIZE"
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1"}


def start_module(module: str, *arguments: str,
                 stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start a module of this project; return at once. It inherits no files, so no lock of the run.

    A process group of its own: Ctrl-C does not reach it. No session of its own: Linux may share
    the cores out by sessions, and a priority counts inside one.
    """
    environment = {key: value for key, value in os.environ.items()
                   if not (key.startswith(TORCHRUN) or key.endswith(TORCHRUN_ENDS))}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=PROJECT_DIR, env=environment | SETTINGS,
        process_group=0, bufsize=0, stdin=stdin, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE)
    os.set_blocking(process.stderr.fileno(), False)  # what it has started may keep it open
    return process


def failure_of(process: subprocess.Popen[bytes], name: str) -> str:
    """Return why a process that has ended failed: the last line that it wrote; empty if not."""
    lines = (process.stderr.read() or b"").decode(errors="replace").strip().splitlines()
    process.stderr.close()
    if process.returncode < 0:
        number = -process.returncode
        return f"the {name} process was ended by signal {number} ({signal.strsignal(number)})"
    if process.returncode:
        return one_line(lines[-1]) if lines else f"exit status {process.returncode}"
    return ""


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk does not end
        process.wait(1)
    process.stderr.close()
