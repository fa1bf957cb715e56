"""The records of a run as columns. While a run trains, only what it appended is parsed."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import numpy as np

from lab.compare.run_figures import Record, number
from lab.watch.files import Identity, identity_of, read_part
from lab.watch.latest import MAX_GPUS, slowdowns_of
from lab.watch.many_records import MIN_BYTES, Table, table_of
from reporting.metrics_file import MAX_RECORDS_BYTES, valid_records

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
NUMBERS = ("train_loss", "train_loss_min", "train_loss_max", "validation_loss", "learning_rate",
           "grad_norm", "grad_norm_max", "tokens_per_second", "slowest_step_seconds", "mfu", "usd",
           "energy_kwh", "host_ram_gib", "host_load", "disk_free_gib")
BY_GPU = ("gpu_memory_gib", "gpu_use_percent", "gpu_temperature_c", "gpu_power_w")
THROTTLING, SLOWED = "gpu_throttling", "gpus_slowed_down"
KEYS = (*NUMBERS, *(f"{key}{end}" for key in BY_GPU for end in ("", "_min", "_max")), SLOWED)
CHECKED_BYTES = 64  # before the end of what was read: still the same if the file only grew


@dataclass(frozen=True)
class Series:
    """The values of one key, and the row of the record of each."""

    rows: array = field(default_factory=lambda: array("i"))
    values: array = field(default_factory=lambda: array("d"))

    def append(self, row: int, value: float) -> None:
        self.rows.append(row)
        self.values.append(value)


class Columns:
    """The columns of one `metrics.jsonl`.

    Attributes:
        version: changes when the file is replaced, so that its rows are others.
        axes: of each axis, a number a row; NaN where a record has none.
        series: of each of `KEYS`, the numbers that there are.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._forget()

    @contextmanager
    def updated(self) -> Iterator[Columns]:
        """Read what was appended since the last time; other threads wait until the block ends."""
        with self._lock:
            found = identity_of(self._path)
            if found != self._found:
                with suppress(OSError):  # removed or replaced meanwhile
                    self._read(found)
            yield self

    @property
    def num_rows(self) -> int:
        return len(self.axes["steps"])

    def axis(self, name: str) -> np.ndarray:
        """Return the numbers of an axis, (num_rows,)."""
        return np.array(self.axes[name], dtype=np.float64)

    def _forget(self) -> None:
        self.version = secrets.token_hex(6)
        self.axes = {name: array("d") for name in AXES}
        self.series = {key: Series() for key in KEYS}
        self._found: Identity | None = None
        self._offset, self._last_bytes = 0, b""

    def _read(self, found: Identity | None) -> None:
        if found is None or not found.is_readable:
            if self._found is not None:
                self._forget()
            return
        if self._found is not None and (found.inode != self._found.inode
                                        or found.size < self._offset):
            self._forget()
        overlap = len(self._last_bytes)
        content = read_part(self._path, self._offset - overlap, max_bytes=MAX_RECORDS_BYTES)
        if content[:overlap] != self._last_bytes:  # written anew in the same place
            self._forget()
            content, overlap = read_part(self._path, 0, max_bytes=MAX_RECORDS_BYTES), 0
        end = content.rfind(b"\n") + 1  # the last line may not be complete yet
        if end > overlap:
            self._append_all(content[overlap:end])
            self._offset += end - overlap
            self._last_bytes = content[max(0, end - CHECKED_BYTES):end]
        self._found = found

    def _append_all(self, content: bytes) -> None:
        table = None
        if len(content) >= MIN_BYTES:
            table = table_of(content, (*AXES.values(), *NUMBERS), number_lists=BY_GPU,
                             text_lists=(THROTTLING,))
        if table is not None:
            self._append_table(table)
            return
        for record in valid_records(content.decode(errors="replace")):
            self._append(record)

    def _append_table(self, table: Table) -> None:
        """Append what `_append` would."""
        start = self.num_rows
        for name, key in AXES.items():
            self.axes[name].frombytes((table.numbers[key] + (name == "steps")).tobytes())
        for key in NUMBERS:
            rows = np.flatnonzero(np.isfinite(table.numbers[key]))
            self.series[key].rows.frombytes((start + rows).astype(np.int32).tobytes())
            self.series[key].values.frombytes(table.numbers[key][rows].tobytes())
        for key, (rows, lists) in table.lists.items():
            for row, values in zip(rows.tolist(), lists, strict=True):
                if key == THROTTLING:
                    self._append_throttled(start + row, values)
                else:
                    self._append_gpus(start + row, key, values)

    def _append(self, record: Record) -> None:
        row = self.num_rows
        for name, key in AXES.items():
            value = number(record.get(key))
            self.axes[name].append(np.nan if value is None else value)
        self.axes["steps"][row] += 1  # people count from 1
        for key in NUMBERS:
            if key in record and (value := number(record[key])) is not None:
                self.series[key].append(row, value)
        for key in BY_GPU:
            if key in record:
                self._append_gpus(row, key, record[key])
        if isinstance(throttled := record.get(THROTTLING), list):
            self._append_throttled(row, throttled)

    def _append_throttled(self, row: int, reasons: list[object]) -> None:
        self.series[SLOWED].append(row, sum(map(bool, map(slowdowns_of, reasons[:MAX_GPUS]))))

    def _append_gpus(self, row: int, key: str, values: object) -> None:
        """Append the mean, the smallest and the largest number of the GPUs."""
        found = [] if not isinstance(values, list) else [
            n for n in map(number, values[:MAX_GPUS]) if n is not None]
        if found:
            for end, value in (("", fmean(found)), ("_min", min(found)), ("_max", max(found))):
                self.series[f"{key}{end}"].append(row, value)


@lru_cache(maxsize=64)
def columns_of(path: Path) -> Columns:
    """Return the columns of a file; the same ones every time, for what is kept in them."""
    return Columns(path)
