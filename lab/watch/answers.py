"""What the page asks for: the states of runs, and the points and samples of one."""

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from basics.errors import UserError
from lab.columns import shown_in
from lab.runs import RUNNING, is_launched, launched_runs, number, read_run, version_of
from reporting.metrics_file import (
    LARGEST,
    METRICS,
    NUM_LAYERS,
    OF_SETS,
    SET_KEY,
    THROTTLING,
    Sample,
    is_list,
    read_samples,
    set_keys,
    slowdowns,
    valid_records,
    whole_lines,
)
from settings.validation import MAX_SETS

AXES = {"steps": "global_step", "tokens": "tokens", "time": "seconds", "dollars": "usd"}
# What can be drawn: of each metric of these kinds a number, or one for each GPU.
DRAWN = [
    key
    for key, name in METRICS.items()
    if name.startswith(("train/", "validation/", "machine/")) and key != THROTTLING
]
BY_GPU = [key for key in DRAWN if is_list(key)]
NUMBERS = [*AXES.values(), NUM_LAYERS, *(key for key in DRAWN if not is_list(key))]
SLOWED_DOWN = "gpus_slowed_down"
# An extreme is part of the line whose extreme it is.
LINES = [key for key in ("usd", *DRAWN, SLOWED_DOWN) if not key.endswith(("_min", "_max"))]
RISING = ("usd", "energy_kwh")  # sums: their means would be those of the past
SET_KEYS = re.compile(rb'"(' + SET_KEY.pattern.encode() + rb')"\s*:')  # in lines of records
MAX_POINTS = 1000  # of one line
BLOCK_BYTES = 2**24  # no longer line can be parsed by pyarrow

Answer = dict[str, Any]
Arrays = dict[str, np.ndarray]
Range = tuple[str, float, float]  # an axis, the smallest and the largest value


class Watched:
    """The runs that are watched: some of a directory, or all that have been launched."""

    def __init__(self, runs_dir: Path, names: tuple[str, ...] = ()) -> None:
        self.runs_dir = runs_dir
        self.names = names
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
            files = ("metrics.jsonl", "samples.jsonl", "summary.json")
            versions = [version_of(self.runs_dir / name / file) for file in files]
            times = [version[2] for version in versions if version]
            run = read_run(self.runs_dir / name, whole=False).state()
            run["changed"] = max(times, default=0) / 1e9  # seconds since the epoch
            run["version"] = str(versions[:2])
            runs.append(run)
        runs.sort(key=lambda run: (run["status"] != RUNNING, run["name"]))
        columns = [
            {"key": one.key, "heading": one.heading, "unit": one.unit} for one in shown_in("page")
        ]
        return {"runs": runs, "columns": columns}

    def has(self, name: str) -> bool:
        return (not self.names or name in self.names) and is_launched(self.runs_dir, name)

    def run(self, name: str, within: Range | None = None) -> Answer:
        """Return the points of a run that `has` accepts, as `points_of` does, and its samples."""
        with self._lock:
            columns = self._columns.setdefault(name, Columns(self.runs_dir / name)).read()
        samples = [sample._asdict() for sample in self.samples(name)]
        return points_of(columns, within) | {"samples": samples}

    def samples(self, name: str) -> list[Sample]:
        """Return a run's newest samples, the newest first."""
        path = self.runs_dir / name / "samples.jsonl"
        return read_samples(path) if version_of(path) else []


