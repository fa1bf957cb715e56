"""What the page asks for: runs and their states, points of their lines, their samples."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from basics.errors import UserError, visible
from lab.runs import RUNNING, identity_of, is_launched, launched_runs, read_part
from lab.watch.columns import KEYS, columns_of
from lab.watch.run_state import read_state

MAX_RUNS = 200
MIN_POINTS, MAX_POINTS = 100, 2000  # of one line
SAMPLES_BYTES, MAX_SAMPLES, MAX_TEXT = 2**18, 40, 4000  # the end of the file; newest; characters
MAX_STEP = 2**40
RISING = ("usd", "energy_kwh")  # sums: their means would be those of the past

Answer = dict[str, Any]


@dataclass(frozen=True)
class Watched:
    """The runs that are watched: some of a directory, or all that have been launched."""

    runs_dir: Path
    names: tuple[str, ...] = ()

    def runs(self) -> Answer:
        """Return the states of the runs, those that train first.

        The most recently changed ones, if there are many.
        """
        try:
            launched = launched_runs(self.runs_dir)
        except UserError:  # removed meanwhile, or not mounted
            launched = []
        found = [self._run(name) for name in launched if not self.names or name in self.names]
        newest = sorted(found, key=lambda run: -run["changed"])[:MAX_RUNS]
        return {"runs": sorted(newest, key=lambda run: (run["status"] != RUNNING, run["name"]))}

    def _run(self, name: str) -> Answer:
        run_dir = self.runs_dir / name
        identities = {key: identity_of(run_dir / f"{key}.jsonl") for key in ("metrics", "samples")}
        changed = [found.mtime_ns / 1e9 for found in
                   (*identities.values(), identity_of(run_dir / "summary.json")) if found]
        versions = {key: f"{found.inode}-{found.size}-{found.mtime_ns}" if found else ""
                    for key, found in identities.items()}
        return asdict(read_state(self.runs_dir, name)) | versions | {
            "changed": max(changed, default=0.0)}

    def has(self, name: str) -> bool:
        """Return whether this is one of the runs."""
        return (not self.names or name in self.names) and is_launched(self.runs_dir, name)

    def series(self, name: str, axis: str, *, max_points: int = MAX_POINTS,
               within: tuple[float, float] | None = None) -> Answer:
        """Return the points of each line of a run.

        Args:
            name: one that `has` accepts.
            axis: one of `AXES`.
            within: only values in this range of the axis, and one more at each end.
        """
        with columns_of(self.runs_dir / name / "metrics.jsonl").updated() as columns:
            x, lines = columns.axis(axis), {}
            for key in KEYS:
                rows, values = map(np.array, columns.series[key])
                if len(rows):
                    part = slice(None) if within is None else _inside(x[rows], *within)
                    lines[key] = _line(key, x[rows[part]], values[part], max_points=max_points)
            return {"lines": lines}

    def samples(self, name: str) -> Answer:
        """Return a run's newest samples, the newest first, with orders to a terminal escaped."""
        path, found = self.runs_dir / name / "samples.jsonl", []
        with suppress(OSError):
            size = path.lstat().st_size
            content = read_part(path, max(0, size - SAMPLES_BYTES), max_bytes=SAMPLES_BYTES)
            for line in reversed(content.split(b"\n")):
                if (sample := _sample(line)) and len(found) < MAX_SAMPLES:
                    found.append(sample)
        return {"samples": sorted(found[::-1], key=lambda sample: -sample["step"])}


def _inside(x: np.ndarray, low: float, high: float) -> slice:
    """Return which of these values are between two, and one more at each end."""
    before, after = np.flatnonzero(x < low), np.flatnonzero(x > high)
    return slice(before[-1] if len(before) else 0, after[0] + 1 if len(after) else len(x))


def _line(key: str, x: np.ndarray, values: np.ndarray, *, max_points: int) -> Answer:
    """Return the points of a line: means of buckets, each where its bucket ends.

    Args:
        x, values: (n,).
    """
    buckets = thin(values, max_points)
    at, end = x[buckets.ends], key.rpartition("_")[2]
    with np.errstate(invalid="ignore"):
        is_drawn = np.isfinite(at) & (at >= np.fmax.accumulate(at))  # a line goes to the right
    shown = {"y": values[buckets.ends] if key in RISING else buckets.lows if end == "min"
             else buckets.highs if end == "max" else buckets.means}
    if buckets.size > 1 and key not in RISING and end not in ("min", "max"):
        shown |= {"low": buckets.lows, "high": buckets.highs}
    return {"x": [_short(n, 10) for n in at[is_drawn].tolist()],
            **{name: [_short(n, 8) for n in numbers[is_drawn].tolist()]
               for name, numbers in shown.items()}}


@dataclass(frozen=True)
class Buckets:
    """Values in buckets; a bucket has one value if all are drawn.

    Attributes:
        size: values in each bucket but the last one.
        ends: the index of the last value of each bucket, ascending.
    """

    size: int
    ends: np.ndarray
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def thin(values: np.ndarray, max_points: int) -> Buckets:
    """Put values into at most `max_points` buckets.

    A bucket has a power of two of values, so that only the last point moves when values are
    appended, until all buckets double.

    Args:
        values: (n,), finite.
    """
    size = bucket_size(len(values), max_points)
    starts = np.arange(0, len(values), size)
    if size == 1:
        return Buckets(size, starts, values, values, values)
    counts = np.diff(np.append(starts, len(values)))
    return Buckets(size, starts + counts - 1, np.add.reduceat(values, starts) / counts,
                   np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))


def bucket_size(num_values: int, max_points: int) -> int:
    """Return how many values become one point; 1 if all are drawn.

    Buckets have three numbers, values one: there are at most half as many buckets as values.
    """
    size = 1
    while num_values > max_points and -(-num_values // size) > max_points // 2:
        size *= 2
    return size


def _short(value: float, digits: int) -> float | int:
    """Return a number with so many digits, as few characters of JSON."""
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() else value


def _sample(line: bytes) -> Answer | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    step, prompt, text = (values.get(key) for key in ("global_step", "prompt", "text"))
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return None
    if not isinstance(prompt, str) or not isinstance(text, str):
        return None
    return {"step": step + 1, "prompt": visible(prompt[:MAX_TEXT]),
            "text": visible(text[:MAX_TEXT])}


