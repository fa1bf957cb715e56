"""Checkpoints: the training state of a run in memory, on disk, and back.

A checkpoint is a directory of safetensors and JSON files: reading an untrusted one runs no code. It
is written under a temporary name, renamed when it is whole, and validated afterwards.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from basics.checkpoint_names import (
    BEST,
    LATEST,
    named_as_checkpoints,
    replace_link,
    write_directory,
)
from basics.errors import UserError, as_os_error, first_line
from basics.failpoints import failpoint
from basics.files import fsync, read_regular_file, write_atomically
from basics.manifest import (
    add_to_manifest,
    find_damage,
    find_oversized,
    read_manifest,
    write_manifest,
)
from basics.run_identity import Name, read_identity
from basics.tensor_files import read_tensors, write_tensors
from basics.text import SNAPSHOT_BLOCK_BYTES
from gpt import GPTModel, num_parameters
from run_config import ModelConfig

WEIGHTS, OPTIMIZER, META, VALIDATION, TOKENIZER = (
    "model.safetensors", "optimizer.safetensors", "meta.json", "validation.json", "tokenizer.json")
ROOM_BYTES = 2**26  # of a file, beside its tensors: headers, a tokenizer
EARLIER = "average.safetensors"  # of earlier versions; not read
FILES = {WEIGHTS, OPTIMIZER, META, VALIDATION, TOKENIZER, EARLIER}
# An optimizer's state of one parameter.
ADAMW_STATE, MUON_STATE = ("step", "exp_avg", "exp_avg_sq"), ("momentum",)
ALIGNMENT = 64  # bytes, of a tensor in a block
DAMAGE = (OSError, SafetensorError, RuntimeError, ValueError, LookupError)  # raised by readers

ByPhase = Annotated[dict[str, Annotated[float, Field(ge=0, le=1e12)]], Field(max_length=64)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LossScale(_Record):
    """The state of fp16's gradient scaler."""

    scale: float = Field(gt=0)
    growth_tracker: int = Field(ge=0, lt=2**31)


class CheckpointMeta(_Record):
    """`meta.json`: the position in the run. All sums are over the whole run, not one launch."""

    identity: Name = ""  # of the run: see `basics/run_identity.py`
    global_step: int = Field(ge=0, lt=2**40)
    tokens: int = Field(ge=0, lt=2**60)
    loss: float | None  # decides `best` in runs without validation; None if not finite
    train_loss: float | None
    seconds: ByPhase
    usd: ByPhase = {}  # empty if the machine's price was not known
    num_steps: int | None = Field(default=None, exclude=True, ge=1, lt=2**40)  # once written
    optimizer: str = "adamw"
    code: str = ""  # that trained up to here: a commit, or a version and a digest
    tokenizer: str | None
    tokenizer_file: bytes | None = Field(default=None, exclude=True)  # written beside `meta.json`
    loss_scale: LossScale | None = None  # only in fp16
    model: ModelConfig
    random_seed: int
    data: dict[str, str]  # fingerprints of the token files by split, start tokens by key


class Validation(_Record):
    """`validation.json`: the result of validating a checkpoint."""

    loss: float | None  # nats per token; None if not finite
    seconds: ByPhase = {}  # of the run up to here, as in `meta.json`
    usd: ByPhase = {}

    @model_validator(mode="before")
    @classmethod
    def _of_the_weights(cls, values: Any) -> Any:
        """Take the weights' own loss where an earlier version has that of their average too."""
        if not isinstance(values, dict):
            return values  # refused as damage
        raw_loss = values.get("raw_loss")
        known = {key: value for key, value in values.items() if key != "raw_loss"}
        return known if raw_loss is None else known | {"loss": raw_loss}


@dataclass(frozen=True)
class TrainingState:
    """The unwrapped model, the optimizer, the gradient scaler: nothing else has a state to save."""

    model: GPTModel
    optimizer: Optimizer
    scaler: GradScaler

    def loss_scale(self) -> LossScale | None:
        """Return the scaler's state; None if it is disabled. In fp16 this waits for the device."""
        if not self.scaler.is_enabled():
            return None
        state = self.scaler.state_dict()
        return LossScale(scale=state["scale"], growth_tracker=state["_growth_tracker"])