class Columns:
    """The columns of a run's records. While it trains, only what it appended is parsed."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._columns = _parsed(b"")
        self._inode = 0
        self._offset = 0  # bytes that have been parsed

    def read(self) -> Arrays:
        """Return the columns by key, each (n,) float64; NaN where a record has no number.

        Steps that were taken again after a kill are left out: no axis goes back.
        """
        inode, size, _ = version_of(self._path) or (0, 0, 0)
        if inode != self._inode or size < self._offset:  # removed, or replaced
            self._columns = _parsed(b"")
            self._inode = inode
            self._offset = 0
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
            before = self._columns[key]
            whole = np.concatenate([before, new[key]])
            largest[key] = np.fmax.accumulate(whole)[len(before) :]
        is_next = new["global_step"] >= largest["global_step"]
        new |= largest
        num_before = len(self._columns["global_step"])
        for key in self._columns.keys() | new.keys():  # a launch may have other validation sets
            before = self._columns.get(key, np.full(num_before, np.nan))
            added = new.get(key, np.full(len(is_next), np.nan))
            self._columns[key] = np.concatenate([before, added[is_next]])


def _parsed(content: bytes) -> Arrays:
    """Return the columns of some lines; of numbers of GPUs the mean, the smallest, the largest."""
    numbers = [*NUMBERS, *_set_keys(content)]
    table = _table(content, numbers)
    columns = {key: table[key].to_numpy().astype(np.float64) for key in numbers}
    for key in BY_GPU:
        lists = table[key].combine_chunks()
        values = lists.flatten().to_numpy(zero_copy_only=False)
        is_measured = (values >= 0) & (values <= LARGEST)
        values = np.where(is_measured, values, np.nan)
        columns[key] = _by_row(lists, values, _means)
        columns[f"{key}_min"] = _by_row(lists, values, np.fmin.reduceat)
        columns[f"{key}_max"] = _by_row(lists, values, np.fmax.reduceat)
    lists = table[THROTTLING].combine_chunks()
    texts = lists.flatten().to_pylist()
    # There are few different texts, and each is looked at once.
    is_slow = {text: float(bool(slowdowns(text or ""))) for text in set(texts)}
    values = np.array([is_slow[text] for text in texts])
    columns[SLOWED_DOWN] = _by_row(lists, values, np.add.reduceat)
    return columns


def _set_keys(content: bytes) -> list[str]:
    """Return the keys of validation sets in some lines."""
    if b'"validation_loss/' not in content:  # few lines have them: searching is slow
        return []
    found = {match[1].decode() for match in SET_KEYS.finditer(content)}
    return sorted(found)[: MAX_SETS * len(OF_SETS)]


def _by_row(lists: Any, values: np.ndarray, combine: Callable[..., np.ndarray]) -> np.ndarray:
    """Combine the values of each row, those of all lists one after the other; NaN if it has none.

    `combine` gets the values, and the places where a row's begin, as `ufunc.reduceat` does.
    """
    lengths = lists.value_lengths().fill_null(0).to_numpy()
    rows = np.flatnonzero(lengths)
    combined = np.full(len(lengths), np.nan)
    if len(rows):
        starts = np.cumsum(lengths) - lengths
        combined[rows] = combine(values, starts[rows])
    return combined


def _table(content: bytes, numbers: list[str]) -> Any:
    """Parse lines into a table of pyarrow; those with oddities, several times slower, one by one.

    A line that is no record is left out, and so is a number that no run can have measured.
    """
    import pyarrow as pa
    from pyarrow import json as pa_json

    schema = pa.schema(
        {
            **dict.fromkeys(numbers, pa.float64()),
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
        values = np.stack([table[key].to_numpy() for key in numbers])
        is_odd = (values < 0) | (values > LARGEST)
        if not table["global_step"].null_count and not is_odd.any():
            return table
    records = valid_records(content.decode(errors="replace"))
    columns: dict[str, list] = {
        key: [number(record.get(key)) for record in records] for key in numbers
    }
    for key in BY_GPU:
        columns[key] = [[number(value) for value in record.get(key, ())] for record in records]
    columns[THROTTLING] = [record.get(THROTTLING) for record in records]
    return pa.table(columns, schema=schema)


def points_of(columns: Arrays, within: Range | None = None) -> Answer:
    """Return at most `MAX_POINTS` points: `x` by axis, and `lines` by key, over the same points.

    `growths` has the `x` by axis at which the model got layers, and how many it has from there on.

    A point is a bucket of consecutive rows. Its x is that of the last row, its `y` the mean of the
    rows' numbers; of the sums in `RISING` it is the largest. A line also has the extremes, `low`
    and `high`, if numbers differ within a bucket, within the steps of a report or between GPUs.
    `is_long`: a point is more than one record. With a range, one row before and one after it are
    added, so that lines reach its ends.
    """
    x = {axis: columns[key] for axis, key in AXES.items()}
    x["steps"] = x["steps"] + 1  # people count from 1
    first, end = 0, len(x["steps"])
    if within is not None:
        axis, smallest, largest = within
        rows_before = np.flatnonzero(x[axis] < smallest)
        rows_after = np.flatnonzero(x[axis] > largest)
        if len(rows_before):
            first = rows_before[-1]
        if len(rows_after):
            end = rows_after[0] + 1

    rows_of_point = 1  # a power of two, so that only the last point moves when rows are added
    while end - first > rows_of_point * MAX_POINTS:
        rows_of_point *= 2
    rows = slice(first, end)
    starts = np.arange(0, end - first, rows_of_point)  # of the points, among these rows
    last_rows = np.minimum(first + starts + rows_of_point, end) - 1

    lines = {
        key: _line(key, columns, rows, starts)
        for key in (*LINES, *sorted(set_keys(columns)))
        if not np.isnan(columns[key][rows]).all()
    }
    grown = first + np.flatnonzero(columns[NUM_LAYERS][rows] > 0)
    growths = [
        {"n_layers": int(columns[NUM_LAYERS][row])}
        | {axis: _short(values[[row]], 10)[0] for axis, values in x.items()}
        for row in grown
    ]
    shown = {axis: _short(values[last_rows], 10) for axis, values in x.items()}
    return {"x": shown, "lines": lines, "is_long": rows_of_point > 1, "growths": growths}


def _line(key: str, columns: Arrays, rows: slice, starts: np.ndarray) -> Answer:
    """Return the numbers of one line in some rows, a bucket at each of `starts` among them."""
    values = columns[key]
    extremes = columns if key in METRICS else {}  # a validation set may be called ..._max
    low = np.fmin.reduceat(extremes.get(f"{key}_min", values)[rows], starts)
    high = np.fmax.reduceat(extremes.get(f"{key}_max", values)[rows], starts)
    # Losses are shown with four decimals: if they were rounded before, the last would differ.
    digits = 10 if key.partition("/")[0].endswith("_loss") else 6
    if key in RISING:
        return {"y": _short(high, digits)}
    line = {"y": _short(_means(values[rows], starts), digits)}
    if not np.array_equal(low, high, equal_nan=True):
        line["low"] = _short(low, digits)
        line["high"] = _short(high, digits)
    return line


def _means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of the numbers in each bucket; NaN if it has none."""
    is_known = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_known, values, 0), starts)
    counts = np.add.reduceat(is_known.astype(int), starts)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return sums / counts


def _short(values: np.ndarray, digits: int) -> list[float | None]:
    """Return numbers with so many digits, as few characters of JSON; None for NaN."""
    return [float(f"{value:.{digits}g}") if value == value else None for value in values.tolist()]
