"""Checkpoints: the training state of a run in memory, on disk, and back.

A checkpoint is a directory of safetensors and JSON files: reading an untrusted one runs no code.
Its files are written first, and their manifest last: see `basics/checkpoint_files.py`. Its
validation is added later.
"""

import math
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from basics.checkpoint_files import (
    BEST,
    LATEST,
    MANIFEST,
    SNAPSHOT_BLOCK_BYTES,
    Identity,
    IdentityName,
    copied_links,
    find_damage,
    losses_of_the_original,
    named_as_checkpoints,
    of_the_original,
    read_identity,
    read_manifest,
    replace_link,
    step_of,
    write_manifest,
)
from basics.device import is_gpu, synchronize
from basics.errors import UserError, as_os_error, first_line, writing_to
from basics.failpoints import failpoint
from basics.files import fsync, read_regular_file, write_atomically
from basics.json_files import FrozenConfig
from basics.tensors import Header, read_tensors, write_tensors
from gpt import GPTModel
from processes.run_lock import HEARTBEAT
from run_config import ModelConfig, load_config
from settings.optimizer import STEP

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
META = "meta.json"
VALIDATION = "validation.json"
TOKENIZER = "tokenizer.json"
UNFINISHED = ".unfinished"  # in a directory of `set-aside`, until the run's own files are changed
ALIGNMENT = 64  # bytes, of a tensor in a block
DAMAGE = (OSError, SafetensorError, RuntimeError, ValueError, LookupError)  # raised by readers

ByPhase = Annotated[dict[str, Annotated[float, Field(ge=0, le=1e12)]], Field(max_length=64)]


class LossScale(FrozenConfig):
    """The state of fp16's gradient scaler."""

    scale: float = Field(gt=0)
    growth_tracker: int = Field(ge=0, lt=2**31)


class CheckpointMeta(FrozenConfig):
    """`meta.json`: the position in the run. All sums are over the whole run, not one launch."""

    identity: IdentityName = ""  # of the run
    global_step: int = Field(ge=0, lt=2**40)
    tokens: int = Field(ge=0, lt=2**60)
    loss: float | None  # decides `best` in runs without validation; None if not finite
    train_loss: float | None
    seconds: ByPhase
    usd: ByPhase = {}  # empty if the machine's price was not known
    optimizer: str = "adamw"
    code: str = ""  # that trained up to here: a commit, or a version and a digest
    tokenizer: str | None
    tokenizer_file: bytes | None = Field(default=None, exclude=True)  # written beside `meta.json`
    loss_scale: LossScale | None = None  # only in fp16
    model: ModelConfig  # of the weights: a run that grows has more layers later
    random_seed: int
    settings: dict[str, Any] = {}  # of `setting_changes.settings_of`; older checkpoints have none
    data: dict[str, str]  # as `RunData.fingerprints`

    @property
    def run_layers(self) -> Any:
        """The layers of the run's whole model, of which this checkpoint may have the first ones.

        It is not checked: anybody may have written `settings`.
        """
        return self.settings.get("n_layers", self.model.n_layers)


class Validation(FrozenConfig):
    """`validation.json`: the result of validating a checkpoint."""

    loss: float | None  # nats per token; None if not finite
    seconds: ByPhase = {}  # of the run up to here, as in `meta.json`
    usd: ByPhase = {}


