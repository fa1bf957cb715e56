"""Directories of checkpoints: their names, which of them are partial, and the links to them.

A checkpoint's manifest is written last and removed first. A directory without one is partial: it is
being written or removed, or a kill has left it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from basics.files import partial_file, read_regular_file, write_atomically
from basics.manifest import MANIFEST

CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-(\d{1,12})(-\d{1,6})?")
LATEST, BEST = "latest", "best"


def named_as_checkpoints(checkpoints_dir: Path, *, partial: bool = False) -> list[Path]:
    """Return the directories with a checkpoint's name and a manifest, by global step.

    Args:
        partial: instead those without a manifest.
    """
    paths = [path for path in checkpoints_dir.glob("*-iteration-*")
             if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
             and (path / MANIFEST).exists() != partial]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the global step in a checkpoint's name."""
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])  # type: ignore[index]


def replace_link(link: Path, target: str) -> None:
    """Let `latest` or `best` name a checkpoint. Raises: OSError."""
    temporary = partial_file(link)
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
        temporary.replace(link)
    except OSError:  # the file system may have no links
        write_atomically(link, f"{target}\n")


def directory_of(place: Path) -> Path:
    """Return the checkpoint that a path names, also where `latest` and `best` are plain files."""
    if place.name in (LATEST, BEST) and place.is_file():
        with suppress(OSError):
            name = read_regular_file(place).removesuffix("\n")
            if CHECKPOINT_NAME.fullmatch(name):
                return place.with_name(name)
    return place
