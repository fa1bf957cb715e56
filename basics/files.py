"""Files written so that a kill or a full disk leaves them whole, and read without trusting them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 2**20  # of a file that `read_plain` reads, where its caller sets no other limit
MAX_HEADER_BYTES = 2**22  # of a safetensors file: some 20,000 tensors


def read_plain(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read what a program has written, where a stranger may have laid something else.

    Raises:
        OSError: it is no file but a link, a pipe or a directory, or it is too large.
    """
    # A pipe that nobody writes to would have its reader wait.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes).decode(errors="replace")
    finally:
        os.close(descriptor)


def check_tensor_header(path: Path) -> None:
    """Refuse a safetensors file whose header would take long to read. Raises: OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(f"a header of {length:,} bytes")


def append_whole(path: Path, text: str) -> None:
    """Append to a file, or leave it as it was. Raises: OSError if the disk is full."""
    with path.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


def write_aside(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file in one step, so that a reader sees the old one or the new one.

    Args:
        durable: call fsync, so that after a power loss too one of the two is there.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a link may lie there, to what is somebody else's
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    if durable:
        fsync(partial)
    partial.replace(path)
    if durable:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
