"""What NVIDIA's driver says of the GPUs of this machine, through NVML. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

GIB = 2**30
SM_CLOCK, UNCORRECTED, SINCE_DRIVER_LOAD, CORE_SENSOR = 1, 1, 0, 0  # arguments, as in nvml.h
# Bits of NVML's mask. An idle GPU and clocks that somebody has set are no throttling.
# Source: nvml.h, nvmlClocksEventReason*.
THROTTLE_REASONS = {0x04: "sw power cap", 0x08: "hw slowdown", 0x20: "sw thermal slowdown",
                    0x40: "hw thermal slowdown", 0x80: "hw power brake slowdown"}
POWER_CAP = "sw power cap"  # at its power limit: usual at full load
SLOWDOWNS = tuple(reason for reason in THROTTLE_REASONS.values() if reason != POWER_CAP)


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
    power_limit_w: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    uncorrected_ecc_errors: int | None = None
    driver_version: str | None = None


def read_gpus(uuids: Sequence[str] | None = None) -> list[GpuReading]:
    """Read all GPUs of this machine in NVML's order, or those with these UUIDs, in that order.

    Without an NVIDIA driver that works there are none; `nvml_failure` says why. All GPUs are those
    that this process may open: CUDA_VISIBLE_DEVICES hides none. Needs milliseconds, but a driver in
    trouble may answer after many seconds, or never.
    """
    try:
        nvml = _open_nvml()
    except _CannotOpenError:
        return []
    ask = partial(_ask, nvml)
    driver_version = ask("nvmlSystemGetDriverVersion")
    if uuids is None:
        indices = range(ask("nvmlDeviceGetCount") or 0)
        handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in indices]
    else:
        handles = [ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]
    return [GpuReading(driver_version=driver_version) if handle is None
            else _read(nvml, handle, driver_version) for handle in handles]


def nvml_failure() -> str | None:
    """Return why no GPU can be read, such as "Driver Not Loaded"; None if NVML works."""
    try:
        _open_nvml()
    except _CannotOpenError as error:
        return str(error)
    return None


class _CannotOpenError(Exception):
    """NVML is missing or does not work."""


def _open_nvml() -> ModuleType:
    """Return NVML's module, ready to be asked.

    It is not closed again: it would detach from all GPUs, and to open it twice costs nothing.
    """
    try:
        import pynvml  # here: most machines without a GPU never need it
    except ImportError as error:
        raise _CannotOpenError(str(error)) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _CannotOpenError(str(error)) from None
    return pynvml


def _ask(nvml: ModuleType, function: str, *arguments: Any) -> Any:
    """Return NVML's answer; None without one: not supported, not permitted, too old, GPU lost."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _read(nvml: ModuleType, handle: Any, driver_version: str | None) -> GpuReading:
    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, function, handle, *arguments)

    memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # a driver before 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    temperature = ask("nvmlDeviceGetTemperatureV", CORE_SENSOR)
    if temperature is None:  # a driver before 570
        temperature = ask("nvmlDeviceGetTemperature", CORE_SENSOR)
    return GpuReading(
        name=ask("nvmlDeviceGetName"),
        uuid=ask("nvmlDeviceGetUUID"),
        memory_used_gib=memory and memory.used / GIB,
        memory_total_gib=memory and memory.total / GIB,
        use_percent=use and use.gpu,
        temperature_c=temperature,
        power_w=_thousandth(ask("nvmlDeviceGetPowerUsage")),
        power_limit_w=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
        energy_joules=_thousandth(ask("nvmlDeviceGetTotalEnergyConsumption")),
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", SM_CLOCK),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", SM_CLOCK),
        throttle_reasons=None if reasons is None else tuple(
            name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
        uncorrected_ecc_errors=ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_DRIVER_LOAD),
        driver_version=driver_version,
    )


def _thousandth(number: int | None) -> float | None:
    return None if number is None else number / 1000
