"""A checkpoint on disk: write, list, find, prune, set aside."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from basics.errors import UserError
from basics.failpoints import failpoint
from basics.files import fsync
from basics.manifest import find_damage, read_manifest, write_manifest
from run_config import ModelConfig
from trainer.step import Snapshot

CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-(\d{1,12})(-\d{1,6})?")
MAX_META_BYTES = 2**20
PARTIAL_PREFIX = ".partial-"
LATEST, BEST = "latest", "best"


Spent = Annotated[float, Field(ge=0, le=1e12)]
ByPhase = Annotated[dict[str, Spent], Field(max_length=64)]


class CheckpointMeta(BaseModel):
    """`meta.json`: where in the run a checkpoint stands. All sums are over the whole run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    global_step: int = Field(ge=0, lt=2**40)
    tokens: int = Field(ge=0, lt=2**60)
    loss: float | None  # what `best` goes by; none where it was not measured, or not finite
    train_loss: float | None
    seconds: ByPhase
    usd: ByPhase = {}  # empty where the machine's price was not known
    # Of the schedule, where `fit_budget` has laid it out.
    num_steps: int | None = Field(default=None, ge=1, lt=2**40)
    tokenizer: str | None
    owes_validation: bool = False  # a signal came before it: the next start makes up for it
    model: ModelConfig
    random_seed: int
    data: dict[str, str]  # by split, what tells one token file from another


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint found on disk."""

    path: Path
    meta: CheckpointMeta
    remark: str = field(default="", compare=False)  # what went wrong once it had been saved

    @property
    def name(self) -> str:
        return self.path.name

    def facts(self) -> dict[str, Any]:
        """Give what a summary says of it."""
        return {"checkpoint": self.name, "global_step": self.meta.global_step,
                "loss": self.meta.loss}


def save_checkpoint(checkpoints_dir: Path, snapshot: Snapshot, meta: CheckpointMeta) -> Checkpoint:
    """Write a checkpoint aside, give it its name when it is whole, and renew the links. Rank 0.

    With its name it is saved: what goes wrong from there on is a remark.

    Raises:
        OSError: it could not be written; nothing half-written stays.
    """
    if not checkpoints_dir.is_dir():
        checkpoints_dir.mkdir(parents=True)
        fsync(checkpoints_dir.parent)
    name = _new_name(checkpoints_dir, meta.global_step)
    partial_dir = checkpoints_dir / f"{PARTIAL_PREFIX}{name}"
    try:
        _write(partial_dir, snapshot, meta)
        failpoint("save.rename")
        partial_dir.rename(checkpoints_dir / name)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise as_os_error(error) from None
    return Checkpoint(checkpoints_dir / name, meta, _settle(checkpoints_dir))


def _settle(checkpoints_dir: Path) -> str:
    """Have a new name on the disk itself, and the links at it; give what speaks against it."""
    try:
        fsync(checkpoints_dir)
        failpoint("save.links")
        renew_links(checkpoints_dir)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _write(directory: Path, snapshot: Snapshot, meta: CheckpointMeta) -> None:
    """Write a checkpoint's files, each on the disk itself before the manifest vouches for it."""
    directory.mkdir()
    failpoint("save.weights")
    safetensors.torch.save_file(snapshot.weights, directory / "model.safetensors")
    failpoint("save.trainer")
    torch.save(snapshot.trainer, directory / "optimizer.pt")
    failpoint("save.meta")
    (directory / "meta.json").write_text(meta.model_dump_json(indent=2))
    for path in directory.iterdir():
        fsync(path)
    failpoint("save.manifest")
    write_manifest(directory, global_step=meta.global_step, tokens=meta.tokens)
    fsync(directory)


def as_os_error(error: Exception) -> OSError:
    """Find the full disk behind what the writers of files make of it."""
    if isinstance(error, OSError):
        return error
    # PyTorch's writer says only that a file has not the length it wanted.
    if "No space left" in str(error) or "unexpected pos" in str(error):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(errno.EIO, str(error)[:120])


def prune(checkpoints_dir: Path, *, keep: int, protected: Collection[str]) -> None:
    """Remove all but the newest checkpoints, the best one and those protected. Rank 0.

    Nothing is removed unless the newest one proves to be whole.
    """
    checkpoints = list_checkpoints(checkpoints_dir)
    if len(checkpoints) <= keep or find_damage(checkpoints[-1].path, thoroughly=True):
        return
    stay = {checkpoint.name for checkpoint in checkpoints[-keep:]} | set(protected)
    stay.add(best_of(checkpoints).name)
    for checkpoint in checkpoints:
        if checkpoint.name not in stay:
            failpoint("save.prune")
            doomed = checkpoint.path.with_name(f"{PARTIAL_PREFIX}{checkpoint.name}")
            checkpoint.path.rename(doomed)  # gone in one step, whatever comes next
            shutil.rmtree(doomed)


def list_checkpoints(checkpoints_dir: Path) -> list[Checkpoint]:
    """Find the checkpoints that look whole, by global step: clocks can go backwards."""
    found = []
    for path in _named_as_checkpoints(checkpoints_dir):
        try:
            found.append(open_checkpoint(path))
        except UserError:
            continue
    return sorted(found, key=lambda checkpoint: (checkpoint.meta.global_step, checkpoint.name))


def open_checkpoint(path: Path, *, thoroughly: bool = False) -> Checkpoint:
    """Read where a checkpoint stands. Raises: UserError if it is damaged."""
    damage = find_damage(path, thoroughly=thoroughly)
    if not damage:
        try:
            if (path / "meta.json").stat().st_size <= MAX_META_BYTES:
                text, manifest = (path / "meta.json").read_text(), read_manifest(path)
                meta = CheckpointMeta.model_validate_json(text)
                if (meta.global_step, meta.tokens) == (manifest.global_step, manifest.tokens):
                    return Checkpoint(path, meta)
            damage = "meta.json is not that of the manifest"
        except (OSError, ValueError):
            damage = "meta.json cannot be read"
    raise UserError(f"{path}: damaged: {damage}")


def newest_whole(checkpoints_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the checkpoint to go on from, every byte of it checked; and what is wrong with later
    ones.

    Raises:
        UserError: there are checkpoints, and not one is whole: to start over would lose the run.
    """
    warnings: list[str] = []
    for path in reversed(_named_as_checkpoints(checkpoints_dir)):
        try:
            return open_checkpoint(path, thoroughly=True), warnings
        except UserError as error:
            warnings.append(str(error))
    if warnings:
        raise UserError(f"{warnings[0]}; and no other checkpoint is whole: restore one, or start"
                        " over with --fresh")
    return None, warnings


def find_checkpoint(checkpoints_dir: Path, name: str) -> Checkpoint | None:
    """Find `latest` or `best` (none if there is no checkpoint yet), or one by its name.

    Raises:
        UserError: there is none of that name, or it is damaged.
    """
    if name == LATEST:
        return newest_whole(checkpoints_dir)[0]
    if name == BEST:
        best = best_of(list_checkpoints(checkpoints_dir))
        return best and open_checkpoint(best.path, thoroughly=True)
    if checkpoints_dir / name in _named_as_checkpoints(checkpoints_dir):
        try:
            return open_checkpoint(checkpoints_dir / name, thoroughly=True)
        except UserError as error:
            raise UserError(f"{error}; name another checkpoint") from None
    known = ", ".join(checkpoint.name for checkpoint in list_checkpoints(checkpoints_dir)[-3:])
    raise UserError(f"{checkpoints_dir}: no checkpoint {name[:60]!r};"
                    f" it has {known or 'none'}; wanted latest, best or a directory's name")


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The lowest loss, the later one of equals; the latest where none has a loss."""
    return min(
        reversed(checkpoints),
        key=lambda checkpoint: math.inf if checkpoint.meta.loss is None else checkpoint.meta.loss,
        default=None,
    )


def renew_links(checkpoints_dir: Path) -> None:
    """Point `latest` and `best` at what they mean now. Rank 0."""
    checkpoints = list_checkpoints(checkpoints_dir)
    best = best_of(checkpoints)
    if best is not None:
        _replace_link(checkpoints_dir / LATEST, checkpoints[-1].name)
        _replace_link(checkpoints_dir / BEST, best.name)


def remove_partial_checkpoints(checkpoints_dir: Path) -> None:
    """Remove what a process that was killed while saving has left. Rank 0."""
    for path in checkpoints_dir.glob(f"{PARTIAL_PREFIX}*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def set_aside(run_dir: Path, *, from_step: int) -> Path | None:
    """Move checkpoints from a step on, damaged ones too, and a copy of the run's records. Rank 0.

    Nothing is deleted. Gives the directory they are in now, or None if there was none to move.
    """
    checkpoints_dir = run_dir / "checkpoints"
    named = _named_as_checkpoints(checkpoints_dir)
    chosen = [path for path in named if _step_of(path) >= from_step]
    if not chosen:
        return None
    aside_dir = run_dir / "set-aside" / time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    (aside_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for path in [*run_dir.glob("*.json*"), *run_dir.glob("*.png")]:
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, aside_dir / path.name)
    for path in chosen:
        path.rename(aside_dir / "checkpoints" / path.name)
    for link in (checkpoints_dir / LATEST, checkpoints_dir / BEST):
        link.unlink(missing_ok=True)
    renew_links(checkpoints_dir)
    return aside_dir


def _named_as_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Find what bears a checkpoint's name, by global step, whole or not."""
    paths = [path for path in checkpoints_dir.glob("*-iteration-*")
             if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(paths, key=lambda path: (_step_of(path), path.name))


def _step_of(path: Path) -> int:
    return int(CHECKPOINT_NAME.fullmatch(path.name)[1])


def _new_name(checkpoints_dir: Path, global_step: int) -> str:
    name = f"{time.strftime('%Y%m%dZ%H%M%S', time.gmtime())}-iteration-{global_step}"
    unused, copies = name, 0
    while (checkpoints_dir / unused).exists():
        copies += 1
        unused = f"{name}-{copies}"
    return unused


def _replace_link(link: Path, target: str) -> None:
    temporary = link.with_name(f"{PARTIAL_PREFIX}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
