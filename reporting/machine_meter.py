"""Rank 0's machine while a run trains: memory, load, GPUs, energy. For the records of steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from basics.errors import describe
from basics.gpu_readings import GIB, GpuReading, read_gpus

READING_SECONDS = 15.0  # between two readings
ANSWER_SECONDS = 2.0  # for a reading that was asked for
JOULES_PER_KWH = 3.6e6
# A power cap is none: a card has it at full load.
SLOWDOWNS = ("hw thermal slowdown", "sw thermal slowdown", "hw power brake slowdown")


class MachineMeter:
    """Reads the machine every 15 s while a run trains. Rank 0 starts it.

    In a thread of its own: a driver or a disk in trouble answers late or never. The watchdog's
    thread would then miss signals and hangs, and the training thread would stand still. While
    this thread waits, there are only no new readings. It writes nothing: the training thread puts
    the last reading into its next record, so `metrics.jsonl` has one writer.

    Args:
        gpu_uuids: the GPUs that this run uses on this machine, in the order of the lists.

    Attributes:
        energy_kwh: what they and earlier launches have used; None if it cannot be read.
    """

    def __init__(self, run_dir: Path, gpu_uuids: Sequence[str], *,
                 seconds: float = READING_SECONDS) -> None:
        self._run_dir, self._gpu_uuids, self._seconds = run_dir, gpu_uuids, seconds
        self.energy_kwh: float | None = None
        self._gpus: list[GpuReading] = []
        self._unrecorded: deque[dict[str, Any]] = deque(maxlen=1)
        self._failure: str | None = None  # of the first reading that failed; "" once it is told
        self._is_asked, self._has_answered = threading.Event(), threading.Event()
        self._energy, self._ends = EnergyMeter(len(gpu_uuids)), False

    def start(self, earlier_kwh: float = 0.0) -> None:
        """Start to read, with the energy that earlier launches have used."""
        self._energy = EnergyMeter(len(self._gpu_uuids), earlier_kwh)
        # A daemon: at the end nobody waits for a driver that does not answer.
        threading.Thread(target=self._work, name="machine meter", daemon=True).start()

    def pop_reading(self) -> dict[str, Any]:
        """Return the last reading as keys of a record, once; empty if there is no new one."""
        return self._unrecorded.pop() if self._unrecorded else {}

    def pop_failure(self) -> str:
        """Return why a reading failed, once, the first time; else ""."""
        failure, self._failure = self._failure, self._failure and ""
        return failure or ""

    def renew(self) -> None:
        """Read now, or go on without a new reading if that takes long."""
        self._has_answered.clear()
        self._is_asked.set()
        self._has_answered.wait(ANSWER_SECONDS)

    def stop(self) -> None:
        """Read a last time and end."""
        self._ends = True
        self.renew()

    def throttling(self) -> str | None:
        """Return which of `SLOWDOWNS` a GPU had at the last reading; None for none, or unknown."""
        found = {reason for gpu in self._gpus for reason in gpu.throttle_reasons or ()}
        return next((reason for reason in SLOWDOWNS if reason in found), None)

    def _work(self) -> None:
        ends = False
        while not ends:
            ends = self._ends
            try:
                self._read()
            except Exception as error:  # whatever it is, training needs no readings
                if self._failure is None:
                    self._failure = describe(error)
            self._has_answered.set()
            if not ends:
                self._is_asked.wait(self._seconds)
                self._is_asked.clear()

    def _read(self) -> None:
        memory = psutil.virtual_memory()  # of the machine, not of a container's share of it
        reading: dict[str, Any] = {
            "host_ram_gib": round((memory.total - memory.available) / GIB, 2),
            "host_load": round(psutil.getloadavg()[0], 2),  # processes that run or wait, a minute
            "disk_free_gib": round(psutil.disk_usage(str(self._run_dir)).free / GIB, 2)}
        if self._gpu_uuids:
            self._gpus = read_gpus(self._gpu_uuids)
            self.energy_kwh = self._energy.add(self._gpus)
            reading |= gpu_values(self._gpus)
            if self.energy_kwh is not None:
                reading["energy_kwh"] = round(self.energy_kwh, 6)
        self._unrecorded.append(reading)


class EnergyMeter:
    """The energy of GPUs: by their counters, or by their power where they have none."""

    def __init__(self, num_gpus: int, earlier_kwh: float = 0.0) -> None:
        self._num_gpus, self._joules = num_gpus, earlier_kwh * JOULES_PER_KWH
        self._before: dict[int, tuple[float, GpuReading]] = {}

    def add(self, gpus: list[GpuReading]) -> float | None:
        """Add what the GPUs, the same ones in each call, have used since the last one.

        Returns:
            All that was added, in kWh; None until each of them has told its energy or power.
        """
        now = time.monotonic()
        for index, gpu in enumerate(gpus):
            before, earlier = self._before.get(index, (now, gpu))
            if earlier.energy_joules is not None and gpu.energy_joules is not None:
                self._joules += max(0.0, gpu.energy_joules - earlier.energy_joules)
            elif gpu.power_w is not None:
                power_w = gpu.power_w if earlier.power_w is None else earlier.power_w
                self._joules += (power_w + gpu.power_w) / 2 * (now - before)
            if gpu.energy_joules is not None or gpu.power_w is not None:
                self._before[index] = now, gpu
        is_known = len(self._before) == self._num_gpus
        return self._joules / JOULES_PER_KWH if is_known else None


def gpu_values(gpus: list[GpuReading]) -> dict[str, list[Any]]:
    """Return the keys of a record with a value for each GPU; without those that none tells."""
    def rounded(numbers: list[float | None]) -> list[float | None]:
        return [None if number is None else round(number, 2) for number in numbers]

    lists: dict[str, list[Any]] = {
        "gpu_memory_gib": rounded([gpu.memory_used_gib for gpu in gpus]),
        "gpu_use_percent": [gpu.use_percent for gpu in gpus],
        "gpu_temperature_c": [gpu.temperature_c for gpu in gpus],
        "gpu_power_w": rounded([gpu.power_w for gpu in gpus]),
    }
    known = {key: values for key, values in lists.items()
             if any(value is not None for value in values)}
    if any(gpu.throttle_reasons is not None for gpu in gpus):
        known["gpu_throttling"] = [", ".join(gpu.throttle_reasons or ()) for gpu in gpus]
    return known
