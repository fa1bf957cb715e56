"""A stand-in for `pynvml` with GPUs that tests make up."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30
H100 = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, total=80 * GIB),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetPowerUsage": 651_250,  # milliwatts
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 9_000_500,  # millijoules
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
    "nvmlDeviceGetTotalEccErrors": 0,
}


class FakeNvml(ModuleType):
    """What `pynvml` does for these GPUs.

    Args:
        gpus: for each UUID what the functions of one GPU return; an exception is raised, a callable
            is called. A function that is missing is not supported; "lost" as the whole: neither is
            the handle.
        init: raised by nvmlInit.
        lacks: functions that this version of the package does not have.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus: dict[str, Any], *, init: Exception | None = None,
                 lacks: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self._gpus, self._init, self._lacks = gpus, init, lacks

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise self._init

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.nvmlDeviceGetHandleByUUID(list(self._gpus)[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self._gpus:
            raise pynvml.NVMLError_NotFound()
        if self._gpus[uuid] == "lost":
            raise pynvml.NVMLError_GpuIsLost()
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet") or name in self._lacks:
            raise AttributeError(name)

        def answer(handle: str, *_: int) -> Any:
            value = self._gpus[handle].get(name, pynvml.NVMLError_NotSupported())
            if isinstance(value, Exception):
                raise value
            return value() if callable(value) else value

        return answer