@dataclass(frozen=True)
class Snapshot:
    """A copy in host memory of a state's tensors, as the safetensors files hold them."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # by "exp_avg/<parameter's name>"


class SnapshotBuffers:
    """Reused host buffers for snapshots: each snapshot overwrites the last one.

    They are parts of large blocks: PyTorch rounds pinned memory up to the next power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._free = torch.empty(0, dtype=torch.uint8)  # the rest of the last block

    def take(self, state: TrainingState) -> Snapshot:
        """Copy a state. Waits for the device until the copy is complete."""
        weights = {name: self._copy(name, tensor)
                   for name, tensor in state.model.state_dict().items()}
        moments = {f"{moment}/{name}": self._copy(f"{moment}/{name}", tensor)
                   for name, parameter in state.model.named_parameters()
                   for moment, tensor in state.optimizer.state[parameter].items()}
        if any(tensor.is_cuda for tensor in state.model.parameters()):
            torch.cuda.synchronize()
        return Snapshot(weights, moments)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if len(self._free) < size:
                self._free = torch.empty(max(size, SNAPSHOT_BLOCK_BYTES), dtype=torch.uint8,
                                         pin_memory=tensor.is_cuda)
            part, self._free = self._free[: tensor.nbytes], self._free[size:]
            self._buffers[name] = part.view(tensor.dtype).view(tensor.shape)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=True)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    meta: CheckpointMeta
    validation: Validation | None = None  # None until it has been validated
    remark: str = field(default="", compare=False)  # what failed after it was saved

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def loss(self) -> float | None:
        """The loss that decides which checkpoint is `best`."""
        return (self.validation or self.meta).loss

    def facts(self) -> dict[str, Any]:
        """Return what `summary.json` records of it."""
        return {"checkpoint": self.name, "global_step": self.meta.global_step, "loss": self.loss}


def save_checkpoint(checkpoints_dir: Path, snapshot: Snapshot, meta: CheckpointMeta) -> Checkpoint:
    """Write a checkpoint under a temporary name, rename it when it is whole, renew links. Rank 0.

    After the rename it is saved: what fails from there on is only a remark. Without renames: see
    `basics/checkpoint_names.py`.

    Raises:
        OSError: it could not be written; no partial checkpoint is left.
    """
    if not checkpoints_dir.is_dir():
        checkpoints_dir.mkdir(parents=True)
        fsync(checkpoints_dir.parent)
    name = _new_name(checkpoints_dir, meta.global_step)
    try:
        write_directory(checkpoints_dir / name, lambda place: _write(place, snapshot, meta),
                        place="save.rename")
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: out of memory
        raise as_os_error(error) from None
    return Checkpoint(checkpoints_dir / name, meta, remark=_sync_and_link(checkpoints_dir))


def add_validation(checkpoint: Checkpoint, validation: Validation) -> Checkpoint:
    """Add a validation to a saved checkpoint, and renew the links. Rank 0.

    Raises:
        OSError: it could not be written; the checkpoint is whole, and not validated.
    """
    text = validation.model_dump_json() + "\n"
    write_atomically(checkpoint.path / VALIDATION, text, durable=True)
    failpoint("save.validation")
    add_to_manifest(checkpoint.path, VALIDATION)
    return replace(checkpoint, validation=validation,
                   remark=_sync_and_link(checkpoint.path.parent))