@dataclass
class TrainingState:
    """The unwrapped model, the optimizer, the gradient scaler: nothing else has a state to save."""

    model: GPTModel
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

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
    """Reused host buffers for snapshots, each of which overwrites the last one.

    They are parts of blocks: PyTorch rounds pinned memory up to the next power of two.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._free = torch.empty(0, dtype=torch.uint8)  # the rest of the last block

    def take(self, state: TrainingState) -> Snapshot:
        """Copy a state. Waits for the device until the copy is complete."""
        weights = {
            name: self._copy(name, tensor) for name, tensor in state.model.state_dict().items()
        }
        moments = {
            f"{moment}/{name}": self._copy(f"{moment}/{name}", tensor)
            for name, parameter in state.model.named_parameters()
            for moment, tensor in state.optimizer.state[parameter].items()
        }
        synchronize(next(state.model.parameters()).device)
        return Snapshot(weights, moments)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if len(self._free) < size:
                self._free = torch.empty(
                    max(size, SNAPSHOT_BLOCK_BYTES),
                    dtype=torch.uint8,
                    pin_memory=is_gpu(tensor.device),
                )
            part, self._free = self._free[: tensor.nbytes], self._free[size:]
            self._buffers[name] = part.view(tensor.dtype).view(tensor.shape)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=True)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    meta: CheckpointMeta
    validation: Validation | None = None  # None until it has been validated
    is_of_the_original: bool = False

    @property
    def tokens(self) -> int | None:
        """The tokens of training; None where they are not known."""
        return None if self.is_of_the_original else self.meta.tokens

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def loss(self) -> float | None:
        """The loss that decides which checkpoint is `best`."""
        return (self.validation or self.meta).loss

    def is_of(self, identity: Identity | None) -> bool:
        """Return whether it belongs to a run; any does if the run has no identity."""
        return identity is None or identity.includes(self.meta.identity, self.meta.global_step)


def save_checkpoint(checkpoints_dir: Path, snapshot: Snapshot, meta: CheckpointMeta) -> Checkpoint:
    """Write a checkpoint: its files, fsync, the manifest last. Raises: OSError: nothing is left."""
    if not checkpoints_dir.is_dir():
        checkpoints_dir.mkdir(parents=True)
        fsync(checkpoints_dir.parent)
    # The time makes names unique when a step is trained again; the step decides the order.
    now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    path = checkpoints_dir / f"{now}-iteration-{meta.global_step}"
    path.mkdir()
    try:
        failpoint("save.meta")
        # Written first: by this file `_is_partly_saved` recognises what a kill has left.
        write_atomically(path / META, meta.model_dump_json(indent=2), durable=True)
        failpoint("save.weights")
        write_tensors(path / WEIGHTS, snapshot.weights)
        failpoint("save.optimizer")
        write_tensors(path / OPTIMIZER, snapshot.moments)
        if meta.tokenizer_file is not None:
            (path / TOKENIZER).write_bytes(meta.tokenizer_file)
        # All content is on disk before the manifest, which says that the checkpoint is whole.
        for written in (*path.iterdir(), path, checkpoints_dir):
            fsync(written)
        failpoint("save.manifest")
        write_manifest(path, global_step=meta.global_step, tokens=meta.tokens)
    except BaseException as error:
        with suppress(OSError):
            remove_checkpoint(path)
        if isinstance(error, SafetensorError | RuntimeError):  # RuntimeError: out of memory
            raise as_os_error(error) from None
        raise
    return Checkpoint(path, meta)


def add_validation(checkpoint: Checkpoint, validation: Validation) -> Checkpoint:
    """Add a validation to a saved checkpoint. Raises: OSError: the checkpoint stays without it."""
    failpoint("save.validation")
    text = validation.model_dump_json() + "\n"
    write_atomically(checkpoint.path / VALIDATION, text, durable=True)
    return replace(checkpoint, validation=validation)


def list_checkpoints(checkpoints_dir: Path) -> list[Checkpoint]:
    """Return the run's checkpoints whose files have the right sizes, sorted by global step.

    Excludes those of other identities: of another run, or abandoned by this one. Raises: UserError.
    """
    found, identity = [], read_identity(checkpoints_dir.parent)
    for path in named_as_checkpoints(checkpoints_dir):
        with suppress(UserError):
            if (checkpoint := open_checkpoint(path)).is_of(identity):
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: (checkpoint.meta.global_step, checkpoint.name))


def open_checkpoint(path: Path, *, thoroughly: bool = False) -> Checkpoint:
    """Read a checkpoint, `thoroughly` as in `find_damage`. Raises: UserError: it is damaged."""
    damage = find_damage(path, thoroughly=thoroughly)
    if not damage:
        try:
            manifest, validation = read_manifest(path), None
            meta = CheckpointMeta.model_validate_json(read_regular_file(path / META))
            if (path / VALIDATION).exists():
                validation = Validation.model_validate_json(read_regular_file(path / VALIDATION))
            if (meta.global_step, meta.tokens) == (manifest.global_step, manifest.tokens):
                return Checkpoint(path, meta, validation)
            damage = f"{META} does not agree with the manifest"
        except (OSError, ValueError):
            damage = f"{META} or {VALIDATION} cannot be read"
    raise UserError(f"{path}: damaged: {damage}")


def open_original(path: Path) -> Checkpoint:
    """Return a checkpoint of the original system. Raises: UserError: its run has no `model.json`.

    Its number of tokens is not known: it depends on the number of processes.
    """
    losses = losses_of_the_original(path)
    meta = CheckpointMeta(
        global_step=step_of(path),
        tokens=0,
        loss=None,
        train_loss=losses["train_loss"],
        seconds={},
        tokenizer=None,
        model=load_config(path.parents[1] / "model.json", ModelConfig),
        random_seed=0,
        data={},
    )
    return Checkpoint(
        path, meta, Validation(loss=losses["validation_loss"]), is_of_the_original=True
    )


def newest_whole(checkpoints_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the run's newest undamaged checkpoint, by its digests, and warnings about later ones.

    Raises: UserError: there are checkpoints, but none is whole: starting over would lose the run.
    """
    damaged: list[str] = []
    identity = read_identity(checkpoints_dir.parent)
    for path in reversed(named_as_checkpoints(checkpoints_dir)):
        try:
            # Sizes first: every byte is read only of the one that is chosen.
            if open_checkpoint(path).is_of(identity):
                return open_checkpoint(path, thoroughly=True), damaged
        except UserError as error:
            damaged.append(str(error))
    if damaged:
        raise UserError(
            f"{damaged[0]}; and no other checkpoint is whole: restore one, or start"
            " over with --fresh"
        )
    return None, damaged


