"""A checkpoint back into memory, however it came to be: it may be from a stranger."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.optim import Optimizer

from checkpointing import Checkpoint
from gpt import GPTModel
from training_step import TrainingState
from user_error import UserError

# What the readers of damaged files were seen to raise: the unpickler trips over anything.
DAMAGE = (OSError, EOFError, SafetensorError, UnpicklingError, RuntimeError, ValueError, TypeError,
          LookupError, AttributeError, zipfile.BadZipFile, RecursionError, MemoryError)
MOST_BYTES_A_PARAMETER = 16  # of the optimizer's file: AdamW keeps two float32 numbers


def load_checkpoint(checkpoint: Checkpoint, state: TrainingState) -> None:
    """Bring a training state back, in place. Every rank.

    Raises:
        UserError: a file is damaged, or the optimizer's groups have changed since.
    """
    try:
        weights = safetensors.torch.load_file(checkpoint.path / "model.safetensors")
        trainer = _load_trainer(checkpoint.path / "optimizer.pt", state.model.num_parameters())
        state.model.load_state_dict(weights)
        weight_decays = [group["weight_decay"] for group in state.optimizer.param_groups]
        state.optimizer.load_state_dict(trainer["optimizer"])
        for group, weight_decay in zip(state.optimizer.param_groups, weight_decays, strict=True):
            group["weight_decay"] = weight_decay  # the config's word, like the learning rate's
        _check_moments(state.optimizer)
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


def _load_trainer(path: Path, num_parameters: int) -> dict[str, object]:
    """Read the optimizer's file: no code is run, and no more memory taken than it may need."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > MOST_BYTES_A_PARAMETER * num_parameters + 2**24:
        raise ValueError(f"{path.name} unpacks to {unpacked:,} bytes")
    # weights_only, said here: an environment variable can turn PyTorch's own default around.
    return torch.load(path, map_location="cpu", weights_only=True)


def _check_moments(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state[parameter].items():
                if value.shape not in (parameter.shape, ()):
                    raise ValueError(f"the optimizer's {name} is {tuple(value.shape)}, for a"
                                     f" parameter of {tuple(parameter.shape)}")


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
