"""What the page asks for: the states of runs, and the points and samples of one."""

import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from basics.errors import UserError, visible
from lab.list_runs import read_state, slowdowns_of
from lab.runs import RUNNING, Version, is_launched, launched_runs, number, parsed_object, version_of
from reporting.metrics_file import LARGEST, METRICS, THROTTLING, is_list, is_step, valid_records

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
# What can be drawn: of each metric of these kinds a number, or one for each GPU.
DRAWN = [key for key, name in METRICS.items()
         if name.startswith(("train/", "validation/", "machine/")) and key != THROTTLING]
NUMBERS = [*AXES.values(), *(key for key in DRAWN if not is_list(key))]
BY_GPU = [key for key in DRAWN if is_list(key)]
SLOWED_DOWN = "gpus_slowed_down"
RISING = ("usd", "energy_kwh")  # sums: their means would be those of the past
MAX_POINTS = 1000  # of one line
CHECKED_BYTES = 64  # before the end of what was read: still the same if the file only grew
BLOCK_BYTES = 2**24  # no longer line can be parsed by pyarrow
SAMPLES_BYTES, MAX_SAMPLES, MAX_TEXT = 2**18, 40, 4000  # the end of the file; newest; characters

Answer = dict[str, Any]
Arrays = dict[str, np.ndarray]
Range = tuple[str, float, float]  # an axis, the smallest and the largest value


@dataclass(frozen=True)
class Watched:
    """The runs that are watched: some of a directory, or all that have been launched."""

    runs_dir: Path
    names: tuple[str, ...] = ()

    def runs(self) -> Answer:
        """Return the states of the runs, those that train first."""
        try:
            launched = launched_runs(self.runs_dir)
        except UserError:  # removed meanwhile, or not mounted
            launched = []
        found = [self._state(name) for name in launched if not self.names or name in self.names]
        return {"runs": sorted(found, key=lambda run: (run["status"] != RUNNING, run["name"]))}

    def _state(self, name: str) -> Answer:
        """Return a run's state, the second of its last change, and what changes with its points."""
        metrics, samples, summary = (version_of(self.runs_dir / name / file) for file in (
            "metrics.jsonl", "samples.jsonl", "summary.json"))
        changed = max((found[2] for found in (metrics, samples, summary) if found), default=0)
        return asdict(read_state(self.runs_dir, name)) | {
            "changed": changed / 1e9, "version": str((metrics, samples))}

    def has(self, name: str) -> bool:
        """Return whether this is one of the runs."""
        return (not self.names or name in self.names) and is_launched(self.runs_dir, name)

    def run(self, name: str, within: Range | None = None) -> Answer:
        """Return the points of a run's lines, as `points_of` does, and its samples.

        Args:
            name: one that `has` accepts.
        """
        columns = columns_of(self.runs_dir / name / "metrics.jsonl").read()
        return points_of(columns, within) | {"samples": self.samples(name)}

    def samples(self, name: str) -> list[Answer]:
        """Return a run's newest samples, the newest first, with orders to a terminal escaped."""
        path, content, found = self.runs_dir / name / "samples.jsonl", b"", []
        if version := version_of(path):
            with suppress(OSError), path.open("rb") as file:  # removed meanwhile
                file.seek(max(0, version[1] - SAMPLES_BYTES))
                content = file.read()
        for line in content.decode(errors="replace").split("\n"):
            sample = parsed_object(line)
            step, *texts = (sample.get(key) for key in ("global_step", "prompt", "text"))
            if is_step(step) and all(isinstance(text, str) for text in texts):
                prompt, text = (visible(text[:MAX_TEXT]) for text in texts)
                found.append({"step": step + 1, "prompt": prompt, "text": text})
        return sorted(found[-MAX_SAMPLES:], key=lambda sample: -sample["step"])


