"""The state of runs, as `lab list` and `lab watch` show it. Needs no torch."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from basics.gpu_readings import SLOWDOWNS
from lab.runs import (
    LAST_WRITTEN,
    NO_HEARTBEAT,
    RUNNING,
    Record,
    RunFiles,
    identity_of,
    last_records,
    last_value,
    number,
    seconds_since,
    words,
)
from reporting.metrics_file import THROTTLING
from reporting.summary import duration

PACE_RECORDS = 50  # the pace is that of so many reports
LITTLE_DISK_GIB = 5.0


@dataclass(frozen=True)
class RunState:
    """What a run does, or how it ended.

    Attributes:
        status, heartbeat_seconds: as in `RunFiles`.
        tokens_per_second, mfu: as last reported; mfu is a fraction.
        seconds, usd: spent by all launches.
        seconds_left: at the pace of the last reports; None of a run that does not train.
        usd_per_hour, usd_at_end: likewise, and None without a price.
        memory_gib: of the fullest GPU as last reported, else the peak of a process.
        warnings: one line each.
    """

    name: str
    status: str
    reason: str | None = None
    phase: str | None = None
    heartbeat_seconds: float | None = None
    global_step: int | None = None
    num_steps: int | None = None
    tokens: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds: float | None = None
    usd: float | None = None
    seconds_left: float | None = None
    usd_per_hour: float | None = None
    usd_at_end: float | None = None
    memory_gib: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING


def read_state(runs_dir: Path, name: str) -> RunState:
    """Read the state of one run; the name is one of `launched_runs`."""
    files, path = RunFiles.read(runs_dir / name), runs_dir / name / "metrics.jsonl"
    records = last_records(path, identity_of(path))
    reports = [record for record in records if "train_loss" in record]
    is_running = files.status == RUNNING
    step, num_steps = (number(files.summary.get(key)) for key in ("global_step", "num_steps"))
    if step is None:
        step = max((record["global_step"] for record in records), default=None)
    seconds, usd = files.spent(records)
    left = at_end = price = None
    if is_running and (pace := _seconds_per_step(records)) is not None and None not in (
            step, num_steps):
        left, price = max(0, num_steps - 1 - step) * pace, _usd_per_hour(reports)
        at_end = None if price is None else usd + left / 3600 * price
    gpus = next((record["gpu_memory_gib"] for record in reversed(reports)
                 if "gpu_memory_gib" in record), [])
    return RunState(
        name=name, status=files.status, reason=words(files.summary.get("reason")),
        phase=words(files.beat.get("phase")) if is_running else None,
        heartbeat_seconds=files.heartbeat_seconds,
        global_step=None if step is None else int(step),
        num_steps=None if num_steps is None else int(num_steps),
        **{key: last_value([files.summary, *records], key) for key in (
            "tokens", "train_loss", "validation_loss", "tokens_per_second", "mfu")},
        seconds=seconds, usd=usd, seconds_left=left, usd_per_hour=price, usd_at_end=at_end,
        memory_gib=max((gib for gib in gpus if gib), default=number(
            files.part("machine").get("peak_memory_gib"))),
        warnings=tuple(_warnings(files, reports)),
    )


def _warnings(files: RunFiles, reports: Sequence[Record]) -> list[str]:
    found, path = [], files.run_dir / "metrics.jsonl"
    if os.path.lexists(path) and identity_of(path) is None:
        found.append("metrics.jsonl is no plain file of at most 128 MiB: not shown")
    if files.status == NO_HEARTBEAT:
        found.append(f"no heartbeat for {duration(files.heartbeat_seconds)}: the run may have been"
                     " killed")
    if files.status == LAST_WRITTEN:
        ago = duration(seconds_since(files.run_dir, "summary.json", "metrics.jsonl"))
        found.append(f"last written {ago} ago, and no heartbeat.json: a copy, or it was killed")
    if files.status not in (RUNNING, NO_HEARTBEAT):
        return found
    if skipped := sum(record.get("skipped_steps", 0) for record in reports[-PACE_RECORDS:]):
        found.append(f"{skipped:.0f} of the last steps skipped: a gradient was not finite")
    throttled = next((record[THROTTLING] for record in reversed(reports)
                      if THROTTLING in record), [])
    by_reason: dict[str, list[str]] = {}
    for gpu, reasons in enumerate(throttled):
        if slowdowns := slowdowns_of(reasons):
            by_reason.setdefault(", ".join(slowdowns), []).append(str(gpu))
    found += [f"GPU {', '.join(gpus)}: {reasons}" for reasons, gpus in by_reason.items()]
    free = last_value(reports, "disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return found


def slowdowns_of(reasons: str) -> list[str]:
    """Return why a GPU is too hot or gets too little power, by an item of `gpu_throttling`.

    A GPU at its power limit is none: that is usual.
    """
    return [reason for reason in reasons.split(", ") if reason in SLOWDOWNS]


def _seconds_per_step(records: Sequence[Record]) -> float | None:
    """Return the pace over the last reports, with validations.

    It is the median between two reports: the start-up of a launch that resumed, and what it lost,
    lie between two of them and are not to come again.
    """
    reports = [record for record in records if "train_loss" in record and "seconds" in record]
    reports = reports[-PACE_RECORDS:]
    rates = [(after["seconds"] - before["seconds"]) / steps for before, after in pairwise(reports)
             if (steps := after["global_step"] - before["global_step"]) > 0]
    if not rates or (pace := statistics.median(rates)) < 0:
        return None
    first, last = reports[0], reports[-1]
    steps = last["global_step"] - first["global_step"]
    if steps <= 0:
        return pace
    validating = sum(record.get("validation_seconds") or 0.0 for record in records
                     if first["global_step"] < record["global_step"] <= last["global_step"])
    return min(pace + validating / steps, max(pace, (last["seconds"] - first["seconds"]) / steps))


def _usd_per_hour(reports: Sequence[Record]) -> float | None:
    priced = [record for record in reports[-PACE_RECORDS:] if {"seconds", "usd"} <= record.keys()]
    if len(priced) < 2:
        return None
    seconds, usd = (priced[-1][key] - priced[0][key] for key in ("seconds", "usd"))
    return usd / seconds * 3600 if seconds > 0 and usd > 0 else None