def find_checkpoint(checkpoints_dir: Path, name: str) -> Checkpoint | None:
    """Return `latest` or `best` (None if there is no checkpoint yet), or one by its name.

    Raises: UserError: there is none of that name, or it is damaged.
    """
    if theirs := [open_original(path) for path in of_the_original(checkpoints_dir)]:
        named = {LATEST: theirs[-1], BEST: best_of(theirs)} | {each.name: each for each in theirs}
        if name in named:
            return named[name]
    if name == LATEST:
        return newest_whole(checkpoints_dir)[0]
    if name == BEST:
        best = best_of(list_checkpoints(checkpoints_dir))
        return best and open_checkpoint(best.path, thoroughly=True)
    if checkpoints_dir / name in named_as_checkpoints(checkpoints_dir):
        try:
            return open_checkpoint(checkpoints_dir / name, thoroughly=True)
        except UserError as error:
            raise UserError(f"{error}; name another checkpoint") from None
    found = theirs or list_checkpoints(checkpoints_dir)
    known = ", ".join(checkpoint.name for checkpoint in found[-3:])
    raise UserError(
        f"{checkpoints_dir}: no checkpoint {name[:60]!r};"
        f" it has {known or 'none'}; wanted latest, best or a directory's name"
    )


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the one with the lowest loss, the later of equals; the latest if none has a loss."""
    # `min` returns the first of equals, so begin with the latest.
    return min(
        reversed(checkpoints),
        default=None,
        key=lambda found: math.inf if found.loss is None else found.loss,
    )


def renew_links(checkpoints_dir: Path) -> None:
    """Let `latest` and `best` name the right checkpoints; no launch reads them. Rank 0."""
    failpoint("save.links")
    if checkpoints := list_checkpoints(checkpoints_dir):
        replace_link(checkpoints_dir / LATEST, checkpoints[-1].name)
        replace_link(checkpoints_dir / BEST, best_of(checkpoints).name)  # type: ignore[union-attr]


def load_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Load a training state from a checkpoint, in place. Every rank.

    Options of the optimizer, such as weight decay, come from train.json, not from the checkpoint.
    Raises: UserError: a file is missing or damaged, or does not fit.
    """
    load_weights(checkpoint, state.model)
    keys_of = {
        parameter: group["state"]
        for group in state.optimizer.param_groups
        for parameter in group["params"]
    }
    parameters = dict(state.model.named_parameters())
    wanted = {
        f"{key}/{name}": ("F32", [] if key == STEP else list(parameter.shape))
        for name, parameter in parameters.items()
        for key in keys_of[parameter]
    }
    moments = _read(checkpoint, OPTIMIZER, wanted)
    for name, parameter in parameters.items():
        state.optimizer.state[parameter] = {  # "step" too: a fused optimizer wants it there
            key: moments[f"{key}/{name}"].to(parameter.device) for key in keys_of[parameter]
        }
    if state.scaler.is_enabled() and (saved := checkpoint.meta.loss_scale):
        state.scaler.load_state_dict(
            state.scaler.state_dict()
            | {"scale": saved.scale, "_growth_tracker": saved.growth_tracker}
        )


