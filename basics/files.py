"""Writes that survive a kill or a full disk, and reads of untrusted files."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from basics.errors import UserError

MAX_BYTES = 2**20  # default limit of `read_regular_file`
MAX_HEADER_BYTES = 2**22  # of a safetensors file: about 20,000 tensors
NO_FSYNC = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EINVAL}


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read an untrusted text file. Raises: OSError: as `read_regular_bytes`."""
    return read_regular_bytes(path, max_bytes=max_bytes).decode(errors="replace")


def read_regular_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read an untrusted file. Raises: OSError: as `open_regular`, or it is too large."""
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"has {size:,} bytes")
        return file.read(max_bytes)


def open_regular(path: Path) -> int:
    """Open an untrusted file for reading. Raises: OSError: it is a link, a pipe, a directory."""
    # Without O_NONBLOCK, a pipe that nobody writes to would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a plain file")
    return descriptor


def check_tensor_header(path: Path) -> None:
    """Refuse a safetensors file whose header would take long to read. Raises: OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(f"a header of {length:,} bytes")


def append_whole(path: Path, text: str) -> None:
    """Append all of a text to a file, or nothing. Raises: OSError if the disk is full."""
    content = text.encode()
    with path.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds, and is removed if not.

    Readers see the old file or the new one, never a part; if `durable`, after a power loss too.
    """
    partial = partial_file(path)
    partial.unlink(missing_ok=True)  # a leftover, or a planted link to another file
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync(partial)
    partial.replace(path)
    if durable:
        fsync(path.parent)


def partial_file(path: Path) -> Path:
    """Return the temporary file that replaces another one."""
    return path.with_name(f".{path.name}.partial")


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file's content in one step; see `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk.

    Some file systems cannot do that for directories: these are left as they are.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (error.errno in NO_FSYNC and path.is_dir()):
            raise


def check_inside(path: Path, root: Path, option: str) -> None:
    """Refuse a path that a link leads out of `root`. Raises: UserError."""
    place, limit = map(os.path.realpath, (path, root))  # Path.resolve() raises on loops
    if not Path(place).is_relative_to(limit):
        raise UserError(f"{path}: leads out of {root}; name the directory that it leads to"
                        f" with {option}")