def _sync_and_link(checkpoints_dir: Path) -> str:
    """Make new names durable and renew the links; return what failed, empty if nothing did."""
    try:
        fsync(checkpoints_dir)
        failpoint("save.links")
        renew_links(checkpoints_dir)
    except (OSError, UserError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _write(directory: Path, snapshot: Snapshot, meta: CheckpointMeta) -> None:
    """Write a checkpoint's files and fsync each of them before the manifest lists them."""
    directory.mkdir()
    failpoint("save.weights")
    write_tensors(directory / WEIGHTS, snapshot.weights)
    failpoint("save.optimizer")
    write_tensors(directory / OPTIMIZER, snapshot.moments)
    failpoint("save.meta")
    (directory / META).write_text(meta.model_dump_json(indent=2))
    if meta.tokenizer_file is not None:
        (directory / TOKENIZER).write_bytes(meta.tokenizer_file)
    for path in directory.iterdir():
        fsync(path)
    failpoint("save.manifest")
    write_manifest(directory, global_step=meta.global_step, tokens=meta.tokens)
    fsync(directory)


def list_checkpoints(checkpoints_dir: Path, *, foreign: bool = False) -> list[Checkpoint]:
    """Return the run's checkpoints whose sizes are right, by global step, not by their times.

    Args:
        foreign: instead those that the run has left, or that are another run's.

    Raises:
        UserError: the run's identity cannot be read.
    """
    found, identity = [], read_identity(checkpoints_dir.parent)
    for path in named_as_checkpoints(checkpoints_dir):
        with suppress(UserError):
            checkpoint = open_checkpoint(path)
            meta = checkpoint.meta
            belongs = identity is None or identity.includes(meta.identity, meta.global_step)
            if belongs != foreign:
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: (checkpoint.meta.global_step, checkpoint.name))


def open_checkpoint(path: Path, *, thoroughly: bool = False,
                    model: ModelConfig | None = None) -> Checkpoint:
    """Read a checkpoint's JSON files. Raises: UserError if it is damaged.

    Args:
        thoroughly: read every byte and compare digests, about a second a GB.
        model: of the run that would resume. A checkpoint of a larger one, which could say that it
            has terabytes, is not read: `check_same_run` refuses it.
    """
    damage = find_damage(path)
    if not damage:
        try:
            manifest = read_manifest(path)
            meta = CheckpointMeta.model_validate_json(read_regular_file(path / META))
            thoroughly &= model in (None, meta.model) or (
                num_parameters(meta.model) <= num_parameters(model))
            validation = None
            if VALIDATION in manifest.files:
                validation = Validation.model_validate_json(read_regular_file(path / VALIDATION))
            checkpoint = Checkpoint(path, meta, validation)
            if (meta.global_step, meta.tokens) != (manifest.global_step, manifest.tokens):
                damage = f"{META} does not agree with the manifest"
            elif thoroughly:
                # AdamW's two moments are the largest file, in float32.
                limit = 8 * num_parameters(meta.model) + ROOM_BYTES
                damage = find_oversized(manifest, FILES, limit) or find_damage(
                    path, thoroughly=True)
            if not damage:
                return checkpoint
        except (OSError, ValueError):
            damage = f"{META} or {VALIDATION} cannot be read"
    raise UserError(f"{path}: damaged: {damage}")


def newest_whole(checkpoints_dir: Path, model: ModelConfig | None = None
                 ) -> tuple[Checkpoint | None, list[str]]:
    """Return the run's newest checkpoint whose every byte is right, and warnings about later ones.

    Args:
        model: as of `open_checkpoint`.

    Raises:
        UserError: there are checkpoints, but none is whole: starting over would lose the run.
    """
    damaged: list[str] = []
    foreign = {found.name for found in list_checkpoints(checkpoints_dir, foreign=True)}
    for path in reversed(named_as_checkpoints(checkpoints_dir)):
        if path.name not in foreign:
            try:
                return open_checkpoint(path, thoroughly=True, model=model), damaged
            except UserError as error:
                damaged.append(str(error))
    if damaged:
        raise UserError(f"{damaged[0]}; and no other checkpoint is whole: restore one, or start"
                        " over with --fresh")
    return None, damaged


