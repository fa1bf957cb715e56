"""A lock on a directory that is released when its process ends, and that leaves no file behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK_NAME = ".lock"  # used where the file system cannot lock a directory, for example NFS


def lock_directory(directory: Path) -> int:
    """Lock a directory for this process; closing the returned descriptor releases the lock.

    A library such as filelock would have to create a file, but a refused launch writes nothing.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the directory is missing or cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor
