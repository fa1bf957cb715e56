"""A checkpoint on disk: write, list, check, load."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from batch_plan import BatchPlan
from gpt import GPTModel
from run_config import ModelConfig, UserError
from training_step import Snapshot, TrainingState

CHECKPOINT_NAME = re.compile(r"\d{8}Z\d{6}-iteration-\d+(-\d+)?")
PARTIAL_PREFIX = ".partial-"
LATEST, BEST = "latest", "best"
# What the readers of damaged files were seen to raise: the unpickler trips over anything.
DAMAGE = (OSError, EOFError, SafetensorError, UnpicklingError, RuntimeError, ValueError, TypeError,
          LookupError, AttributeError)


class CheckpointMeta(BaseModel):
    """`meta.json`: where in the run a checkpoint stands. All sums are over the whole run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    global_step: int
    tokens: int
    loss: float | None  # what `best` goes by; none where it was not measured, or not finite
    train_loss: float | None
    seconds: dict[str, float]  # by phase
    usd: dict[str, float] = {}  # by phase; empty where the machine's price was not known
    num_steps: int | None = None  # of the schedule, where `fit_budget` has laid it out
    tokenizer: str | None


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint found on disk."""

    path: Path
    meta: CheckpointMeta

    @property
    def name(self) -> str:
        return self.path.name


def save_checkpoint(checkpoints_dir: Path, snapshot: Snapshot, meta: CheckpointMeta) -> Checkpoint:
    """Write a checkpoint aside, give it its name when it is whole, and renew the links. Rank 0."""
    name = _new_name(checkpoints_dir, meta.global_step)
    partial_dir = checkpoints_dir / f"{PARTIAL_PREFIX}{name}"
    partial_dir.mkdir(parents=True)
    safetensors.torch.save_file(snapshot.weights, partial_dir / "model.safetensors")
    torch.save(snapshot.trainer, partial_dir / "optimizer.pt")
    (partial_dir / "meta.json").write_text(meta.model_dump_json(indent=2))
    for path in [*partial_dir.iterdir(), partial_dir]:
        _flush(path)
    partial_dir.rename(checkpoints_dir / name)
    _flush(checkpoints_dir)
    renew_links(checkpoints_dir)
    return Checkpoint(checkpoints_dir / name, meta)


def load_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Bring a training state back, in place. Every rank.

    Raises:
        UserError: a file is damaged, or the optimizer's groups have changed since.
    """
    try:
        weights = safetensors.torch.load_file(checkpoint.path / "model.safetensors")
        # weights_only: a checkpoint from elsewhere must not run code.
        trainer = torch.load(checkpoint.path / "optimizer.pt", map_location="cpu",
                             weights_only=True)
        state.model.load_state_dict(weights)
        weight_decays = [group["weight_decay"] for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(trainer["optimizer"])
        for group, weight_decay in zip(state.optimizer.param_groups, weight_decays, strict=True):
            group["weight_decay"] = weight_decay  # the config's word, like the learning rate's
        state.scaler.load_state_dict(trainer["scaler"])
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {_reason(error)}; name another"
                        " checkpoint, or start over with --fresh") from None


def load_weights(checkpoint: Checkpoint, model: GPTModel) -> None:
    """Bring only a model's weights back, in place. Raises: UserError if the file is damaged."""
    try:
        model.load_state_dict(safetensors.torch.load_file(checkpoint.path / "model.safetensors"))
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {_reason(error)}") from None


def list_checkpoints(checkpoints_dir: Path) -> list[Checkpoint]:
    """Find the whole checkpoints, by global step: clocks can go backwards."""
    found = []
    for path in _named_as_checkpoints(checkpoints_dir):
        try:
            text = (path / "meta.json").read_text()
            found.append(Checkpoint(path, CheckpointMeta.model_validate_json(text)))
        except (OSError, ValueError):
            continue  # damaged
    return sorted(found, key=lambda checkpoint: (checkpoint.meta.global_step, checkpoint.name))


