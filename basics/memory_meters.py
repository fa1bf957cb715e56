"""How much memory a process has taken at most, and a limit on it."""

from __future__ import annotations

import contextlib
import ctypes
import math
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # of malloc.h


@dataclass(frozen=True)
class Peak:
    """The most memory that a process has taken, in GiB."""

    allocated_gib: float  # by tensors; on a CPU, what was resident
    reserved_gib: float  # by the allocator; on a CPU, address space
    demand_gib: float  # the one of the two that must stay within `capacity_gib`
    capacity_gib: float


class GpuMeter:
    """The memory of one GPU."""

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self._device, self._limit_gib = device, limit_gib or math.inf
        if limit_gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total), device)

    def peak(self) -> Peak:
        """Give the peak since the process began."""
        torch.cuda.synchronize(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        could_take = (free + torch.cuda.memory_reserved(self._device)) / 2**30
        allocated = torch.cuda.max_memory_allocated(self._device) / 2**30
        reserved = torch.cuda.max_memory_reserved(self._device) / 2**30
        # The allocator gives back what it only holds before it fails: what is allocated counts.
        return Peak(allocated, reserved, allocated, min(self._limit_gib, could_take))


class CpuMeter:
    """The memory of one process without a GPU, with a limit on its address space from here on."""

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        torch.ones(512, 512).mm(torch.ones(512, 512))  # starts the threads, which take some
        self._limit_gib = limit_gib
        self._before = _memory_gib()
        soft_limit = int((self._before["VmSize"] + limit_gib) * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, resource.RLIM_INFINITY))

    def peak(self) -> Peak:
        """Give the peak since the limit was set."""
        now = _memory_gib()
        resident = now["VmHWM"] - self._before["VmRSS"]
        mapped = now["VmPeak"] - self._before["VmSize"]
        return Peak(resident, mapped, mapped, self._limit_gib)


def peak_gib(device: torch.device) -> float:
    """Give the most that this process's tensors have taken; on a CPU, what was resident of all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**20 if sys.platform == "linux" else 2**30  # KiB there, bytes on a Mac
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def keep_freed_memory() -> None:
    """Let glibc keep what tensors leave, for the next step's tensors.

    It would give back whatever is large, and the system clears it each time it is taken again: a
    third of a step's time for a small model on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        c_library = ctypes.CDLL(None)
        c_library.mallopt(M_MMAP_MAX, 0)
        c_library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def map_every_tensor() -> None:
    """Keep glibc from holding freed memory, and from giving threads heaps of their own.

    How much of that there is, is a matter of chance: a microbatch would fit in one try and not in
    another.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        c_library = ctypes.CDLL(None)
        c_library.mallopt(M_ARENA_MAX, 1)
        c_library.mallopt(M_MMAP_THRESHOLD, 2**16)


def _memory_gib() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 2**20
            for name in ("VmSize", "VmPeak", "VmRSS", "VmHWM")}
