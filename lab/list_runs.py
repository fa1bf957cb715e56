"""`lab list`, and the states of runs that `lab watch` shows too. Needs no torch."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import visible
from basics.gpu_readings import SLOWDOWNS
from basics.text import dollars
from lab.runs import (
    LAST_WRITTEN,
    NEW,
    NO_HEARTBEAT,
    RUNNING,
    Record,
    RunFiles,
    chosen_runs,
    last_records,
    last_value,
    launched_runs,
    number,
    seconds_since,
    words,
)
from lab.table import UNKNOWN, Column, Table
from reporting.metrics_file import THROTTLING
from reporting.summary import duration
from run_config import RUN_NAME

PACE_RECORDS = 50  # the pace is that of so many reports
LITTLE_DISK_GIB = 5.0
MIN_STATUS = 12  # characters of a line in a narrow terminal


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@RUNS_DIR
def command(runs: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """List all runs, or RUNs: status, progress, last losses, what they have cost.

    It may be run while they train.
    """
    launched = launched_runs(runs_dir)
    new = sorted(name for path in runs_dir.glob("*/train.json")  # with a config only
                 if (name := path.parent.name) not in launched and RUN_NAME.fullmatch(name)
                 and (name in runs or not runs))
    if runs:
        others = [name for name in runs if name not in new]
        launched = chosen_runs(runs_dir, others) if others else []
    states = sorted((read_state(runs_dir, name) for name in launched),
                    key=lambda state: not state.is_running)
    states += [RunState(name, NEW) for name in new]
    if as_json:
        print_json({"schema": "list/1", "runs": [asdict(state) for state in states]})
        return
    priced = [state.usd for state in states if state.usd is not None]
    total = f"in all: {duration(sum(state.seconds or 0.0 for state in states))}"
    if priced:
        total += f", US${dollars(sum(priced))}"
    if priced and (rest := len(launched) - len(priced)):
        total += f" and {rest} of {len(launched)} runs without a price"
    click.echo(visible(f"{table_of(states).terminal()}\n{total}"))


@dataclass(frozen=True)
class RunState:
    """What a run does, or how it ended."""

    name: str
    status: str  # as in `RunFiles`, and so is `heartbeat_seconds`
    reason: str | None = None
    phase: str | None = None
    heartbeat_seconds: float | None = None
    global_step: int | None = None
    num_steps: int | None = None
    tokens: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None  # as last reported
    mfu: float | None = None  # as last reported, a fraction
    seconds: float | None = None  # spent by all launches, as `usd` is
    usd: float | None = None
    seconds_left: float | None = None  # at the pace of the last reports, while it trains
    usd_per_hour: float | None = None  # the mean until now, while it trains and has a price
    usd_at_end: float | None = None  # at that price
    memory_gib: float | None = None  # of the fullest GPU as last reported, else a process's peak
    warnings: tuple[str, ...] = ()  # one line each

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING


def read_state(runs_dir: Path, name: str) -> RunState:
    """Read the state of one run; the name is one of `launched_runs`."""
    files = RunFiles.read(runs_dir / name)
    records = last_records(runs_dir / name / "metrics.jsonl")
    is_running = files.status == RUNNING
    step, num_steps = (number(files.summary.get(key)) for key in ("global_step", "num_steps"))
    if step is None:
        step = max((record["global_step"] for record in records), default=None)
    seconds, usd = files.spent(records)
    left = at_end = price = None
    if is_running and None not in (step, num_steps, pace := _seconds_per_step(records)):
        left = max(0, num_steps - 1 - step) * pace
        if usd and seconds:
            price = usd / seconds * 3600
            at_end = usd + left / 3600 * price
    gpus = _last_list(records, "gpu_memory_gib")
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
        warnings=tuple(_warnings(files, records)))


def _last_list(records: Sequence[Record], key: str) -> list:
    return next((record[key] for record in reversed(records) if key in record), [])


def _seconds_per_step(records: Sequence[Record]) -> float | None:
    """Return the pace over the last reports, with validations.

    It is the median between two reports: the start-up of a launch that resumed, and what it lost,
    lie between two of them and are not to come again.
    """
    reports = [record for record in records if None not in (
        number(record.get("train_loss")), number(record.get("seconds")))][-PACE_RECORDS:]
    rates = [(after["seconds"] - before["seconds"]) / steps for before, after in pairwise(reports)
             if (steps := after["global_step"] - before["global_step"]) > 0]
    if not rates or (pace := statistics.median(rates)) < 0:
        return None
    first, last = reports[0], reports[-1]
    steps = max(1, last["global_step"] - first["global_step"])
    validating = sum(record.get("validation_seconds") or 0.0 for record in records
                     if first["global_step"] < record["global_step"] <= last["global_step"])
    return min(pace + validating / steps, max(pace, (last["seconds"] - first["seconds"]) / steps))


def _warnings(files: RunFiles, records: Sequence[Record]) -> list[str]:
    if files.status == LAST_WRITTEN:
        ago = duration(seconds_since(files.run_dir, "summary.json", "metrics.jsonl"))
        return [f"last written {ago} ago, and no heartbeat.json: a copy, or it was killed"]
    if files.status not in (RUNNING, NO_HEARTBEAT):
        return []
    found = [] if files.status == RUNNING else [
        f"no heartbeat for {duration(files.heartbeat_seconds)}: the run may have been killed"]
    if skipped := sum(record.get("skipped_steps") or 0 for record in records[-PACE_RECORDS:]):
        found.append(f"{skipped:.0f} of the last steps skipped: a gradient was not finite")
    by_reason: dict[str, list[str]] = {}
    for gpu, reasons in enumerate(_last_list(records, THROTTLING)):
        if slowdowns := slowdowns_of(reasons):
            by_reason.setdefault(", ".join(slowdowns), []).append(str(gpu))
    found += [f"GPU {', '.join(gpus)}: {reasons}" for reasons, gpus in by_reason.items()]
    free = last_value(records, "disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return found


def slowdowns_of(reasons: str) -> list[str]:
    """Return which of `SLOWDOWNS` an item of `gpu_throttling` has; a power limit is usual."""
    return [reason for reason in reasons.split(", ") if reason in SLOWDOWNS]


def table_of(states: Sequence[RunState]) -> Table:
    """Return a table of runs; in a narrow terminal reasons are wrapped and columns hidden."""
    rows = []
    for state in states:
        step = UNKNOWN if state.global_step is None else f"{state.global_step + 1:,}"
        rows.append([
            state.name, f"{state.status} ({state.reason})" if state.reason else state.status,
            f"{step}/{state.num_steps:,}" if state.num_steps else step,
            *(UNKNOWN if loss is None else f"{loss:.4f}"
              for loss in (state.train_loss, state.validation_loss)),
            UNKNOWN if state.seconds is None else duration(state.seconds),
            UNKNOWN if state.usd is None else dollars(state.usd)])
    return Table([
        Column("run", "left"), Column("status", "left", MIN_STATUS),
        *(Column(head, key=head) for head in ("step", "loss", "validation", "time", "US$"))],
        rows, hidden_first=("validation", "time", "US$"))
