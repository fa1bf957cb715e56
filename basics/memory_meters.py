"""Peak memory of a process, limits on it, and glibc's malloc settings."""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8


@dataclass(frozen=True)
class Peak:
    """Peak memory of a process, in GiB."""

    allocated_gib: float  # by tensors; on a CPU, resident memory
    reserved_gib: float  # by the allocator; on a CPU, address space
    demand_gib: float  # the one of the two that must stay within `capacity_gib`
    capacity_gib: float


class GpuMeter:
    """Peak memory of this process on one GPU, with an optional limit."""

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self._device, self._limit_gib = device, limit_gib or math.inf
        if limit_gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total), device)

    def peak(self) -> Peak:
        """Return the peak since the process started."""
        torch.cuda.synchronize(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        available = (free + torch.cuda.memory_reserved(self._device)) / 2**30
        allocated = torch.cuda.max_memory_allocated(self._device) / 2**30
        reserved = torch.cuda.max_memory_reserved(self._device) / 2**30
        # Before it fails, the allocator frees what is only reserved: allocated memory decides.
        return Peak(allocated, reserved, allocated, min(self._limit_gib, available))


class CpuMeter:
    """Peak memory of this process without a GPU; limits its address space from now on."""

    def __init__(self, device: torch.device, limit_gib: float | Any) -> None:
        torch.ones(512, 512).mm(torch.ones(512, 512))  # start the threads: their stacks take memory
        self._limit_gib = limit_gib
        self._before = _memory_gib()
        soft_limit = int((self._before["VmSize"] + limit_gib) * 2**30)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)  # only root may raise it
        if hard_limit != resource.RLIM_INFINITY:
            soft_limit = min(soft_limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))

    def peak(self) -> Peak:
        """Return the peak above what was in use when the limit was set."""
        now = _memory_gib()
        resident = now["VmHWM"] - self._before["VmRSS"]
        mapped = now["VmPeak"] - self._before["VmSize"]
        return Peak(resident, mapped, mapped, self._limit_gib)


def lift_limit() -> None:
    """Undo the limit of the address space that a `CpuMeter` has set."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))


def peak_gib(device: torch.device) -> float:
    """Return the peak of this process's tensors in GiB; on a CPU, its peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**20 if sys.platform == "linux" else 2**30  # KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system: the next step reuses it.

    Large blocks would be returned, and the system clears them again for each step, which takes a
    third of the step time of a small model on a CPU.
    """
    _set_malloc_options({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


def map_every_tensor() -> None:
    """Make glibc return freed memory at once, and keep one heap for all threads.

    Otherwise chance decides how much memory it holds: a microbatch would fit in one trial and not
    in another.
    """
    _set_malloc_options({M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 2**16})


def _set_malloc_options(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        c_library = ctypes.CDLL(None)
        for parameter, value in options.items():
            c_library.mallopt(parameter, value)


def _memory_gib() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 2**20
            for name in ("VmSize", "VmPeak", "VmRSS", "VmHWM")}
