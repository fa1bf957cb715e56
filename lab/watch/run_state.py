"""The state of runs, read from the small files and the end of the records that they write.

A run may be training, killed or removed meanwhile; its files may be damaged, half-written or of an
older version. A value that cannot be read is None. Needs no torch.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basics.errors import UserError
from basics.files import MAX_BYTES, read_regular_file
from lab.compare.run_figures import Record, number
from lab.compare.run_results import HEARTBEAT_TIMEOUT
from lab.watch.files import identity_of
from lab.watch.latest import Latest, latest_of, words
from run_config import RUN_NAME, check_inside

LITTLE_DISK_GIB = 5.0
RUNNING, NO_HEARTBEAT = "running", "no heartbeat"
LAUNCHED = ("metrics.jsonl", "summary.json", "heartbeat.json")  # a launched run has one of them


@dataclass(frozen=True)
class RunState:
    """What a run does, or how it ended.

    Attributes:
        status: as in `summary.json`; "no heartbeat" if it should run and may have been killed.
        heartbeat_seconds: since the last heartbeat; None if there is none.
        tokens_per_second, mfu: as last reported; mfu is a fraction.
        seconds, usd: spent by all launches.
        seconds_left: at the pace of the last reports; None of a run that does not train.
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
    memory_gib: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING


def launched_runs(runs_dir: Path) -> list[str]:
    """Return the names of all runs that have been launched, in alphabetical order.

    Raises:
        UserError: the directory cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(runs_dir))
    except OSError as error:
        raise UserError(f"{runs_dir}: cannot be read ({error.strerror}); set the directory of"
                        " your runs with --runs-dir") from None
    return [name for name in names if is_launched(runs_dir, name)]


def is_launched(runs_dir: Path, name: str) -> bool:
    """Return whether there is such a run, inside of `runs_dir`, and it has been launched."""
    run_dir = runs_dir / name
    if not RUN_NAME.fullmatch(name) or not run_dir.is_dir():
        return False
    with suppress(UserError):
        check_inside(run_dir, runs_dir, "--runs-dir")
        return any(map(_has_content, (run_dir / file for file in LAUNCHED)))
    return False


def chosen_runs(runs_dir: Path, names: Iterable[str]) -> list[str]:
    """Return these runs, or all that have been launched.

    Raises:
        UserError: there is no such run, or it has not been launched.
    """
    launched, names = launched_runs(runs_dir), list(dict.fromkeys(names))
    for name in names:
        if name not in launched:
            found = RUN_NAME.fullmatch(name) and (runs_dir / name).is_dir()
            raise UserError(
                f"{runs_dir / name}: has not been trained yet; train it with: uv run"
                f" ddp_train.py {name}" if found else
                f"{runs_dir}: no run {name[:60]!r}; trained runs: {', '.join(launched) or 'none'}")
    return names or launched


def read_state(runs_dir: Path, name: str) -> RunState:
    """Read the state of one run; the name is one of `launched_runs`."""
    run_dir = runs_dir / name
    summary, beat = _object(run_dir / "summary.json"), _object(run_dir / "heartbeat.json")
    beat_at = identity_of(run_dir / "heartbeat.json")
    age = None if beat_at is None else max(0.0, time.time() - beat_at.mtime_ns / 1e9)
    status = _status(run_dir, summary, age)
    latest = latest_of(run_dir / "metrics.jsonl")
    step = _whole(summary.get("global_step"))
    step = latest.global_step if step is None else step
    num_steps = _whole(latest.values.get("num_steps", summary.get("num_steps")))
    is_running = status == RUNNING
    return RunState(
        name=name, status=status, reason=words(summary.get("reason")),
        phase=words(beat.get("phase")) if is_running else None, heartbeat_seconds=age,
        global_step=step, num_steps=num_steps, **_losses_and_spent(summary, latest),
        seconds_left=_seconds_left(latest, num_steps) if is_running else None,
        memory_gib=latest.memory_gib or number(_part(summary, "machine").get("peak_memory_gib")),
        warnings=_warnings(run_dir, status, latest, age),
    )


def _losses_and_spent(summary: Record, latest: Latest) -> dict[str, float | None]:
    """Return the fields that the summary and the records have in common.

    What has been spent is the larger one: the summary of a running launch has that of its start.
    """
    values = latest.values
    seconds = [n for n in map(number, _part(summary, "seconds").values()) if n is not None]
    usd = number(_part(summary, "usd").get("total"))
    fields = {key: values.get(key, number(summary.get(key)))
              for key in ("tokens", "train_loss", "tokens_per_second")}
    validation_loss = latest.validation_loss
    if validation_loss is None:
        validation_loss = number(summary.get("validation_loss"))
    return fields | {
        "validation_loss": validation_loss, "mfu": values.get("mfu"),
        "seconds": max([sum(seconds), values.get("seconds", 0.0)]) or None,
        "usd": max((n for n in (usd, values.get("usd")) if n is not None), default=None),
    }


def _status(run_dir: Path, summary: Record, age: float | None) -> str:
    """Return the status; a run without a recent heartbeat may have been killed."""
    status = words(summary.get("status"))
    if status is None:
        if age is not None and age <= HEARTBEAT_TIMEOUT:
            return RUNNING  # it starts
        return "summary damaged" if (run_dir / "summary.json").exists() else "no summary"
    return NO_HEARTBEAT if status == RUNNING and (age or 0.0) > HEARTBEAT_TIMEOUT else status


def _seconds_left(latest: Latest, num_steps: int | None) -> float | None:
    if latest.seconds_per_step is None or latest.global_step is None or num_steps is None:
        return None
    return max(0, num_steps - 1 - latest.global_step) * latest.seconds_per_step


def _warnings(run_dir: Path, status: str, latest: Latest, age: float | None) -> tuple[str, ...]:
    found = []
    metrics = identity_of(run_dir / "metrics.jsonl")
    if metrics is not None and not metrics.is_readable:
        found.append("metrics.jsonl is no plain file of at most 128 MiB: not shown")
    if status == NO_HEARTBEAT:
        found.append(f"no heartbeat for {age:.0f} s: the run may have been killed")
    if status not in (RUNNING, NO_HEARTBEAT):
        return tuple(found)
    if latest.skipped_steps:
        found.append(f"{latest.skipped_steps:.0f} of the last steps skipped: a gradient was not"
                     " finite")
    found += [f"throttled: {reason}" for reason in latest.throttling]
    free = latest.values.get("disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return tuple(found)


def _object(path: Path) -> Record:
    try:
        values = json.loads(read_regular_file(path, max_bytes=MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _part(values: Record, name: str) -> Record:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _has_content(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0
