"""What is settled before torch is imported: one start at a time, and none without its torchrun."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import sys
from pathlib import Path

from user_error import UserError

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
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            os.close(descriptor)
            descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        raise LockedError(f"{run_dir}: another start is training this run{_holder(run_dir)};"
                          " stop that one first, or wait for its end") from None
    except OSError as error:
        raise LockedError(f"{run_dir}: cannot be written to ({error.strerror}); a run writes its"
                          " checkpoints and charts there") from None


def _holder(run_dir: Path) -> str:
    try:
        beat = json.loads((run_dir / "heartbeat.json").read_text())
        return f": process {beat['pid']} on {beat['host']}, seen at {beat['time']}"
    except (OSError, ValueError, LookupError, TypeError):
        return ", and has only begun"
