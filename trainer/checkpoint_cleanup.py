"""Which checkpoints of a run are removed or set aside."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from pathlib import Path

from basics.checkpoint_names import (
    BEST,
    LATEST,
    PARTIAL_PREFIX,
    move_directory,
    named_as_checkpoints,
    remove_directory,
    remove_partial,
    step_of,
)
from basics.manifest import find_damage
from basics.run_identity import IDENTITY
from checkpointing import best_of, list_checkpoints, renew_links


def prune(checkpoints_dir: Path, *, keep: int, protected: Collection[str]) -> None:
    """Remove all but the newest checkpoints, the best one and the protected ones. Rank 0.

    Nothing is removed if the newest one is damaged.
    """
    checkpoints = list_checkpoints(checkpoints_dir)
    kept = {checkpoint.name for checkpoint in checkpoints[-keep:]} | set(protected)
    kept |= {checkpoint.name for checkpoint in [best_of(checkpoints)] if checkpoint}
    removed = [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept]
    if not removed or find_damage(checkpoints[-1].path, thoroughly=True):
        return
    for checkpoint in removed:
        remove_directory(checkpoint.path, place="save.prune")


def clean_up(run_dir: Path, *, from_step: int) -> Path | None:
    """Leave whole checkpoints of earlier steps, and links to them, for a launch. Rank 0.

    Returns as `set_aside`, which takes the others.
    """
    remove_partial_checkpoints(run_dir / "checkpoints")
    renew_links(run_dir / "checkpoints")
    return set_aside(run_dir, from_step=from_step)


def remove_partial_checkpoints(checkpoints_dir: Path) -> None:
    """Remove the partial files of a process that was killed while it saved. Rank 0."""
    for path in checkpoints_dir.glob(f"{PARTIAL_PREFIX}*"):
        remove_partial(path)


def set_aside(run_dir: Path, *, from_step: int) -> Path | None:
    """Move checkpoints from a step on, damaged ones too, and those of another run. Rank 0.

    The records are copied. Nothing is deleted. Returns the directory they were moved to, None if
    there was none to move.
    """
    checkpoints_dir = run_dir / "checkpoints"
    foreign = {found.name for found in list_checkpoints(checkpoints_dir, foreign=True)}
    chosen = [path for path in named_as_checkpoints(checkpoints_dir)
              if step_of(path) >= from_step or path.name in foreign]
    if not chosen:
        return None
    now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    aside_dir, number = run_dir / "set-aside" / now, 0
    while aside_dir.exists():
        number += 1
        aside_dir = aside_dir.with_name(f"{now}-{number}")
    (aside_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for path in [*run_dir.glob("*.json*"), *run_dir.glob("*.png")]:
        if path.is_file() and not path.is_symlink() and path.name != IDENTITY:
            shutil.copy2(path, aside_dir / path.name)
    for link in (checkpoints_dir / LATEST, checkpoints_dir / BEST):
        link.unlink(missing_ok=True)
    for path in chosen:
        move_directory(path, aside_dir / "checkpoints" / path.name)
    renew_links(checkpoints_dir)
    return aside_dir