def load_weights(checkpoint: Checkpoint, model: GPTModel) -> None:
    """Load only the weights, in place. Raises: UserError: as `load_checkpoint`."""
    weights = _read(
        checkpoint,
        WEIGHTS,
        {name: ("F32", list(tensor.shape)) for name, tensor in model.state_dict().items()},
    )
    model.load_state_dict(weights)


def _read(checkpoint: Checkpoint, file: str, wanted: Header) -> dict[str, Tensor]:
    try:
        return read_tensors(checkpoint.path / file, wanted)
    except DAMAGE as error:
        raise UserError(
            f"{checkpoint.path}: cannot be loaded: {first_line(error)}; restore model.json, name"
            " another checkpoint, or start over with --fresh"
        ) from None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, whole or partial: its manifest first. Raises: OSError."""
    if (path / MANIFEST).exists():
        (path / MANIFEST).unlink()
        fsync(path)  # also after a power loss, no manifest lists files that are removed below
        failpoint("save.remove")
    for file in path.iterdir():
        if file.name != META:  # last: see `_is_partly_saved`
            file.unlink()
    shutil.rmtree(path)


def prune(checkpoints_dir: Path, *, keep: int, protected: Collection[str]) -> None:
    """Remove all but the newest checkpoints, the best one and the protected ones. Rank 0.

    Nothing is removed if the newest one is damaged.
    """
    checkpoints = list_checkpoints(checkpoints_dir)
    kept = {checkpoint.name for checkpoint in checkpoints[-keep:]} | set(protected)
    kept |= {checkpoint.name for checkpoint in [best_of(checkpoints)] if checkpoint}
    removed = [checkpoint for checkpoint in checkpoints if checkpoint.name not in kept]
    if removed and not find_damage(checkpoints[-1].path, thoroughly=True):
        for checkpoint in removed:
            failpoint("save.prune")
            remove_checkpoint(checkpoint.path)


def paths_to_leave(run_dir: Path, *, from_step: int) -> list[Path]:
    """Return the directories in `checkpoints` that a launch which begins there does not go on from.

    These are checkpoints from `from_step` on, damaged ones, those of another run, and copied links.
    """
    checkpoints_dir = run_dir / "checkpoints"
    kept = {
        checkpoint.path
        for checkpoint in list_checkpoints(checkpoints_dir)
        if checkpoint.meta.global_step < from_step
    }
    named = named_as_checkpoints(checkpoints_dir)
    return [path for path in named if path not in kept] + copied_links(checkpoints_dir)


def copy_aside(run_dir: Path) -> Path:
    """Copy the files of a run to a new directory, before a launch changes any of them. Rank 0.

    The directory is marked until `clean_up` has ended. A kill may come before that: then the next
    launch goes on with the marked directory, if any file has changed since it was made.

    Raises: UserError: the disk is full; what was copied is removed.
    """
    if found := _unfinished_copy(run_dir):
        return found
    now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    # Another launch may have needed one in the same second.
    aside_dir = _unused(run_dir / "set-aside" / now)
    with writing_to(aside_dir):
        try:
            aside_dir.mkdir(parents=True)
            (aside_dir / UNFINISHED).touch()
            for path in run_dir.iterdir():
                # The heartbeat is already that of this launch.
                is_record = not path.name.startswith(".") and path.name != HEARTBEAT
                if is_record and path.is_file() and not path.is_symlink():
                    failpoint("aside.copy")
                    shutil.copy2(path, aside_dir / path.name)
                    fsync(aside_dir / path.name)
            fsync(aside_dir)
            failpoint("aside.copied")
            (aside_dir / "checkpoints").mkdir()  # last: see `_unfinished_copy`
            fsync(aside_dir)
        except OSError:
            shutil.rmtree(aside_dir, ignore_errors=True)
            raise
    return aside_dir


def _unfinished_copy(run_dir: Path) -> Path | None:
    """Return the copy that a killed launch has left, if it is whole and needed.

    A part of one is removed, and one that is not needed: all that it has is still in the run.
    """
    for mark in run_dir.glob(f"set-aside/*/{UNFINISHED}"):
        copy = mark.parent
        moved = list((copy / "checkpoints").glob("*"))
        is_whole = (copy / "checkpoints").is_dir()
        if is_whole and (moved or not all(map(_is_still_there, copy.iterdir()))):
            return copy
        shutil.rmtree(copy)
    return None


def _is_still_there(copied: Path) -> bool:
    """Return whether a file of a run begins with its copy: nothing was cut, lines may be added."""
    path = copied.parents[2] / copied.name
    if copied.is_dir() or copied.name == UNFINISHED:
        return True
    return path.is_file() and path.read_bytes().startswith(copied.read_bytes())


def _unused(path: Path) -> Path:
    """Return a path, or one with a number after it, at which nothing is."""
    names = chain([path.name], (f"{path.name}-{number}" for number in count(1)))
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())


def clean_up(run_dir: Path, *, from_step: int) -> Path | None:
    """Keep only whole checkpoints of steps before `from_step`, and renew the links. Rank 0.

    Partial checkpoints that a kill left are removed. The `paths_to_leave` are moved to the
    directory of `copy_aside`. Returns that directory; None if nothing was copied or moved.
    """
    checkpoints_dir = run_dir / "checkpoints"
    for path in named_as_checkpoints(checkpoints_dir, partial=True):
        if _is_partly_saved(path):
            with suppress(OSError):
                remove_checkpoint(path)
    left = paths_to_leave(run_dir, from_step=from_step)
    aside_dir = copy_aside(run_dir) if left else _unfinished_copy(run_dir)
    if aside_dir is not None:
        for path in left:
            failpoint("aside.move")
            # Where directories cannot be renamed they are copied, and a kill leaves a part.
            shutil.move(path, _unused(aside_dir / "checkpoints" / path.name))
        for link in (LATEST, BEST):
            (checkpoints_dir / link).unlink(missing_ok=True)
    with suppress(OSError):
        renew_links(checkpoints_dir)
    if aside_dir is not None:
        failpoint("aside.end")
        (aside_dir / UNFINISHED).unlink()
        fsync(aside_dir)  # after a power loss the mark would stand for a later state of the run
    return aside_dir


def _is_partly_saved(path: Path) -> bool:
    """Return whether a kill left a directory without a manifest, and nobody else made it."""
    try:
        CheckpointMeta.model_validate_json(read_regular_file(path / META))
    except (OSError, ValueError):
        # A kill before meta.json was complete leaves nothing, or its hidden partial file.
        return all(file.name.startswith(".") for file in path.iterdir())
    return True
