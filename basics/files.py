"""Writes that survive a kill or a full disk, and reads of untrusted files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from basics.errors import UserError

MAX_BYTES = 2**20  # default limit of `read_regular_file`
MAX_RECOVERED_BYTES = 2**28  # of records
MAX_HEADER_BYTES = 2**22  # of a safetensors file: about 20,000 tensors
# What file systems answer that lack a call: links, appending, renaming, fsync of a directory.
REFUSALS = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EINVAL}
# Where a file system cannot append, a file of up to SMALL_BYTES is rewritten at each append, a
# larger one when the text that waits has a HELD_SHARE-th of its size.
SMALL_BYTES, HELD_SHARE = 2**20, 16
_held: dict[Path, str] = {}  # text that waits, by file; a file that can be appended to has no entry
_held_lock = threading.Lock()


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read an untrusted text file. Raises: OSError: as `read_regular_bytes`."""
    return read_regular_bytes(path, max_bytes=max_bytes).decode(errors="replace")


def read_regular_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read an untrusted file.

    Raises:
        OSError: it is a link, a pipe or a directory, or larger than `max_bytes`.
    """
    with open(open_regular(path), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"has {size:,} bytes")
        return file.read(max_bytes)


def open_regular(path: Path) -> int:
    """Open an untrusted file for reading.

    Raises:
        OSError: it is a link, a pipe or a directory, or cannot be read.
    """
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


def is_refused(error: OSError) -> bool:
    """Return whether a file system has answered that it lacks a call."""
    return error.errno in REFUSALS


def append_whole(path: Path, text: str, *, may_wait: bool = False) -> None:
    """Append all of a text to a file, or nothing. Raises: OSError if the disk is full.

    Where the file system cannot append, as most mounts of object stores, the file is rewritten.

    Args:
        may_wait: do not rewrite a large file at each call; `write_held` writes what waits.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link")
    with _held_lock:
        if path not in _held:
            try:
                return _append(path, text)
            except OSError as error:
                if not is_refused(error):
                    raise
        text = _held.get(path, "") + text
        size = path.stat().st_size if path.exists() else 0
        if not may_wait or size <= SMALL_BYTES or len(text) * HELD_SHARE >= size:
            _rewrite(path, text)
            text = ""
        _held[path] = text


def write_held(path: Path) -> None:
    """Write what `append_whole` holds back of a file. Any thread. Raises: OSError."""
    with _held_lock:
        if _held.get(path):
            _rewrite(path, _held[path])
            _held[path] = ""


def _append(path: Path, text: str) -> None:
    with path.open("ab", buffering=0) as file:
        length = file.tell()
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(length)
            raise


def _rewrite(path: Path, text: str) -> None:
    content = path.read_bytes() if path.exists() else b""
    write_atomically(path, content + text.encode())


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds, and is removed if not.

    Readers see the old file or the new one, never a part. Where the file system cannot rename
    files, the content is copied into `path`; until that is whole, the temporary file stays, so that
    a kill leaves one of the two whole: see `recover`.

    Args:
        durable: call fsync, so that this holds after a power loss too.
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
    try:
        partial.replace(path)
    except OSError as error:
        if not is_refused(error):
            raise
        _copy_into_place(partial, path)
    if durable:
        fsync(path.parent)


def partial_file(path: Path) -> Path:
    """Return the temporary file that replaces another one."""
    return path.with_name(f".{path.name}.partial")


def _copy_into_place(partial: Path, path: Path) -> None:
    fsync(partial)
    if path.is_symlink():
        path.unlink()
    shutil.copyfile(partial, path)
    fsync(path)
    partial.unlink()


def recover(path: Path) -> None:
    """Finish a replacement that a kill has cut off where files cannot be renamed.

    The file is then the beginning of its temporary copy; otherwise that is not whole, and goes.
    """
    partial = partial_file(path)
    if not partial.is_file() or partial.is_symlink():
        return
    is_known = path.exists() and partial.stat().st_size <= MAX_RECOVERED_BYTES
    if is_known and partial.read_bytes().startswith(path.read_bytes()):
        shutil.copyfile(partial, path)
    partial.unlink()


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
        if not (is_refused(error) and path.is_dir()):
            raise


def check_inside(path: Path, root: Path, option: str) -> None:
    """Refuse a path that a link leads out of `root`. Raises: UserError."""
    place, limit = map(os.path.realpath, (path, root))  # Path.resolve() raises on loops
    if not Path(place).is_relative_to(limit):
        raise UserError(f"{path}: leads out of {root}; name the directory that it leads to"
                        f" with {option}")
