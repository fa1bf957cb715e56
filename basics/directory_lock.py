"""Locks on a directory, which end with the process that holds them."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from basics.errors import UserError, cannot_be_written

LOCK_NAME = ".lock"  # a file, used where the file system cannot lock a directory, as NFS
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


class NoLocksError(OSError):
    """The file system has no locks, as mounts of object stores and some network file systems."""


def lock_directory(directory: Path, *, is_shared: bool = False) -> int:
    """Lock a directory for this process; the lock ends when the returned descriptor is closed.

    A library such as filelock would have to create a file: a launch that is refused writes nothing.

    Args:
        is_shared: other processes may have a shared lock too.

    Raises:
        BlockingIOError: another process holds the lock.
        NoLocksError: the file system has none.
        OSError: the directory is missing or cannot be opened.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        return _lock(directory, os.O_RDONLY, kind)
    except BlockingIOError:
        raise
    except OSError:
        path = directory / LOCK_NAME
    try:
        return _lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, kind)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocksError(error.errno, "its file system has no locks", str(directory)) from None


@contextmanager
def locked(directory: Path, *, busy: str, is_temporary: bool = False) -> Iterator[None]:
    """Create a directory if it is missing, and lock it while the block runs.

    Args:
        busy: the message if another process holds the lock.
        is_temporary: remove the directory again if nothing is left in it.

    Raises:
        UserError: another process holds it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = lock_directory(directory)
    except BlockingIOError:
        raise UserError(busy) from None
    except OSError as error:
        raise cannot_be_written(directory, error) from None
    try:
        yield
    finally:
        if is_temporary:
            with suppress(OSError):
                if {path.name for path in directory.iterdir()} <= {LOCK_NAME}:
                    (directory / LOCK_NAME).unlink(missing_ok=True)
                    directory.rmdir()
        os.close(descriptor)


def _lock(path: Path, flags: int, kind: int) -> int:
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
