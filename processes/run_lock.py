"""The lock on a run directory: one process at a time trains a run. Needs no torch."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from basics.directory_lock import LOCK_NAME, lock_directory
from basics.errors import UserError
from basics.files import read_regular_file

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
# Name and value of an environment variable; without it, SIGUSR1 would kill torchrun.
TORCHRUN_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT"
_descriptors: list[int] = []  # of the run directory that this process has locked, if any


class LockedError(UserError):
    """The run directory is locked by another process, or cannot be written to."""


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when its parent dies, torchrun. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def lock_run(run_dir: Path) -> None:
    """Lock a run directory until `release_run` or the end of this process, however it ends.

    Rank 0 calls it before anything is written there. Commands that only read need no lock.

    Raises:
        LockedError: another process holds the lock, or the directory cannot be written to.
    """
    try:
        for path in (run_dir, run_dir / "checkpoints"):
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        _descriptors.append(lock_directory(run_dir))
    except BlockingIOError:
        raise LockedError(f"{run_dir}: another launch is training this run{_holder(run_dir)};"
                          " stop it, or wait for its end") from None
    except OSError as error:
        raise LockedError(f"{error.filename or run_dir}: cannot be written to ({error.strerror});"
                          " a run writes its checkpoints and charts there") from None


def release_run() -> None:
    """Release the lock of this process, if it holds one."""
    while _descriptors:
        os.close(_descriptors.pop())


def _holder(run_dir: Path) -> str:
    """Describe the process that holds the lock. The heartbeat may be that of a dead process."""
    pid, host = _locking_pid(run_dir), socket.gethostname()
    with suppress(OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        beat = json.loads(read_regular_file(run_dir / "heartbeat.json"))
        if beat["host"] == host:
            is_its_own = beat["pid"] == pid if pid else psutil.pid_exists(beat["pid"])
        else:
            is_its_own = pid is None
        if is_its_own:
            return f": process {beat['pid']} on {beat['host']}, last heartbeat {beat['time']}"
    return f": process {pid} on {host}, which has just begun" if pid else ", which has just begun"


def _locking_pid(run_dir: Path) -> int | None:
    """Return the process on this machine that holds the lock, from the kernel's list of locks."""
    with suppress(OSError, ValueError, IndexError):
        inodes = {str(path.stat().st_ino) for path in (run_dir, run_dir / LOCK_NAME)
                  if path.exists()}
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.split(":")[-1] in inodes:
                return int(pid) if psutil.pid_exists(int(pid)) else None
    return None
