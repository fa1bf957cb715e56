"""Rank 0's machine while a run trains: memory, load, GPUs, energy. For the records of steps."""

import threading
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
GPU_FIELDS = {"gpu_memory_gib": "memory_used_gib", "gpu_use_percent": "use_percent",
              "gpu_temperature_c": "temperature_c", "gpu_power_w": "power_w"}
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
        self._joules, self._ends = 0.0, False
        self._counters: list[float] = []  # of the last reading, in joules

    def start(self, earlier_kwh: float = 0.0) -> None:
        """Start to read, with the energy that earlier launches have used."""
        self._joules = earlier_kwh * JOULES_PER_KWH
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
            self._add_energy([gpu.energy_joules for gpu in self._gpus])
            reading |= gpu_values(self._gpus)
            if self.energy_kwh is not None:
                reading["energy_kwh"] = round(self.energy_kwh, 6)
        self._unrecorded.append(reading)

    def _add_energy(self, counters: list[float | None]) -> None:
        """Add what the GPUs have used since the last reading; their counters may be set back."""
        known = [counter for counter in counters if counter is not None]
        if len(known) == len(self._gpu_uuids):
            before, self._counters = self._counters or known, known
            self._joules += sum(max(0.0, now - then)
                                for now, then in zip(known, before, strict=True))
            self.energy_kwh = self._joules / JOULES_PER_KWH


def gpu_values(gpus: list[GpuReading]) -> dict[str, list[Any]]:
    """Return the keys of a record with a value for each GPU; without those that none tells."""
    lists = {key: [None if (value := getattr(gpu, field)) is None else round(value, 2)
                   for gpu in gpus] for key, field in GPU_FIELDS.items()}
    known: dict[str, list[Any]] = {key: values for key, values in lists.items()
                                   if any(value is not None for value in values)}
    if any(gpu.throttle_reasons is not None for gpu in gpus):
        known["gpu_throttling"] = [", ".join(gpu.throttle_reasons or ()) for gpu in gpus]
    return known
