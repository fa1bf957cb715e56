"""Reading parts of untrusted files that grow, and noticing that they have changed."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from basics.files import open_regular
from reporting.metrics_file import MAX_RECORDS_BYTES


@dataclass(frozen=True)
class Identity:
    """What changes when a file is appended to or replaced."""

    inode: int
    size: int  # bytes
    mtime_ns: int
    is_plain: bool

    @property
    def is_readable(self) -> bool:
        return self.is_plain and self.size <= MAX_RECORDS_BYTES


def identity_of(path: Path) -> Identity | None:
    """Return the identity of a file, of a link that of itself; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return Identity(found.st_ino, found.st_size, found.st_mtime_ns, stat.S_ISREG(found.st_mode))


def read_part(path: Path, start: int, *, max_bytes: int) -> bytes:
    """Read bytes of a file from `start` on, at most so many.

    Raises:
        OSError: as `open_regular`.
    """
    with open(open_regular(path), "rb") as file:
        file.seek(start)
        return file.read(max_bytes)
