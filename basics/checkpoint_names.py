"""Directories of checkpoints: their names, the links to them, and which are partial.

A checkpoint is written as `.partial-NAME` and renamed when it is whole. Where a file system cannot
rename directories, as most mounts of object stores, it is written as NAME, its manifest last,
beside a plain file `.partial-NAME`: as long as that is there, NAME is partial. Where there are no
symbolic links, `latest` and `best` are plain files that hold a checkpoint's name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from basics.errors import print_line
from basics.failpoints import failpoint
from basics.files import is_refused, read_regular_file, write_atomically

CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-(\d{1,12})(-\d{1,6})?")
PARTIAL_PREFIX, LATEST, BEST = ".partial-", "latest", "best"
MAX_NAME_BYTES = 128
_can_rename: dict[Path, bool] = {}  # by directory: whether those inside can be renamed


def named_as_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Return the directories that have a checkpoint's name, by global step, whole or not.

    Those that a process writes or removes at this moment, or did when it was killed, are left out.
    """
    paths = [path for path in checkpoints_dir.glob("*-iteration-*")
             if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
             and not partial_of(path).is_file()]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the global step in a checkpoint's name."""
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])


def partial_of(path: Path) -> Path:
    """Return the place that shows that a checkpoint is partial."""
    return path.with_name(f"{PARTIAL_PREFIX}{path.name}")


def write_directory(path: Path, write: Callable[[Path], None], *, place: str) -> None:
    """Let `write` make a directory, which gets its name, or loses its mark, when it is whole.

    Args:
        write: makes the directory that it is given; the last file is the manifest. It may be
            called a second time.
        place: of the failpoint.

    Raises:
        OSError or what `write` raises: nothing is left.
    """
    partial = partial_of(path)
    try:
        if can_rename_directories(path.parent):
            write(partial)
            failpoint(place)
            if _renamed(partial, path):
                return
            shutil.rmtree(partial)
        partial.touch()
        write(path)
        failpoint(place)
        partial.unlink()
    except BaseException:
        with suppress(OSError):
            remove_partial(partial)
        raise


def remove_directory(path: Path, *, place: str) -> None:
    """Remove a checkpoint; a kill leaves a whole one or a partial one. Raises: OSError."""
    failpoint(place)
    partial = partial_of(path)
    if can_rename_directories(path.parent) and _renamed(path, partial):
        shutil.rmtree(partial)
        return
    partial.touch()
    remove_partial(partial)


def move_directory(path: Path, target: Path) -> None:
    """Move a checkpoint to another directory of its file system. Raises: OSError."""
    if not (can_rename_directories(path.parent) and _renamed(path, target)):
        shutil.copytree(path, target, dirs_exist_ok=True)  # a kill may have cut one off
        remove_directory(path, place="move.remove")


def remove_partial(partial: Path) -> None:
    """Remove what a `.partial-` entry shows to be partial, then the entry. Raises: OSError."""
    path = partial.with_name(partial.name.removeprefix(PARTIAL_PREFIX))
    if not partial.is_symlink():
        if partial.is_dir():
            return shutil.rmtree(partial)
        if partial.is_file() and CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path)
    partial.unlink(missing_ok=True)


def partial_files(checkpoints_dir: Path) -> Iterator[Path]:
    """Yield the files of the checkpoints that are being written."""
    for partial in checkpoints_dir.glob(f"{PARTIAL_PREFIX}*"):
        yield from partial.glob("*")
        yield from partial.with_name(partial.name.removeprefix(PARTIAL_PREFIX)).glob("*")


def can_rename_directories(parent: Path) -> bool:
    """Return whether a file system can rename directories; once for each `parent`, by trying."""
    if parent not in _can_rename:
        probe, renamed = (parent / f"{PARTIAL_PREFIX}{name}" for name in ("probe", "renamed"))
        for leftover in (probe, renamed):
            shutil.rmtree(leftover, ignore_errors=True)
        probe.mkdir()
        (probe / "file").write_text("x")
        shutil.rmtree(renamed if _renamed(probe, renamed) else probe, ignore_errors=True)
    return _can_rename[parent]


def _renamed(path: Path, target: Path) -> bool:
    """Rename a directory; return whether the file system can. Raises: OSError."""
    try:
        path.rename(target)
    except OSError as error:
        if not is_refused(error) and error.errno != errno.EMFILE:  # gcsfuse: it has many files
            raise
        if _can_rename.get(path.parent, True):
            print_line(f"{path.parent}: its file system cannot rename directories; a checkpoint is"
                       " written under its name, and its manifest last")
        _can_rename[path.parent] = False
        return False
    _can_rename[path.parent] = True
    return True


def replace_link(link: Path, target: str) -> None:
    """Let `latest` or `best` name a checkpoint. Raises: OSError."""
    temporary = partial_of(link)
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
        temporary.replace(link)
    except OSError as error:
        if not is_refused(error):
            raise
        temporary.unlink(missing_ok=True)
        write_atomically(link, f"{target}\n")


def directory_of(place: Path) -> Path:
    """Return the checkpoint that a path names, also where `latest` and `best` are plain files."""
    if place.name in (LATEST, BEST) and place.is_file() and (name := linked_name(place)):
        return place.with_name(name)
    return place


def linked_name(link: Path) -> str:
    """Return which checkpoint `latest` or `best` names; empty if it names none beside it."""
    try:
        name = os.readlink(link) if link.is_symlink() else (
            read_regular_file(link, max_bytes=MAX_NAME_BYTES).removesuffix("\n"))
    except OSError:
        return ""
    return name if CHECKPOINT_NAME.fullmatch(name) and (link.parent / name).is_dir() else ""


def is_link(link: Path) -> bool:
    """Return whether `latest` or `best` is what a run may have written; a kill may empty it."""
    if link.is_symlink() or linked_name(link):
        return True
    found = link.lstat()
    return stat.S_ISREG(found.st_mode) and not found.st_size
