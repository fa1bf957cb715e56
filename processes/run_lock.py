"""What is settled before torch is imported: one start at a time, and none without its torchrun."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from basics.errors import UserError
from basics.files import read_plain

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
LOCK_NAME = ".lock"  # where directories cannot be locked, as on NFS


class LockedError(UserError):
    """A run directory that this start cannot have."""


def end_with_parent() -> None:
    """Have this process asked to stop when torchrun dies, which could not do it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def lock_run(run_dir: Path) -> int:
    """Take a run directory for this process. Rank 0, before anything is written there.

    The lock is the operating system's: it ends with the process, however that ends, and with the
    file descriptor that is given back here. Reading commands take none.

    Raises:
        LockedError: another start has it, or nothing can be written to the directory.
    """
    try:
        for place in (run_dir, run_dir / "checkpoints"):
            if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        descriptor = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            os.close(descriptor)
            descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        raise LockedError(f"{run_dir}: another start is training this run{_holder(run_dir)};"
                          " stop that one first, or wait for its end") from None
    except OSError as error:
        raise LockedError(f"{error.filename or run_dir}: cannot be written to ({error.strerror}); a"
                          " run writes its checkpoints and charts there") from None


def _holder(run_dir: Path) -> str:
    """Say who has the lock, as far as can be seen. The heartbeat may be that of a dead process."""
    pid, host = _locking_pid(run_dir), socket.gethostname()
    with suppress(OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        beat = json.loads(read_plain(run_dir / "heartbeat.json"))
        is_here = beat["host"] == host
        if is_here and beat["pid"] == (pid or _living(beat["pid"])) or not (is_here or pid):
            return f": process {beat['pid']} on {beat['host']}, seen at {beat['time']}"
    return f": process {pid} on {host}, which has only begun" if pid else ", and has only begun"


def _locking_pid(run_dir: Path) -> int | None:
    """Find the process of this machine that has the lock, in what the kernel lists of them."""
    with suppress(OSError, ValueError, IndexError):
        inodes = {str(path.stat().st_ino) for path in (run_dir, run_dir / LOCK_NAME)
                  if path.exists()}
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.split(":")[-1] in inodes:
                return _living(int(pid))
    return None


def _living(pid: int) -> int | None:
    """Give a process id back if there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # somebody else's
        pass
    return pid if pid > 0 else None
