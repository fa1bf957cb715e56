"""A checkpoint back into memory, however it came to be: it may be from a stranger."""

from __future__ import annotations

import math
import pickletools
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from basics.errors import UserError
from basics.files import check_tensor_header
from checkpointing import Checkpoint
from gpt import GPTModel
from trainer.step import TrainingState

# What the readers of damaged files were seen to raise: the unpickler trips over anything.
DAMAGE = (OSError, EOFError, SafetensorError, UnpicklingError, RuntimeError, ValueError, TypeError,
          LookupError, AttributeError, zipfile.BadZipFile, RecursionError, MemoryError)
MOST_BYTES_A_PARAMETER = 16  # of the optimizer's file: AdamW keeps two float32 numbers
MOST_PICKLED_BYTES = 2**20, 2**12  # of its pickle: in all, and for each tensor of the model
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of a parameter
# What stands for a tensor there, and nothing else: PyTorch would also make a bytearray of any size.
HARMLESS = {"torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"}
GLOBALS = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")


def load_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Bring a training state back, in place. Every rank.

    Raises:
        UserError: a file is damaged, or the optimizer's groups have changed since.
    """
    try:
        weights = _read_weights(checkpoint)
        trainer = _read_trainer(checkpoint.path / "optimizer.pt", state.model)
        state.model.load_state_dict(weights)
        _load_moments(trainer["optimizer"], state.optimizer)
        _load_scale(trainer["scaler"], state.scaler)
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {reason_of(error)}; name another"
                        " checkpoint, or start over with --fresh") from None


def load_weights(checkpoint: Checkpoint, model: GPTModel) -> None:
    """Bring only a model's weights back, in place. Raises: UserError if the file is damaged."""
    try:
        model.load_state_dict(_read_weights(checkpoint))
    except DAMAGE as error:
        raise UserError(f"{checkpoint.path}: cannot be loaded: {reason_of(error)}") from None


def _read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    path = checkpoint.path / "model.safetensors"
    check_tensor_header(path)
    weights = safetensors.torch.load_file(path)
    for name, value in weights.items():
        _check_numbers(name, value)
    return weights


def _read_trainer(path: Path, model: GPTModel) -> dict[str, Any]:
    """Read the optimizer's file: no code is run, and no more memory taken than it may need."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # PyTorch goes by that, others by an archive's end
            raise ValueError(f"{path.name} is no archive")
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > MOST_BYTES_A_PARAMETER * model.num_parameters() + 2**24:
            raise ValueError(f"{path.name} unpacks to {unpacked:,} bytes")
        _check_pickle(archive, most_tensors=len(list(model.parameters())))
    # weights_only, said here: an environment variable can turn PyTorch's own default around.
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_pickle(archive: zipfile.ZipFile, *, most_tensors: int) -> None:
    """Look through what is to be unpickled, before anything is made of it."""
    names = archive.namelist()
    (name,) = [name for name in names if name.endswith("data.pkl")]
    size, (most, most_a_tensor) = archive.getinfo(name).file_size, MOST_PICKLED_BYTES
    if len(set(names)) < len(names) or size > most + most_a_tensor * most_tensors:
        raise ValueError(f"{name} is not one pickle of {most_tensors} tensors")
    for operation, argument, _ in pickletools.genops(archive.read(name)):
        if operation.name in GLOBALS and argument not in HARMLESS:
            raise ValueError(f"it holds a {argument}, which no optimizer has")


def _load_moments(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Bring back what each parameter has of its own; the groups' options are the config's word."""
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in saved["param_groups"]] != [
            group["params"] for group in groups]:
        raise ValueError("the optimizer's groups of parameters are others; has"
                         " decay_norms_and_biases changed?")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if saved["state"].keys() != set(range(len(parameters))):
        raise ValueError(f"the optimizer has not moments for each of {len(parameters)} parameters")
    for number, parameter in enumerate(parameters):
        _check_moments(saved["state"][number], parameter)
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def _check_moments(moments: dict[str, Tensor], parameter: Tensor) -> None:
    if moments.keys() != MOMENTS:
        raise ValueError(f"the optimizer has {', '.join(map(str, moments)) or 'nothing'} for a"
                         f" parameter; wanted {', '.join(sorted(MOMENTS))}")
    for name, value in moments.items():
        shape = torch.Size() if name == "step" else parameter.shape
        if not _is_plain(value) or value.shape != shape:
            raise ValueError(f"the optimizer's {name} is not the float32 tensor of"
                             f" {tuple(shape)} that a parameter needs")
        _check_numbers(f"the optimizer's {name}", value,
                       least=-math.inf if name == "exp_avg" else 0.0)


def _is_plain(value: object) -> bool:
    """Tell if this is a float32 tensor with a place in memory for each of its numbers."""
    return (type(value) is Tensor and value.dtype == torch.float32
            and value.layout == torch.strided and value.device.type == "cpu"
            and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes)


def _check_numbers(name: str, value: Tensor, *, least: float = -math.inf) -> None:
    """Refuse what would make every later weight NaN. One pass, and no copy."""
    low, high = (float(bound) for bound in value.aminmax())
    if not (math.isfinite(low) and math.isfinite(high) and low >= least):
        raise ValueError(f"{name} holds numbers from {low:g} to {high:g}")


def _load_scale(saved: dict[str, Any], scaler: GradScaler) -> None:
    """Bring back the loss scale that fp16 has come to."""
    if not scaler.is_enabled():
        return
    scale, tracker = saved["scale"], saved["_growth_tracker"]
    if not (type(scale) is float and 0 < scale < math.inf
            and type(tracker) is int and 0 <= tracker < 2**31):
        raise ValueError("the loss scale is no number above 0")
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale, "_growth_tracker": tracker})


def reason_of(error: Exception) -> str:
    """Give what a reader says of a file, as far as it goes into a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
