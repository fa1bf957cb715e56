"""The records of a run as columns, and the points that the page draws of them."""

import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lab.runs import LARGEST, Identity, identity_of, number, read_part
from lab.watch.run_state import slowdowns_of
from reporting.metrics_file import THROTTLING, valid_records

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
NUMBERS = ("train_loss", "train_loss_min", "train_loss_max", "validation_loss", "learning_rate",
           "grad_norm", "grad_norm_max", "tokens_per_second", "slowest_step_seconds", "mfu",
           "energy_kwh", "host_ram_gib", "host_load", "disk_free_gib")
BY_GPU = ("gpu_memory_gib", "gpu_use_percent", "gpu_temperature_c", "gpu_power_w")
RISING = ("usd", "energy_kwh")  # sums: their means would be those of the past
MAX_POINTS = 1000  # of one line
CHECKED_BYTES = 64  # before the end of what was read: still the same if the file only grew
BLOCK_BYTES = 2**24  # no longer line can be parsed by pyarrow

Arrays = dict[str, np.ndarray]
Range = tuple[str, float, float]  # an axis, the smallest and the largest value


class Columns:
    """The columns of one `metrics.jsonl`. While its run trains, only what it appended is parsed."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._found: Identity | None = None
        self._columns: Arrays = {}
        self._offset, self._last_bytes = 0, b""

    def read(self) -> Arrays:
        """Return a number a row by key, each (n,); NaN where a record has none."""
        with self._lock:
            found = identity_of(self._path)
            if found != self._found:
                with suppress(OSError):  # removed or replaced meanwhile
                    self._read(found)
            return self._columns

    def _read(self, found: Identity | None) -> None:
        """Parse the lines after those that were read; all, if the file is another one."""
        before, overlap, content = self._found, len(self._last_bytes), b""
        if found and before and found.inode == before.inode and found.size >= self._offset:
            content = read_part(self._path, self._offset - overlap)
        if not content or content[:overlap] != self._last_bytes:
            # Removed, replaced, or written anew in the same place.
            self._columns, self._offset, self._last_bytes, overlap = {}, 0, b"", 0
            content = b"" if found is None else read_part(self._path)
        end = content.rfind(b"\n") + 1  # the last line may not be complete yet
        if end > overlap:
            self._columns = _joined(self._columns, _parsed(content[overlap:end]))
            self._offset += end - overlap
            self._last_bytes = content[max(0, end - CHECKED_BYTES):end]
        self._found = found


@lru_cache(maxsize=64)
def columns_of(path: Path) -> Columns:
    """Return the columns of a file; the same ones every time, for what is kept in them."""
    return Columns(path)


def _joined(before: Arrays, after: Arrays) -> Arrays:
    """Append columns; a key that only one of both has is NaN in the other's rows."""
    lengths = [len(columns.get("global_step", ())) for columns in (before, after)]
    return {key: np.concatenate([columns.get(key, np.full(length, np.nan)) for columns, length in
                                 zip((before, after), lengths, strict=True)])
            for key in before | after}


def _parsed(content: bytes) -> Arrays:
    """Return the columns of some lines of a `metrics.jsonl`, without those that have no number."""
    table = _table(content)
    columns = {key: table[key].to_numpy().astype(np.float64)
               for key in dict.fromkeys((*AXES.values(), *NUMBERS))}
    for key in BY_GPU:
        rows, lists = _lists(table[key])
        numbers = [[n for n in map(number, listed) if n is not None] or [np.nan]
                   for listed in lists]
        for end, function in (("", fmean), ("_min", min), ("_max", max)):
            columns[f"{key}{end}"] = np.full(len(table), np.nan)
            columns[f"{key}{end}"][rows] = [function(values) for values in numbers]
    rows, lists = _lists(table[THROTTLING])
    columns["gpus_slowed_down"] = np.full(len(table), np.nan)
    columns["gpus_slowed_down"][rows] = [
        sum(bool(slowdowns_of(reasons)) for reasons in listed) for listed in lists]
    return {key: values for key, values in columns.items()
            if key == "global_step" or not np.isnan(values).all()}


