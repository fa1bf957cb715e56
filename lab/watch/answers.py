"""What the page asks for: the states of runs, and the points and samples of one."""

import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from basics.errors import UserError, visible
from basics.json_files import parsed_object
from lab.runs import RUNNING, is_launched, launched_runs, number, read_state, slowdowns, version_of
from reporting.metrics_file import LARGEST, METRICS, THROTTLING, is_step, valid_records, whole_lines

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
# What can be drawn: of each metric of these kinds a number, or one for each GPU.
DRAWN = [
    key
    for key, name in METRICS.items()
    if name.startswith(("train/", "validation/", "machine/")) and key != THROTTLING
]
BY_GPU = [key for key in DRAWN if "{gpu}" in METRICS[key]]
NUMBERS = [*AXES.values(), *(key for key in DRAWN if key not in BY_GPU)]
SLOWED_DOWN = "gpus_slowed_down"
RISING = ("usd", "energy_kwh")  # sums: their means would be those of the past
MAX_POINTS = 1000  # of one line
BLOCK_BYTES = 2**24  # no longer line can be parsed by pyarrow
SAMPLES_BYTES, MAX_SAMPLES, MAX_TEXT = 2**18, 40, 4000  # the end of the file; newest; characters

Answer = dict[str, Any]
Arrays = dict[str, np.ndarray]
Range = tuple[str, float, float]  # an axis, the smallest and the largest value


class Watched:
    """The runs that are watched: some of a directory, or all that have been launched."""

    def __init__(self, runs_dir: Path, names: tuple[str, ...] = ()) -> None:
        self.runs_dir, self.names = runs_dir, names
        self._columns: dict[str, Columns] = {}
        self._lock = threading.Lock()

    def runs(self) -> Answer:
        """Return the states of the runs, those that train first; `version` is of the points."""
        try:
            launched = launched_runs(self.runs_dir)
        except UserError:  # the directory was removed meanwhile, or is not mounted
            launched = []
        runs = []
        for name in launched:
            if self.names and name not in self.names:
                continue
            run_dir = self.runs_dir / name
            metrics = version_of(run_dir / "metrics.jsonl")
            samples = version_of(run_dir / "samples.jsonl")
            summary = version_of(run_dir / "summary.json")
            times = [version[2] for version in (metrics, samples, summary) if version]
            run = asdict(read_state(self.runs_dir, name))
            run["changed"] = max(times, default=0) / 1e9
            run["version"] = str((metrics, samples))
            runs.append(run)
        return {"runs": sorted(runs, key=lambda run: (run["status"] != RUNNING, run["name"]))}

    def has(self, name: str) -> bool:
        return (not self.names or name in self.names) and is_launched(self.runs_dir, name)

    def run(self, name: str, within: Range | None = None) -> Answer:
        """Return the points of a run that `has` accepts, as `points_of` does, and its samples."""
        with self._lock:
            columns = self._columns.setdefault(name, Columns(self.runs_dir / name)).read()
        return points_of(columns, within) | {"samples": self.samples(name)}

    def samples(self, name: str) -> list[Answer]:
        """Return a run's newest samples, the newest first, with orders to a terminal escaped."""
        path, content, found = self.runs_dir / name / "samples.jsonl", b"", []
        if version := version_of(path):
            content = whole_lines(path, max(0, version[1] - SAMPLES_BYTES))
        for line in content.decode(errors="replace").split("\n"):
            sample = parsed_object(line)
            step, *texts = (sample.get(key) for key in ("global_step", "prompt", "text"))
            if is_step(step) and all(isinstance(text, str) for text in texts):
                prompt, text = (visible(text[:MAX_TEXT]) for text in texts)
                found.append({"step": step + 1, "prompt": prompt, "text": text})
        return sorted(found[-MAX_SAMPLES:], key=lambda sample: -sample["step"])


class Columns:
    """The columns of a run's records. While it trains, only what it appended is parsed."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._columns = run_dir / "metrics.jsonl", _parsed(b"")
        self._inode, self._offset = 0, 0

    def read(self) -> Arrays:
        """Return a number a row by key, each (n,); NaN where a record has none.

        Steps that were taken again after a kill are left out: no axis goes back.
        """
        inode, size, _ = version_of(self._path) or (0, 0, 0)
        if inode != self._inode or size < self._offset:  # removed, or replaced
            self._columns, self._inode, self._offset = _parsed(b""), inode, 0
        if size > self._offset:
            content = whole_lines(self._path, self._offset)
            if content:
                self._append(_parsed(content))
                self._offset += len(content)
        return self._columns

    def _append(self, new: Arrays) -> None:
        """Append rows without those whose step is not larger than all before.

        On each axis a row's value is the largest until then.
        """
        largest = {}
        for key in AXES.values():
            last = self._columns[key][-1:]  # empty at first
            largest[key] = np.fmax.accumulate(np.concatenate([last, new[key]]))[len(last) :]
        is_next = new["global_step"] >= largest["global_step"]
        for key, values in (new | largest).items():
            self._columns[key] = np.concatenate([self._columns[key], values[is_next]])


def _parsed(content: bytes) -> Arrays:
    """Return the columns of some records; of a list with a number for each GPU three columns."""
    table = _table(content)
    columns = {key: table[key].to_numpy().astype(np.float64) for key in NUMBERS}
    for key in BY_GPU:
        values, rows, starts = _flattened(table[key])
        values = values.to_numpy(zero_copy_only=False)
        values = np.where((values >= 0) & (values <= LARGEST), values, np.nan)
        for name, combine in (
            (key, _means),
            (f"{key}_min", np.fmin.reduceat),
            (f"{key}_max", np.fmax.reduceat),
        ):
            columns[name] = np.full(len(table), np.nan)
            if len(rows):
                columns[name][rows] = combine(values, starts)
    texts, rows, starts = _flattened(table[THROTTLING])
    columns[SLOWED_DOWN] = np.full(len(table), np.nan)
    if len(rows):
        # There are few different texts, and each is looked at once.
        is_slow = {text: float(bool(slowdowns(text or ""))) for text in texts.unique().to_pylist()}
        found = [is_slow[text] for text in texts.to_pylist()]
        columns[SLOWED_DOWN][rows] = np.add.reduceat(found, starts)
    return columns


def _flattened(column: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return the items of a column of lists, the rows that have some, and where each begins."""
    lists = column.combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    rows = np.flatnonzero(lengths)
    starts = np.cumsum(lengths) - lengths
    return lists.flatten(), rows, starts[rows]