def find_checkpoint(checkpoints_dir: Path, name: str,
                    model: ModelConfig | None = None) -> Checkpoint | None:
    """Return `latest` or `best` (None if there is no checkpoint yet), or one by its name.

    Args:
        model: as of `open_checkpoint`.

    Raises:
        UserError: there is none of that name, or it is damaged.
    """
    if name == LATEST:
        return newest_whole(checkpoints_dir, model)[0]
    if name == BEST:
        best = best_of(list_checkpoints(checkpoints_dir))
        return best and open_checkpoint(best.path, thoroughly=True, model=model)
    if checkpoints_dir / name in named_as_checkpoints(checkpoints_dir):
        try:
            return open_checkpoint(checkpoints_dir / name, thoroughly=True, model=model)
        except UserError as error:
            raise UserError(f"{error}; name another checkpoint") from None
    known = ", ".join(checkpoint.name for checkpoint in list_checkpoints(checkpoints_dir)[-3:])
    raise UserError(f"{checkpoints_dir}: no checkpoint {name[:60]!r};"
                    f" it has {known or 'none'}; wanted latest, best or a directory's name")


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the one with the lowest loss, the later of equals; the latest if none has a loss."""
    return min(reversed(checkpoints), default=None,
               key=lambda found: math.inf if found.loss is None else found.loss)


def renew_links(checkpoints_dir: Path) -> None:
    """Point `latest` and `best` to the right checkpoints. Rank 0."""
    checkpoints = list_checkpoints(checkpoints_dir)
    best = best_of(checkpoints)
    if best is not None:
        replace_link(checkpoints_dir / LATEST, checkpoints[-1].name)
        replace_link(checkpoints_dir / BEST, best.name)


def load_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Load a training state from a checkpoint, in place. Every rank.

    Options of the optimizer, such as weight decay, come from train.json, not from the checkpoint.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        weights = read_tensors(checkpoint.path / WEIGHTS)
        moments = _read_moments(checkpoint, state)
        state.model.load_state_dict(weights)
        names = {parameter: name for name, parameter in state.model.named_parameters()}
        for parameter, keys in _state_names(state.optimizer).items():
            state.optimizer.state[parameter] = {  # "step" too: a fused optimizer wants it there
                key: moments[f"{key}/{names[parameter]}"].to(parameter.device) for key in keys}
        if state.scaler.is_enabled() and (saved := checkpoint.meta.loss_scale):
            state.scaler.load_state_dict(state.scaler.state_dict() | {
                "scale": saved.scale, "_growth_tracker": saved.growth_tracker})
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {first_line(error)}; name another"
                        " checkpoint, or start over with --fresh") from None


def load_weights(checkpoint: Checkpoint, model: GPTModel) -> None:
    """Load only the model's weights, in place.

    Raises:
        UserError: the file is damaged.
    """
    try:
        model.load_state_dict(read_tensors(checkpoint.path / WEIGHTS))
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {first_line(error)}") from None


def _state_names(optimizer: Optimizer) -> dict[Tensor, tuple[str, ...]]:
    """Return the names of the optimizer's state by parameter."""
    return {parameter: MUON_STATE if group.get("is_orthogonalised") else ADAMW_STATE
            for group in optimizer.param_groups for parameter in group["params"]}


def _read_moments(checkpoint: Checkpoint, state: TrainingState) -> dict[str, Tensor]:
    """Read the optimizer's state after comparing its names, dtypes and shapes."""
    keys_of = _state_names(state.optimizer)
    wanted = {f"{key}/{name}": ("F32", [] if key == "step" else list(parameter.shape))
              for name, parameter in state.model.named_parameters() for key in keys_of[parameter]}
    return read_tensors(checkpoint.path / OPTIMIZER, wanted=wanted, least=lambda name: (
        0.0 if name.startswith(("step/", "exp_avg_sq/")) else -math.inf))


def _new_name(checkpoints_dir: Path, global_step: int) -> str:
    name = f"{time.strftime('%Y%m%dZ%H%M%S', time.gmtime())}-iteration-{global_step}"
    unused, copies = name, 0
    while (checkpoints_dir / unused).exists():
        copies += 1
        unused = f"{name}-{copies}"
    return unused
