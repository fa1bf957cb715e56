"""What NVIDIA's driver says of the GPUs of this machine, through NVML. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

GIB = 2**30
UNCORRECTED, SINCE_DRIVER_LOAD, CORE_SENSOR = 1, 0, 0  # arguments, as in nvml.h
# Bits of NVML's mask. An idle GPU and clocks that somebody has set are no throttling.
# Source: nvml.h, nvmlClocksEventReason*.
THROTTLE_REASONS = {
    0x04: "sw power cap",
    0x08: "hw slowdown",
    0x20: "sw thermal slowdown",
    0x40: "hw thermal slowdown",
    0x80: "hw power brake slowdown",
}
# The most telling first. A power cap is none: a GPU is often at it at full load.
SLOWDOWNS = tuple(reversed(tuple(THROTTLE_REASONS.values())[1:]))


def _asked(functions: str, made_of: Callable[[Any], Any], *arguments: int) -> Any:
    """Declare a field, made of the answer of one of these functions after "nvmlDeviceGet".

    The second one is for drivers before 535 or 570. The arguments come after the handle.
    """
    return field(default=None, metadata={"question": (functions.split(), made_of, arguments)})


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None for what it does not tell, and for all if it does not answer.

    Attributes:
        uuid: "GPU-", then what torch.cuda.get_device_properties has.
        use_percent: share of the last moments, up to a second, in which a kernel ran.
        energy_joules, uncorrected_ecc_errors: since the driver was loaded.
        throttle_reasons: why it runs below its clock, values of `THROTTLE_REASONS`.
    """

    name: str | None = _asked("Name", str)
    uuid: str | None = _asked("UUID", str)
    memory_used_gib: float | None = _asked("MemoryInfo", lambda memory: memory.used / GIB)
    memory_total_gib: float | None = _asked("MemoryInfo", lambda memory: memory.total / GIB)
    use_percent: float | None = _asked("UtilizationRates", lambda use: use.gpu)
    temperature_c: float | None = _asked("TemperatureV Temperature", int, CORE_SENSOR)
    power_w: float | None = _asked("PowerUsage", lambda milliwatts: milliwatts / 1000)
    energy_joules: float | None = _asked(
        "TotalEnergyConsumption", lambda millijoules: millijoules / 1000
    )
    throttle_reasons: tuple[str, ...] | None = _asked(
        "CurrentClocksEventReasons CurrentClocksThrottleReasons",
        lambda mask: tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit),
    )
    uncorrected_ecc_errors: int | None = _asked(
        "TotalEccErrors", int, UNCORRECTED, SINCE_DRIVER_LOAD
    )
    driver_version: str | None = None


def read_gpus(uuids: Sequence[str] | None = None) -> list[GpuReading]:
    """Read all GPUs of this machine in NVML's order, or those with these UUIDs, in that order.

    Without an NVIDIA driver that works there are none: `nvml_failure` says why. No variable hides
    any. Needs milliseconds, but a driver in trouble may answer after many seconds, or never.
    """
    if nvml_failure() is not None:
        return []
    handles = (
        [
            _ask("nvmlDeviceGetHandleByIndex", index)
            for index in range(_ask("nvmlDeviceGetCount") or 0)
        ]
        if uuids is None
        else [_ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]
    )
    driver_version = _ask("nvmlSystemGetDriverVersion")
    return [GpuReading(driver_version=driver_version, **_answers(handle)) for handle in handles]


def _answers(handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in fields(GpuReading) if handle is not None else ():
        functions, made_of, arguments = each.metadata.get("question", ((), None, ()))
        for function in functions:
            answer = _ask(f"nvmlDeviceGet{function}", handle, *arguments)
            if answer is not None and each.name not in found:
                found[each.name] = made_of(answer)
    return found


def nvml_failure() -> str | None:
    """Return why no GPU can be read, such as "Driver Not Loaded"; None if NVML is open.

    It is not closed again: it would detach from all GPUs, and to open it twice costs nothing.
    """
    import pynvml  # here: most machines without a GPU never need it

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