def _table(content: bytes) -> Any:
    """Parse lines into a table of pyarrow; those with oddities, several times slower, one by one.

    A line that is no record is left out, and so is a number that no run can have measured.
    """
    import pyarrow as pa
    from pyarrow import json as pa_json

    schema = pa.schema(
        {
            **dict.fromkeys(NUMBERS, pa.float64()),
            "global_step": pa.int64(),
            **dict.fromkeys(BY_GPU, pa.list_(pa.float64())),
            THROTTLING: pa.list_(pa.string()),
        }
    )
    with suppress(pa.ArrowException):
        table = pa_json.read_json(
            pa.BufferReader(content),
            pa_json.ReadOptions(block_size=BLOCK_BYTES),
            pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        values = np.stack([table[key].to_numpy() for key in NUMBERS])
        is_odd = (values < 0) | (values > LARGEST)
        if not table["global_step"].null_count and not is_odd.any():
            return table
    rows = []
    for record in valid_records(content.decode(errors="replace")):
        row: dict[str, Any] = {key: number(record.get(key)) for key in NUMBERS}
        for key in BY_GPU:
            row[key] = [number(value) for value in record.get(key, ())] or None
        row[THROTTLING] = record.get(THROTTLING)
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=schema)


def points_of(columns: Arrays, within: Range | None = None) -> Answer:
    """Return at most `MAX_POINTS` points: `x` by axis, and `lines` by key, over the same points.

    A point is a bucket of consecutive rows: x is that of the last one, and a line has the mean `y`
    of its numbers. Where they differ it also has the extremes, `low` and `high`: of the bucket,
    of the steps in a report, and of the GPUs. `is_long`: a point is more than one record. A range
    has one more value at each end.
    """
    first, num_rows = 0, len(columns["global_step"])
    if within is not None:
        axis, smallest, largest = within
        values = columns[AXES[axis]]
        if axis == "steps":
            values = values + 1  # people count from 1
        before = np.flatnonzero(values < smallest)
        after = np.flatnonzero(values > largest)
        first = before[-1] if len(before) else 0
        end = after[0] + 1 if len(after) else num_rows
        num_rows = end - first
    if not num_rows:
        return {"x": dict.fromkeys(AXES, ()), "lines": {}, "is_long": False}
    size = 1  # rows of a point: a power of two, so that only the last one moves when rows are added
    while -(-num_rows // size) > MAX_POINTS:
        size *= 2
    rows, starts = slice(first, first + num_rows), np.arange(0, num_rows, size)
    ends = first + np.append(starts[1:], num_rows) - 1
    return {
        "x": {
            axis: _short(columns[key][ends] + (axis == "steps"), 10) for axis, key in AXES.items()
        },
        "lines": {
            key: _line(key, columns, rows, starts)
            for key in ("usd", *DRAWN, SLOWED_DOWN)
            if not key.endswith(("_min", "_max")) and not np.isnan(columns[key][rows]).all()
        },
        "is_long": size > 1,
    }


def _line(key: str, columns: Arrays, rows: slice, starts: np.ndarray) -> Answer:
    """Return the numbers of one line in some rows, a bucket at each of `starts` among them."""
    values, least, most = (
        columns.get(f"{key}{end}", columns[key])[rows] for end in ("", "_min", "_max")
    )
    low, high = np.fmin.reduceat(least, starts), np.fmax.reduceat(most, starts)
    # Losses are shown with four decimals: if they were rounded before, the last would differ.
    digits = 10 if key.endswith("_loss") else 6
    if key in RISING:
        return {"y": _short(high, digits)}
    line = {"y": _short(_means(values, starts), digits)}
    return (
        line
        if np.array_equal(low, high, equal_nan=True)
        else line | {"low": _short(low, digits), "high": _short(high, digits)}
    )


def _means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the numbers in each bucket; NaN if it has none."""
    is_known = np.isfinite(values)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.add.reduceat(np.where(is_known, values, 0), starts) / np.add.reduceat(
            is_known.astype(int), starts
        )


def _short(values: np.ndarray, digits: int) -> list[float | None]:
    """Return numbers with so many digits, as few characters of JSON; None for NaN."""
    return [float(f"{value:.{digits}g}") if value == value else None for value in values.tolist()]
