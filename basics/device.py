"""The device that a process computes on: all that differs between a CPU and a GPU of CUDA."""

import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import torch

GPU = "cuda"  # the type of a GPU's device, also in records
CPU = torch.device("cpu")
DEVICES = Path("/dev")  # has nvidia0 and so on where the kernel's driver is loaded
OLD_DRIVER = (
    "run ./setup_lambda.sh, which installs PyTorch for older drivers, or take a machine"
    " with driver 580 or newer"
)
OTHER_CAUSE = "docs/troubleshooting.md names its causes; see what nvidia-smi says"


def is_gpu(device: torch.device) -> bool:
    return device.type == GPU


def is_cpu(device: torch.device) -> bool:
    return device.type == CPU.type


def gpu(index: int) -> torch.device:
    return torch.device(GPU, index)


def first_device() -> torch.device:
    """Return the first GPU that PyTorch can use, or the CPU."""
    return torch.device(GPU) if torch.cuda.is_available() else CPU


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch sees, without initialising CUDA."""
    return torch.cuda.device_count()


def cuda_problem() -> tuple[str, str]:
    """Return why PyTorch cannot use the GPUs of this machine, and what helps; empty if it can.

    A machine without GPUs has no problem, nor one whose GPUs CUDA_VISIBLE_DEVICES hides.
    """
    if torch.cuda.is_available() or torch.version.cuda is None:
        return "", ""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.device_count() and (is_hidden or not any(DEVICES.glob("nvidia[0-9]*"))):
        return "", ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().partition("\n")[0].rpartition("already set an error? ")[2]
        return text.partition(". ")[0][:100], OLD_DRIVER if "too old" in text else OTHER_CAUSE
    return "", ""


def use(device: torch.device) -> None:
    """Make a GPU the default one of this process; nothing on a CPU."""
    if is_gpu(device):
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; on a CPU it always has."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def free_cache() -> None:
    """Give back memory of the GPU that holds no tensor; nothing without CUDA."""
    torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    if is_gpu(device):
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()


def gpu_uuid(index: int) -> str:
    """Return the driver's id of a GPU; empty where it has none, as for AMD."""
    if torch.version.cuda is None:
        return ""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU computes in bf16, not only by conversions."""
    return is_gpu(device) and torch.cuda.is_bf16_supported(including_emulation=False)


def has_tf32(device: torch.device) -> bool:
    """Return whether a GPU has tf32."""
    return is_gpu(device) and torch.cuda.get_device_capability(device) >= (8, 0)


def peak_bytes(device: torch.device) -> int:
    """Return the peak of this process's memory: of tensors on a GPU, resident with a CPU."""
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return how much of a GPU's memory no program has taken, and how much there is."""
    return torch.cuda.mem_get_info(device)


def reserved_bytes(device: torch.device) -> int:
    """Return what this process has taken of a GPU's memory, in use or not."""
    return torch.cuda.memory_reserved(device)


def limit_bytes(device: torch.device, num_bytes: float) -> None:
    """Limit the memory of a GPU that this process may take."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


class DeviceTime:
    """The end of all work that a device has been given so far: on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | Any = None  # on a CPU
        self._seconds = time.perf_counter()
        if is_gpu(device):
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
