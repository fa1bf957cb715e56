"""The records of a run as columns. While a run trains, only what it appended is parsed."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lab.runs import LARGEST, Identity, Record, identity_of, number, read_part
from lab.watch.run_state import slowdowns_of
from reporting.metrics_file import THROTTLING, valid_records

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
NUMBERS = ("train_loss", "train_loss_min", "train_loss_max", "validation_loss", "learning_rate",
           "grad_norm", "grad_norm_max", "tokens_per_second", "slowest_step_seconds", "mfu", "usd",
           "energy_kwh", "host_ram_gib", "host_load", "disk_free_gib")
BY_GPU = ("gpu_memory_gib", "gpu_use_percent", "gpu_temperature_c", "gpu_power_w")
SLOWED = "gpus_slowed_down"
KEYS = (*NUMBERS, *(f"{key}{end}" for key in BY_GPU for end in ("", "_min", "_max")), SLOWED)
CHECKED_BYTES = 64  # before the end of what was read: still the same if the file only grew
MIN_BYTES = 2**20  # fewer are parsed before pyarrow would have been imported
BLOCK_BYTES = 2**24  # no longer line can be parsed by it


class Columns:
    """The columns of one `metrics.jsonl`.

    Attributes:
        axes: of each axis, a number a row; NaN where a record has none.
        series: of each of `KEYS`, the rows that have a number, and the numbers.
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
        self.axes = {name: array("d") for name in AXES}
        self.series = {key: (array("i"), array("d")) for key in KEYS}
        self._found: Identity | None = None
        self._offset, self._last_bytes = 0, b""

    def _read(self, found: Identity | None) -> None:
        """Parse the lines after those that were read; all, if the file is another one."""
        before, overlap = self._found, len(self._last_bytes)
        content = b""
        if found and before and found.inode == before.inode and found.size >= self._offset:
            content = read_part(self._path, self._offset - overlap)
        if found is None or content[:overlap] != self._last_bytes or not content:
            self._forget()  # removed, replaced, or written anew in the same place
            content, overlap = b"" if found is None else read_part(self._path), 0
        end = content.rfind(b"\n") + 1  # the last line may not be complete yet
        if end > overlap:
            lines = content[overlap:end]
            if len(lines) < MIN_BYTES or not self._append_table(lines):
                for record in valid_records(lines.decode(errors="replace")):
                    self._append(record)
            self._offset += end - overlap
            self._last_bytes = content[max(0, end - CHECKED_BYTES):end]
        self._found = found

    def _append(self, record: Record) -> None:
        row = self.num_rows
        for name, key in AXES.items():
            value = number(record.get(key))
            self.axes[name].append(np.nan if value is None else value)
        self.axes["steps"][row] += 1  # people count from 1
        for key in NUMBERS:
            if (value := number(record.get(key))) is not None:
                self._add(key, row, value)
        for key in (*BY_GPU, THROTTLING):
            if key in record:
                self._append_gpus(row, key, record[key])

    def _append_table(self, content: bytes) -> bool:
        """Append what `_append` would, several times faster; nothing if a line has oddities."""
        import pyarrow as pa
        from pyarrow import json as pa_json

        numbers = {*AXES.values(), *NUMBERS}
        types = {**dict.fromkeys(numbers, pa.float64()), "global_step": pa.int64(),
                 **dict.fromkeys(BY_GPU, pa.list_(pa.float64())), THROTTLING: pa.list_(pa.string())}
        try:
            table = pa_json.read_json(
                pa.BufferReader(content),
                read_options=pa_json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=pa_json.ParseOptions(explicit_schema=pa.schema(types.items()),
                                                   unexpected_field_behavior="ignore"))
        except pa.ArrowException:
            return False
        found = {key: table[key].to_numpy().astype(np.float64) for key in numbers}
        if table["global_step"].null_count or any(
                ((values < 0) | (values > LARGEST)).any() for values in found.values()):
            return False
        start = self.num_rows
        for name, key in AXES.items():
            self.axes[name].frombytes((found[key] + (name == "steps")).tobytes())
        for key in NUMBERS:
            rows, (places, values) = np.flatnonzero(np.isfinite(found[key])), self.series[key]
            places.frombytes((start + rows).astype(np.int32).tobytes())
            values.frombytes(found[key][rows].tobytes())
        for key in (*BY_GPU, THROTTLING):
            rows = np.flatnonzero(table[key].is_valid().to_numpy())
            for row, listed in zip(rows.tolist(), table[key].drop_null().to_pylist(), strict=True):
                self._append_gpus(start + row, key, listed)
        return True

    def _append_gpus(self, row: int, key: str, listed: list[Any]) -> None:
        """Append the mean and the extremes of the GPUs, or how many are slowed down."""
        if key == THROTTLING:
            self._add(SLOWED, row, sum(bool(slowdowns_of(reasons)) for reasons in listed))
        elif found := [n for n in map(number, listed) if n is not None]:
            for end, value in (("", fmean(found)), ("_min", min(found)), ("_max", max(found))):
                self._add(f"{key}{end}", row, value)

    def _add(self, key: str, row: int, value: float) -> None:
        rows, values = self.series[key]
        rows.append(row)
        values.append(value)


@lru_cache(maxsize=64)
def columns_of(path: Path) -> Columns:
    """Return the columns of a file; the same ones every time, for what is kept in them."""
    return Columns(path)