class Columns:
    """The columns of one `metrics.jsonl`. While its run trains, only what it appended is parsed."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._version: Version | None = None
        self._columns: Arrays = _parsed(b"")
        self._offset, self._last_bytes = 0, b""

    def read(self) -> Arrays:
        """Return a number a row by key, each (n,); NaN where a record has none."""
        with self._lock:
            version = version_of(self._path)
            if version != self._version:
                with suppress(OSError):  # removed or replaced meanwhile
                    self._read(version)
            return self._columns

    def _read(self, version: Version | None) -> None:
        """Parse the lines after those that were read; all, if the file is another one."""
        before, overlap, content = self._version, len(self._last_bytes), b""
        if version and before and version[0] == before[0] and version[1] >= self._offset:
            content = self._content(self._offset - overlap)
        if not content or content[:overlap] != self._last_bytes:
            # Removed, replaced, or written anew in the same place.
            self._columns, self._offset, self._last_bytes, overlap = _parsed(b""), 0, b"", 0
            content = b"" if version is None else self._content(0)
        end = content.rfind(b"\n") + 1  # the last line may not be complete yet
        if end > overlap:
            new = _parsed(content[overlap:end])
            self._columns = {key: np.concatenate([values, new[key]])
                             for key, values in self._columns.items()}
            self._offset += end - overlap
            self._last_bytes = content[max(0, end - CHECKED_BYTES):end]
        self._version = version

    def _content(self, start: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read()


@lru_cache(maxsize=64)
def columns_of(path: Path) -> Columns:
    """Return the columns of a file; the same ones every time, for what is kept in them."""
    return Columns(path)


def _parsed(content: bytes) -> Arrays:
    """Return the columns of some lines of a `metrics.jsonl`."""
    table = _table(content)
    columns = {key: table[key].to_numpy().astype(np.float64) for key in NUMBERS}
    columns |= {key: np.full(len(table), np.nan) for key in (SLOWED_DOWN, *(
        f"{key}{end}" for key in BY_GPU for end in ("", "_min", "_max")))}
    for key in (*BY_GPU, THROTTLING):
        rows = np.flatnonzero(table[key].is_valid().to_numpy())
        for row, listed in zip(rows, table[key].drop_null().to_pylist(), strict=True):
            if key == THROTTLING:
                columns[SLOWED_DOWN][row] = sum(bool(slowdowns_of(one or "")) for one in listed)
            elif known := [one for one in map(number, listed) if one is not None]:
                for end, function in (("", fmean), ("_min", min), ("_max", max)):
                    columns[f"{key}{end}"][row] = function(known)
    return columns


def _table(content: bytes) -> Any:
    """Parse lines into a table of pyarrow; those with oddities, several times slower, one by one.

    A line that is no record is left out, and so is a number that no run can have measured.
    """
    import pyarrow as pa
    from pyarrow import json as pa_json

    schema = pa.schema({**dict.fromkeys(NUMBERS, pa.float64()), "global_step": pa.int64(),
                        **dict.fromkeys(BY_GPU, pa.list_(pa.float64())),
                        THROTTLING: pa.list_(pa.string())})
    with suppress(pa.ArrowException):
        table = pa_json.read_json(
            pa.BufferReader(content),
            read_options=pa_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=pa_json.ParseOptions(explicit_schema=schema,
                                               unexpected_field_behavior="ignore"))
        values = [table[key].to_numpy() for key in NUMBERS]
        if not table["global_step"].null_count and not any(
                ((found < 0) | (found > LARGEST)).any() for found in values):
            return table
    return pa.Table.from_pylist(
        [{**{key: number(record.get(key)) for key in NUMBERS},
          **{key: [number(one) for one in record.get(key, ())] or None for key in BY_GPU},
          THROTTLING: record.get(THROTTLING)}
         for record in valid_records(content.decode(errors="replace"))], schema=schema)


def points_of(columns: Arrays, within: Range | None = None) -> dict[str, Any]:
    """Return at most `MAX_POINTS` points: `x` by axis, and `lines` by key, over the same points.

    A point is a bucket of consecutive rows: x is that of the last one, and a line has the mean `y`
    of its numbers. Where they differ it also has the extremes, `low` and `high`: of the bucket,
    of the steps in a report, and of the GPUs. `is_long`: a point is more than one record.

    Args:
        columns: as `Columns.read` returns them.
        within: only values in this range, and one more at each end.
    """
    steps = columns["global_step"]
    # Steps that were taken again after a kill are left out: a line goes to the right.
    rows = np.flatnonzero(steps >= np.fmax.accumulate(steps))
    x = {axis: np.fmax.accumulate(columns[key])[rows] for axis, key in AXES.items()}
    x["steps"] = x["steps"] + 1  # people count from 1
    if within is not None:
        axis, low, high = within
        before, after = np.flatnonzero(x[axis] < low), np.flatnonzero(x[axis] > high)
        part = slice(before[-1] if len(before) else 0, after[0] + 1 if len(after) else len(rows))
        rows, x = rows[part], {axis: values[part] for axis, values in x.items()}
    if not len(rows):
        return {"x": dict.fromkeys(AXES, ()), "lines": {}, "is_long": False}
    size = 1  # rows of a point: a power of two, so that only the last one moves when rows are added
    while -(-len(rows) // size) > MAX_POINTS:
        size *= 2
    starts = np.arange(0, len(rows), size)
    ends = np.append(starts[1:], len(rows)) - 1
    lines = {key: _line(key, columns, rows, starts) for key in ("usd", *DRAWN, SLOWED_DOWN)
             if not key.endswith(("_min", "_max")) and not np.isnan(columns[key][rows]).all()}
    return {"x": {axis: _short(values[ends], 10) for axis, values in x.items()},
            "lines": lines, "is_long": size > 1}


def _line(key: str, columns: Arrays, rows: np.ndarray,
          starts: np.ndarray) -> dict[str, list[float | None]]:
    """Return the numbers of one line in some rows, a bucket at each of `starts` among them."""
    values, least, most = (columns.get(f"{key}{end}", columns[key])[rows]
                           for end in ("", "_min", "_max"))
    low, high = np.fmin.reduceat(least, starts), np.fmax.reduceat(most, starts)
    if key in RISING:
        return {"y": _short(high)}
    is_known = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # 0 / 0: a bucket without numbers
        means = (np.add.reduceat(np.where(is_known, values, 0), starts)
                 / np.add.reduceat(is_known.astype(int), starts))
    line = {"y": _short(means)}
    return line if np.array_equal(low, high, equal_nan=True) else line | {
        "low": _short(low), "high": _short(high)}


def _short(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Return numbers with so many digits, as few characters of JSON; None for NaN."""
    return [None if value != value else int(value) if value.is_integer()
            else float(f"{value:.{digits}g}") for value in values.tolist()]
