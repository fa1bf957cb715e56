"""A directory on a file system that lacks calls, as some network file systems do: os says no there.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "TEST_ODD_FILES"  # the directory
Patch = tuple[Any, str, Callable[..., Any]]


def patches(root: Path) -> list[Patch]:
    """Return what refuses links, renames of directories, locks and fsync of directories there."""
    genuine = {name: getattr(os, name) for name in ("symlink", "rename", "fsync")}
    flock, place = fcntl.flock, os.path.realpath(root)

    def is_odd(path: Any) -> bool:
        path = f"/proc/self/fd/{path}" if isinstance(path, int) else os.path.dirname(path)
        return os.path.join(os.path.realpath(path), "").startswith(os.path.join(place, ""))

    def refuse(number: int = errno.EOPNOTSUPP) -> NoReturn:
        raise OSError(number, os.strerror(number))

    def symlink(source: Any, target: Any, *options: Any) -> None:
        refuse(errno.EPERM) if is_odd(target) else genuine["symlink"](source, target, *options)

    def rename(source: Any, target: Any, **options: Any) -> None:
        refuse(errno.ENOSYS) if is_odd(source) else genuine["rename"](source, target, **options)

    def fsync(descriptor: int) -> None:
        if is_odd(descriptor) and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            refuse(errno.EINVAL)
        genuine["fsync"](descriptor)

    def lock(descriptor: int, operation: int) -> None:
        refuse(errno.ENOLCK) if is_odd(descriptor) else flock(descriptor, operation)

    return [(os, "symlink", symlink), (os, "rename", rename), (os, "fsync", fsync),
            (fcntl, "flock", lock)]


def install() -> None:
    """Refuse the calls from now on, below the directory that the environment names, if it does."""
    if root := os.environ.get(VARIABLE):
        for owner, name, replacement in patches(Path(root)):
            setattr(owner, name, replacement)
