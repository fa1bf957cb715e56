"""safetensors files, untrusted ones too; times on a device."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
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


class DeviceTime:
    """The end of all work that a device has been given so far: on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | Any = None  # on a CPU
        self._seconds = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "DeviceTime") -> float:
        """Return the seconds between two times of one device. Waits for this one."""
        self.wait()
        if self._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000  # milliseconds