def find_checkpoint(checkpoints_dir: Path, name: str) -> Checkpoint | None:
    """Find `latest` or `best` (none if there is no checkpoint yet), or one by its name.

    Raises:
        UserError: there is none of that name, or a directory among them is damaged: to pass it by
            could mean to start a run over.
    """
    checkpoints = list_checkpoints(checkpoints_dir)
    for path in _named_as_checkpoints(checkpoints_dir):
        if path not in {checkpoint.path for checkpoint in checkpoints}:
            raise UserError(f"{path}: its meta.json is missing or cannot be read; restore it, or"
                            " move that directory away")
    if name == LATEST:
        return checkpoints[-1] if checkpoints else None
    if name == BEST:
        return best_of(checkpoints)
    for checkpoint in checkpoints:
        if checkpoint.name == name:
            return checkpoint
    known = ", ".join(checkpoint.name for checkpoint in checkpoints[-3:])
    raise UserError(f"{checkpoints_dir}: no checkpoint {name[:60]!r};"
                    f" it has {known or 'none'}; wanted latest, best or a directory's name")


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The lowest loss, the later one of equals; the latest where none has a loss."""
    return min(
        reversed(checkpoints),
        key=lambda checkpoint: math.inf if checkpoint.meta.loss is None else checkpoint.meta.loss,
        default=None,
    )


def check_weights_fit(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Compare a checkpoint's tensor names and shapes with a model's, without loading either.

    Raises:
        UserError: the file is damaged, or was written by a model of another shape.
    """
    path = checkpoint.path / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({str(error)[:80]});"
                        " name another checkpoint") from None
    with torch.device("meta"):
        wanted = {key: tuple(value.shape) for key, value in GPTModel(model).state_dict().items()}
    for key in sorted(found.keys() | wanted.keys()):
        if found.get(key) != wanted.get(key):
            raise UserError(
                f"{path}: {key} is {found.get(key, 'absent')}, but model.json makes it"
                f" {wanted.get(key, 'absent')}; restore model.json, or start over with --fresh"
            )


def check_position(checkpoint: Checkpoint, plan: BatchPlan) -> None:
    """Refuse to go on with another global batch: data would be read twice, or left out.

    Raises:
        UserError: the checkpoint's tokens are not those of its steps under this plan.
    """
    num_steps = checkpoint.meta.global_step + 1
    if checkpoint.meta.tokens != num_steps * plan.tokens_per_step:
        raise UserError(
            f"{checkpoint.path}: was trained with {checkpoint.meta.tokens // num_steps} tokens a"
            f" step, this start has {plan.tokens_per_step}; change gradient_accumulation_steps or"
            " the number of processes, or set global_batch_size to"
            f" {checkpoint.meta.tokens // num_steps // plan.context_length}; or use --fresh"
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


def set_aside(run_dir: Path, choose: Callable[[Checkpoint], bool]) -> Path | None:
    """Move chosen checkpoints and a copy of the run's records out of the way. Rank 0.

    Nothing is deleted. Gives the directory they are in now, or None if there was none to move.
    """
    checkpoints_dir = run_dir / "checkpoints"
    chosen = [checkpoint for checkpoint in list_checkpoints(checkpoints_dir) if choose(checkpoint)]
    if not chosen:
        return None
    aside_dir = run_dir / "set-aside" / time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    (aside_dir / "checkpoints").mkdir(parents=True)
    for path in [*run_dir.glob("*.json*"), *run_dir.glob("*.png")]:
        shutil.copy2(path, aside_dir / path.name)
    for checkpoint in chosen:
        checkpoint.path.rename(aside_dir / "checkpoints" / checkpoint.name)
    for link in (checkpoints_dir / LATEST, checkpoints_dir / BEST):
        link.unlink(missing_ok=True)
    renew_links(checkpoints_dir)
    return aside_dir


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def _named_as_checkpoints(checkpoints_dir: Path) -> list[Path]:
    paths = checkpoints_dir.glob("*-iteration-*")
    return [path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)]


def _new_name(checkpoints_dir: Path, global_step: int) -> str:
    name = f"{time.strftime('%Y%m%dZ%H%M%S', time.gmtime())}-iteration-{global_step}"
    unused, copies = name, 0
    while (checkpoints_dir / unused).exists():
        copies += 1
        unused = f"{name}-{copies}"
    return unused


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_link(link: Path, target: str) -> None:
    temporary = link.with_name(f"{PARTIAL_PREFIX}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
