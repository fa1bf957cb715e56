"""The state of runs, read from the small files and the end of the records that they write.

A run may be training, killed or removed meanwhile; its files may be damaged, half-written or of an
older version. A value that cannot be read is None. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from basics.errors import UserError
from basics.files import check_inside
from basics.json_files import found_object
from lab.compare.run_figures import Record, number
from lab.compare.run_results import (
    HEARTBEAT_TIMEOUT,
    LAST_WRITTEN,
    NO_HEARTBEAT,
    RUNNING,
    seconds_since,
    status_now,
)
from lab.watch.files import identity_of
from lab.watch.latest import Latest, latest_of, words
from reporting.summary import duration
from run_config import RUN_NAME

LITTLE_DISK_GIB = 5.0
LAUNCHED = ("metrics.jsonl", "summary.json", "heartbeat.json")  # a launched run has one of them


@dataclass(frozen=True)
class RunState:
    """What a run does, or how it ended.

    Attributes:
        status: as in `summary.json`; "no heartbeat" if it should run and may have been killed;
            "running when last written" if it has no heartbeat.json, as in a copy of a run.
        heartbeat_seconds: since the last heartbeat; None if there is none.
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
    summary, beat = (found_object(run_dir / file) for file in ("summary.json", "heartbeat.json"))
    age = seconds_since(run_dir, "heartbeat.json")
    status = _status(run_dir, summary, age)
    latest = latest_of(run_dir / "metrics.jsonl")
    step = _whole(summary.get("global_step"))
    step = latest.global_step if step is None else step
    num_steps = _whole(summary.get("num_steps"))
    is_running = status == RUNNING
    fields = _losses_and_spent(summary, latest, number(beat.get("seconds")))
    return RunState(
        name=name, status=status, reason=words(summary.get("reason")),
        phase=words(beat.get("phase")) if is_running else None, heartbeat_seconds=age,
        global_step=step, num_steps=num_steps, **fields,
        **(_to_come(latest, num_steps, fields["usd"]) if is_running else {}),
        memory_gib=latest.memory_gib or number(_part(summary, "machine").get("peak_memory_gib")),
        warnings=_warnings(run_dir, status, latest, age),
    )


def _losses_and_spent(summary: Record, latest: Latest,
                      until_beat: float | None) -> dict[str, float | None]:
    """Return the fields that the summary and the records have in common.

    What has been spent is the largest one: the summary of a running launch has that of its start.

    Args:
        until_beat: seconds until the last heartbeat.
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
        "seconds": max(sum(seconds), values.get("seconds", 0.0), until_beat or 0.0) or None,
        "usd": max((n for n in (usd, values.get("usd")) if n is not None), default=None),
    }


def _status(run_dir: Path, summary: Record, age: float | None) -> str:
    """Return the status; a run that is to train may have been killed."""
    status = words(summary.get("status"))
    if status is None:
        if age is not None and age <= HEARTBEAT_TIMEOUT:
            return RUNNING  # it starts
        return "summary damaged" if (run_dir / "summary.json").exists() else "no summary"
    return status_now(run_dir) if status == RUNNING else status


def _to_come(latest: Latest, num_steps: int | None, usd: float | None) -> dict[str, float | None]:
    """Return the time and the dollars that a run still needs, as fields."""
    seconds_left = usd_at_end = None
    if None not in (latest.seconds_per_step, latest.global_step, num_steps):
        seconds_left = max(0, num_steps - 1 - latest.global_step) * latest.seconds_per_step
    if None not in (seconds_left, usd, latest.usd_per_hour):
        usd_at_end = usd + seconds_left / 3600 * latest.usd_per_hour
    return {"seconds_left": seconds_left, "usd_per_hour": latest.usd_per_hour,
            "usd_at_end": usd_at_end}


def _warnings(run_dir: Path, status: str, latest: Latest, age: float | None) -> tuple[str, ...]:
    found = []
    metrics = identity_of(run_dir / "metrics.jsonl")
    if metrics is not None and not metrics.is_readable:
        found.append("metrics.jsonl is no plain file of at most 128 MiB: not shown")
    if status == NO_HEARTBEAT:
        found.append(f"no heartbeat for {duration(age)}: the run may have been killed")
    if status == LAST_WRITTEN:
        ago = duration(seconds_since(run_dir, "summary.json", "metrics.jsonl"))
        found.append(f"last written {ago} ago, and no heartbeat.json: a copy, or it was killed")
    if status not in (RUNNING, NO_HEARTBEAT):
        return tuple(found)
    if latest.skipped_steps:
        found.append(f"{latest.skipped_steps:.0f} of the last steps skipped: a gradient was not"
                     " finite")
    found += latest.slowdowns
    free = latest.values.get("disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return tuple(found)


def _part(values: Record, name: str) -> Record:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def _has_content(path: Path) -> bool:
    found = identity_of(path)
    return found is not None and found.is_plain and found.size > 0
