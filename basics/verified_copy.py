"""Copies of checkpoints and of records, read back before they count."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from basics.checkpoint_names import (
    named_as_checkpoints,
    partial_of,
    remove_partial,
    write_directory,
)
from basics.failpoints import failpoint
from basics.files import fsync, replacing, write_atomically
from basics.manifest import MANIFEST, Manifest, find_difference, read_manifest

CHUNK_BYTES = 2**22
LATE_FILES = {"validation.json"}  # written after a checkpoint was saved


def copy_record(source: Path, target: Path, *, max_bytes: int) -> bool:
    """Replace a file by a copy of another one; return False if there is no such plain file.

    Raises:
        OSError: it could not be written, or is larger than `max_bytes`.
    """
    try:
        file = _open_plain(source)
    except FileNotFoundError:
        return False
    with file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(source))
        with replacing(target, durable=True) as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
    return True


def copy_checkpoint(source: Path, checkpoints_dir: Path) -> bool:
    """Copy a checkpoint; it counts when every byte that was written has been read back.

    What the copy has already is not written again. Returns whether anything was copied.

    Raises:
        OSError: it could not be written, or reads back different; no part of it is left.
        ValueError: the source has no manifest any more, or its files do not fit it.
    """
    target = checkpoints_dir / source.name
    if target in named_as_checkpoints(checkpoints_dir):
        return _add_late_files(source, target, read_manifest(source))
    copy_whole(source, target)
    return True


def copy_whole(source: Path, target: Path,
               before_naming: Callable[[], None] = lambda: None) -> None:
    """Copy a checkpoint to where none is; every byte is read back before it gets its name.

    Args:
        before_naming: called between the two; it may be called a second time.

    Raises:
        OSError or ValueError: as `copy_checkpoint`.
    """
    manifest = read_manifest(source)
    remove_partial(partial_of(target))  # of a process that was killed
    with ExitStack() as stack:
        # Open files can be read to their end also when the checkpoint is pruned meanwhile.
        files = {name: stack.enter_context(_open_plain(source / name)) for name in manifest.files}
        for name, file in files.items():
            if os.fstat(file.fileno()).st_size != manifest.files[name].bytes:
                raise ValueError(f"{source / name} has another size than in its manifest")

        def write(place: Path) -> None:
            _write(place, files, manifest)
            before_naming()

        write_directory(target, write, place="copy.rename")
    fsync(target.parent)


def _write(directory: Path, files: dict[str, BinaryIO], manifest: Manifest) -> None:
    directory.mkdir()
    for name, file in files.items():
        failpoint("copy.file")
        file.seek(0)
        with (directory / name).open("xb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
        _flush(directory / name)
    failpoint("copy.verify")
    _check(directory, manifest)
    failpoint("copy.manifest")
    (directory / MANIFEST).write_text(manifest.text())
    fsync(directory / MANIFEST)
    fsync(directory)


def _add_late_files(source: Path, target: Path, manifest: Manifest) -> bool:
    """Add the validation that a checkpoint has got since it was copied."""
    known = read_manifest(target)
    new = {name for name, facts in manifest.files.items() if known.files.get(name) != facts}
    if not new:
        return False
    if not new <= LATE_FILES:
        raise OSError(errno.EEXIST, "is another checkpoint of that name", str(target))
    for name in new:
        failpoint("copy.late")
        with _open_plain(source / name) as file:
            write_atomically(target / name, file.read(manifest.files[name].bytes), durable=True)
    whole = known.model_copy(update={"files": known.files | manifest.files})
    _check(target, whole.model_copy(update={"files": {name: whole.files[name] for name in new}}))
    failpoint("copy.late-manifest")
    write_atomically(target / MANIFEST, whole.text(), durable=True)
    return True


def _check(directory: Path, manifest: Manifest) -> None:
    if difference := find_difference(manifest, directory, thoroughly=True):
        raise OSError(errno.EIO, f"reads back different: {difference}", str(directory))


def _flush(path: Path) -> None:
    """Wait until a file is written, and drop it from the cache: it is to be read back."""
    fsync(path)
    if hasattr(os, "posix_fadvise"):  # not on macOS
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _open_plain(path: Path) -> BinaryIO:
    """Open an untrusted file. Raises: OSError if it is a link, a pipe or a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    return open(descriptor, "rb")
