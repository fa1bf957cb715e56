"""What NVIDIA's driver says of the GPUs of this machine, through NVML. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
UNCORRECTED, SINCE_DRIVER_LOAD, CORE_SENSOR = 1, 0, 0  # arguments, as in nvml.h
# Bits of NVML's mask. An idle GPU and clocks that somebody has set are no throttling.
# Source: nvml.h, nvmlClocksEventReason*.
THROTTLE_REASONS = {0x04: "sw power cap", 0x08: "hw slowdown", 0x20: "sw thermal slowdown",
                    0x40: "hw thermal slowdown", 0x80: "hw power brake slowdown"}
SLOWDOWNS = tuple(THROTTLE_REASONS.values())[1:]  # at full load a GPU is often at its power cap


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None for what it does not tell, and for all if it does not answer.

    Attributes:
        use_percent: share of the last moments, up to a second, in which a kernel ran.
        energy_joules, uncorrected_ecc_errors: since the driver was loaded.
        throttle_reasons: why it runs below its clock, values of `THROTTLE_REASONS`.
    """

    name: str | None = None
    uuid: str | None = None  # "GPU-", then what torch.cuda.get_device_properties has
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    use_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    energy_joules: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    uncorrected_ecc_errors: int | None = None
    driver_version: str | None = None


# What NVML tells of one GPU, by field: the functions after "nvmlDeviceGet", the second one for
# drivers before 535 or 570; their arguments after the handle; the field, made of the answer.
READINGS: dict[str, tuple[str, tuple[int, ...], Callable[[Any], Any]]] = {
    "name": ("Name", (), str),
    "uuid": ("UUID", (), str),
    "memory_used_gib": ("MemoryInfo", (), lambda memory: memory.used / GIB),
    "memory_total_gib": ("MemoryInfo", (), lambda memory: memory.total / GIB),
    "use_percent": ("UtilizationRates", (), lambda use: use.gpu),
    "temperature_c": ("TemperatureV Temperature", (CORE_SENSOR,), int),
    "power_w": ("PowerUsage", (), lambda milliwatts: milliwatts / 1000),
    "energy_joules": ("TotalEnergyConsumption", (), lambda millijoules: millijoules / 1000),
    "throttle_reasons": (
        "CurrentClocksEventReasons CurrentClocksThrottleReasons", (),
        lambda mask: tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)),
    "uncorrected_ecc_errors": ("TotalEccErrors", (UNCORRECTED, SINCE_DRIVER_LOAD), int),
}


def read_gpus(uuids: Sequence[str] | None = None) -> list[GpuReading]:
    """Read all GPUs of this machine in NVML's order, or those with these UUIDs, in that order.

    Without an NVIDIA driver that works there are none; `nvml_failure` says why. All GPUs are those
    that this process may open: CUDA_VISIBLE_DEVICES hides none. Needs milliseconds, but a driver in
    trouble may answer after many seconds, or never.
    """
    if nvml_failure() is not None:
        return []
    driver_version = _ask("nvmlSystemGetDriverVersion")
    if uuids is None:
        handles = [_ask("nvmlDeviceGetHandleByIndex", index)
                   for index in range(_ask("nvmlDeviceGetCount") or 0)]
    else:
        handles = [_ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]
    readings = []
    for handle in handles:
        found = {}
        for field, (functions, arguments, made_of) in READINGS.items():
            answers = (_ask(f"nvmlDeviceGet{name}", handle, *arguments)
                       for name in functions.split() if handle is not None)
            if (answer := next((each for each in answers if each is not None), None)) is not None:
                found[field] = made_of(answer)
        readings.append(GpuReading(driver_version=driver_version, **found))
    return readings


def nvml_failure() -> str | None:
    """Return why no GPU can be read, such as "Driver Not Loaded"; None if NVML is open.

    It is not closed again: it would detach from all GPUs, and to open it twice costs nothing.
    """
    try:
        import pynvml  # here: most machines without a GPU never need it
    except ImportError as error:
        return str(error)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return None


def _ask(function: str, *arguments: Any) -> Any:
    """Return the answer; None without one: not supported or permitted, too old, GPU lost."""
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None
