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
        launched, found = [], []
        with suppress(UserError):  # the directory was removed meanwhile, or is not mounted
            launched = launched_runs(self.runs_dir)
        for name in launched:
            if not self.names or name in self.names:
                metrics, samples, summary = (
                    version_of(self.runs_dir / name / file)
                    for file in ("metrics.jsonl", "samples.jsonl", "summary.json")
                )
                changed = max((one[2] for one in (metrics, samples, summary) if one), default=0)
                found.append(
                    asdict(read_state(self.runs_dir, name))
                    | {"changed": changed / 1e9, "version": str((metrics, samples))}
                )
        return {"runs": sorted(found, key=lambda run: (run["status"] != RUNNING, run["name"]))}

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
        if content := whole_lines(self._path, self._offset) if size > self._offset else b"":
            new = _parsed(content)

            def rising(key: str) -> np.ndarray:
                before = self._columns[key][-1:]
                return np.fmax.accumulate(np.concatenate([before, new[key]]))[len(before) :]

            is_next = new["global_step"] >= rising("global_step")
            new |= {key: rising(key) for key in AXES.values()}
            self._columns = {
                key: np.concatenate([values, new[key][is_next]])
                for key, values in self._columns.items()
            }
            self._offset += len(content)
        return self._columns


def _parsed(content: bytes) -> Arrays:
    table = _table(content)
    columns = {key: table[key].to_numpy().astype(np.float64) for key in NUMBERS}
    columns |= {
        key: np.full(len(table), np.nan)
        for key in (SLOWED_DOWN, *(f"{key}{end}" for key in BY_GPU for end in ("", "_min", "_max")))
    }
    for key in (*BY_GPU, THROTTLING):
        lists = table[key].combine_chunks()
        lengths, flat = lists.value_lengths().fill_null(0).to_numpy(), lists.flatten()
        if not len(rows := np.flatnonzero(lengths)):
            continue
        starts = (np.cumsum(lengths) - lengths)[rows]
        if key == THROTTLING:
            is_slow = {text: bool(slowdowns(text or "")) for text in flat.unique().to_pylist()}
            columns[SLOWED_DOWN][rows] = np.add.reduceat(
                [float(is_slow[text]) for text in flat.to_pylist()], starts
            )
        else:
            values = flat.to_numpy(zero_copy_only=False)
            values = np.where((values >= 0) & (values <= LARGEST), values, np.nan)
            columns[key][rows] = _means(values, starts)
            columns[f"{key}_min"][rows] = np.fmin.reduceat(values, starts)
            columns[f"{key}_max"][rows] = np.fmax.reduceat(values, starts)
    return columns


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
        values = [table[key].to_numpy() for key in NUMBERS]
        if not table["global_step"].null_count and not any(
            ((found < 0) | (found > LARGEST)).any() for found in values
        ):
            return table
    return pa.Table.from_pylist(
        [
            {
                **{key: number(record.get(key)) for key in NUMBERS},
                **{key: [number(one) for one in record.get(key, ())] or None for key in BY_GPU},
                THROTTLING: record.get(THROTTLING),
            }
            for record in valid_records(content.decode(errors="replace"))
        ],
        schema=schema,
    )


def points_of(columns: Arrays, within: Range | None = None) -> Answer:
    """Return at most `MAX_POINTS` points: `x` by axis, and `lines` by key, over the same points.

    A point is a bucket of consecutive rows: x is that of the last one, and a line has the mean `y`
    of its numbers. Where they differ it also has the extremes, `low` and `high`: of the bucket,
    of the steps in a report, and of the GPUs. `is_long`: a point is more than one record. A range
    has one more value at each end.
    """
    first, num_rows = 0, len(columns["global_step"])
    if within is not None:
        values = columns[AXES[within[0]]] + (within[0] == "steps")  # people count from 1
        before, after = np.flatnonzero(values < within[1]), np.flatnonzero(values > within[2])
        first = before[-1] if len(before) else 0
        num_rows = (after[0] + 1 if len(after) else num_rows) - first
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
