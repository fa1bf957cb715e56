"""safetensors files, untrusted ones too."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

Header = Mapping[str, tuple[str, list[int]]]  # dtype, as safetensors spells it, and shape


def read_tensors(path: Path, wanted: Header) -> dict[str, Tensor]:
    """Read a file's tensors after comparing their names, dtypes and shapes, and its size.

    Raises: OSError, SafetensorError: it is damaged. ValueError: it does not hold what is wanted.
    """
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{path.name}: {name[:60]} is {found.get(name, 'absent')}, wanted"
                f" {wanted.get(name, 'absent')}"
            )
    return safetensors.torch.load_file(path)


def first_non_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with a NaN or an infinity, or empty."""
    return next(
        (
            name
            for name, tensor in tensors.items()
            if tensor.numel() and not all(limit.isfinite() for limit in tensor.aminmax())
        ),
        "",
    )


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of other new files, not the library's."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(tensors, path, metadata)
    with suppress(OSError):  # a file system without permissions
        path.chmod(mode)
