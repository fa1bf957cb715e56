"""Rank 0's machine while a run trains: memory, load, GPUs, energy. For the records of steps."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from basics.errors import describe
from basics.gpu_readings import GIB, SLOWDOWNS, GpuReading, read_gpus
from reporting.metrics_file import THROTTLING

READING_SECONDS = 15.0  # between two readings
LAST_SECONDS = 2.0  # for the last one
JOULES_PER_KWH = 3.6e6
GPU_FIELDS = {
    "gpu_memory_gib": "memory_used_gib",
    "gpu_use_percent": "use_percent",
    "gpu_temperature_c": "temperature_c",
    "gpu_power_w": "power_w",
}


class MachineMeter:
    """Reads the machine every 15 s while a run trains. Rank 0 starts it.

    In a thread of its own: a driver or a disk in trouble answers late or never. While it waits,
    there are only no new readings. `energy_kwh` is what the run's GPUs on this machine have used
    in all launches; None if it cannot be read.
    """

    def __init__(self, run_dir: Path, gpu_uuids: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._gpu_uuids = gpu_uuids
        self.energy_kwh: float | None = None
        self._gpus: list[GpuReading] = []
        self._reading: dict[str, Any] = {}  # that no record has yet
        self._failure: str | None = None  # of the first reading that failed; "" when it was told
        self._ends = threading.Event()
        # A daemon: at the end nobody waits for a driver that does not answer.
        self._thread = threading.Thread(target=self._work, name="machine meter", daemon=True)
        self._joules = 0.0
        self._counters: list[float] = []  # of the last reading, in joules

    def start(self, earlier_kwh: float = 0.0) -> None:
        self._joules = earlier_kwh * JOULES_PER_KWH
        self._thread.start()

    def pop_reading(self) -> dict[str, Any]:
        """Return the last reading as keys of a record, once; empty if there is no new one."""
        reading, self._reading = self._reading, {}
        return reading

    def pop_failure(self) -> str:
        """Return why a reading failed, once, the first time; else ""."""
        failure = self._failure or ""
        if failure:
            self._failure = ""
        return failure

    def stop(self) -> None:
        """Read a last time and end, or end without that if it takes long."""
        self._ends.set()
        self._thread.join(LAST_SECONDS)

    def throttling(self) -> str | None:
        """Return which of `SLOWDOWNS` GPUs had at the last reading; None for none, or unknown."""
        found = {reason for gpu in self._gpus for reason in gpu.throttle_reasons or ()}
        return ", ".join(reason for reason in SLOWDOWNS if reason in found) or None

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ends.is_set()
            try:
                self._reading = self._read()
            except Exception as error:  # whatever it is, training needs no readings
                if self._failure is None:
                    self._failure = describe(error)
            self._ends.wait(READING_SECONDS)

    def _read(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()  # of the machine, not of a container's share of it
        reading: dict[str, Any] = {
            "host_ram_gib": round((memory.total - memory.available) / GIB, 2),
            "host_load": round(psutil.getloadavg()[0], 2),  # processes that run or wait, a minute
            "disk_free_gib": round(psutil.disk_usage(str(self._run_dir)).free / GIB, 2),
        }
        if not self._gpu_uuids:
            return reading
        gpus = read_gpus(self._gpu_uuids)
        self._gpus = gpus
        for key, field in GPU_FIELDS.items():
            values = [getattr(gpu, field) for gpu in gpus]
            if any(value is not None for value in values):
                reading[key] = [value if value is None else round(value, 2) for value in values]
        if any(gpu.throttle_reasons is not None for gpu in gpus):
            reading[THROTTLING] = [", ".join(gpu.throttle_reasons or ()) for gpu in gpus]
        counters = [gpu.energy_joules for gpu in gpus if gpu.energy_joules is not None]
        if len(counters) == len(self._gpu_uuids):
            for now, then in zip(counters, self._counters or counters, strict=True):
                self._joules += max(0.0, now - then)  # they may be set back
            self._counters = counters
            self.energy_kwh = self._joules / JOULES_PER_KWH
        if self.energy_kwh is not None:
            reading["energy_kwh"] = round(self.energy_kwh, 6)
        return reading