def _table(content: bytes) -> Any:
    """Parse lines into a table of pyarrow; those with oddities, several times slower, one by one.

    A line that is no record is left out, and so is a number that no run can have measured.
    """
    import pyarrow as pa
    from pyarrow import json as pa_json

    numbers = {*AXES.values(), *NUMBERS}
    schema = pa.schema({**dict.fromkeys(sorted(numbers), pa.float64()), "global_step": pa.int64(),
                        **dict.fromkeys(BY_GPU, pa.list_(pa.float64())),
                        THROTTLING: pa.list_(pa.string())})
    with suppress(pa.ArrowException):
        table = pa_json.read_json(
            pa.BufferReader(content),
            read_options=pa_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=pa_json.ParseOptions(explicit_schema=schema,
                                               unexpected_field_behavior="ignore"))
        values = [table[key].to_numpy() for key in numbers]
        if not table["global_step"].null_count and not any(
                ((found < 0) | (found > LARGEST)).any() for found in values):
            return table
    return pa.Table.from_pylist(
        [{**{key: number(record.get(key)) for key in numbers},
          **{key: [number(one) for one in record.get(key, ())] or None for key in BY_GPU},
          THROTTLING: record.get(THROTTLING)}
         for record in valid_records(content.decode(errors="replace"))], schema=schema)


def _lists(column: Any) -> tuple[np.ndarray, list[list[Any]]]:
    """Return the rows that have a list, and these lists."""
    return np.flatnonzero(column.is_valid().to_numpy()), column.drop_null().to_pylist()


def points_of(columns: Arrays, within: Range | None = None) -> dict[str, Any]:
    """Return at most `MAX_POINTS` points: `x` by axis, and `lines` by key, over the same points.

    A point is a bucket of consecutive rows: x is that of the last one, and a line has the mean `y`
    of its numbers. Where they differ it also has the extremes, `low` and `high`: of the bucket,
    of the steps in a report, and of the GPUs. `is_long`: a point is more than one record.

    Args:
        columns: as `Columns.read` returns them.
        within: only values in this range, and one more at each end.
    """
    steps = columns.get("global_step", np.empty(0))
    # Steps that were taken again after a kill are left out: a line goes to the right.
    rows = np.flatnonzero(steps >= np.fmax.accumulate(steps))
    x = {axis: np.fmax.accumulate(columns.get(key, np.full(len(steps), np.nan)))[rows]
         for axis, key in AXES.items()}
    x["steps"] = x["steps"] + 1  # people count from 1
    if within is not None:
        axis, low, high = within
        before, after = np.flatnonzero(x[axis] < low), np.flatnonzero(x[axis] > high)
        part = slice(before[-1] if len(before) else 0, after[0] + 1 if len(after) else len(rows))
        rows, x = rows[part], {axis: values[part] for axis, values in x.items()}
    if not len(rows):
        return {"x": dict.fromkeys(AXES, ()), "lines": {}, "is_long": False}
    size = bucket_size(len(rows))
    starts = np.arange(0, len(rows), size)
    ends = np.append(starts[1:], len(rows)) - 1
    lines = {key: _line(key, {name: values[rows] for name, values in columns.items()
                              if name in (key, f"{key}_min", f"{key}_max")}, starts)
             for key in columns if key in ("usd", "gpus_slowed_down", *NUMBERS, *BY_GPU)
             and not key.endswith(("_min", "_max"))}
    return {"x": {axis: _short(values[ends], 10) for axis, values in x.items()},
            "lines": {key: line for key, line in lines.items() if any(
                y is not None for y in line["y"])}, "is_long": size > 1}


def _line(key: str, columns: Arrays, starts: np.ndarray) -> dict[str, list[float | None]]:
    """Return the numbers of one line, a bucket at each of `starts`."""
    values = columns[key]
    is_known = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # 0 / 0: a bucket without numbers
        means = (np.add.reduceat(np.where(is_known, values, 0), starts)
                 / np.add.reduceat(is_known.astype(int), starts))
    low = np.fmin.reduceat(columns.get(f"{key}_min", values), starts)
    high = np.fmax.reduceat(columns.get(f"{key}_max", values), starts)
    if key in RISING:
        return {"y": _short(high)}
    line = {"y": _short(means)}
    return line if np.array_equal(low, high, equal_nan=True) else line | {
        "low": _short(low), "high": _short(high)}


def bucket_size(num_rows: int) -> int:
    """Return how many rows become one point: a power of two.

    So only the last point moves when records are appended, until all buckets double.
    """
    size = 1
    while -(-num_rows // size) > MAX_POINTS:
        size *= 2
    return size


def _short(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Return numbers with so many digits, as few characters of JSON; None for NaN."""
    return [None if value != value else int(value) if value.is_integer()
            else float(f"{value:.{digits}g}") for value in values.tolist()]
