"""A lock on a directory that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK_NAME = ".lock"  # a file, used where the file system cannot lock a directory, as NFS


def lock_directory(directory: Path) -> int:
    """Lock a directory for this process; the lock ends when the returned descriptor is closed.

    A library such as filelock would have to create a file: a launch that is refused writes nothing.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the directory is missing or cannot be opened.
    """
    try:
        return _lock(directory, os.O_RDONLY)
    except BlockingIOError:
        raise
    except OSError:
        return _lock(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def is_lock_of(directory: Path, descriptor: int) -> bool:
    """Return whether an open file is the one that `lock_directory` locks. Raises: OSError."""
    opened = os.fstat(descriptor)
    return any(path.exists() and os.path.samestat(path.stat(), opened)
               for path in (directory, directory / LOCK_NAME))


def _lock(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
