"""Runs and their states as files tell: the one reader of runs for all of the lab. Needs no torch.

A run may be training, killed or removed meanwhile; its files may be damaged, half-written or of an
older version. A value that cannot be read, or that no run can have measured, is None.
"""

import datetime
import math
import os
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from basics.checkpoint_files import losses_of_the_original, of_the_original, step_of
from basics.errors import UserError, one_line, print_error
from basics.files import append_whole
from basics.gpu_readings import SLOWDOWNS
from basics.json_files import found_object, to_json
from basics.text import did_you_mean
from lab.bills import Bill
from reporting.clock import DOWNLOAD, STARTUP
from reporting.metrics_file import MAX_RECORDS_BYTES, THROTTLING, is_number, valid_records
from reporting.reference import RUN_REFERENCE, Compared
from reporting.summary import duration
from run_config import RUN_NAME, SHIPPED_RUNS, find_run, is_run_dir, run_name

MAX_WORDS = 200  # characters of a status, a phase or a reason
HEARTBEAT_SECONDS = 60  # a run that trains writes its heartbeat every few seconds
RUNNING, NO_HEARTBEAT, NEW = "running", "no heartbeat", "not launched"
NO_SUMMARY = "no summary"
OF_THE_ORIGINAL = "of the original system"
LAST_WRITTEN = "running when last written"  # in a directory without a heartbeat, such as a copy
LAUNCHED = ("metrics.jsonl", "summary.json", "heartbeat.json")  # a launched run has one of them
END_BYTES = 2**17  # of the records, some 300: what a list shows of a run
SEARCHED_BYTES = 2**22  # of the records, where the last validation is looked for
VALIDATION = b'"validation_loss"'
WARNED_RECORDS = 50  # the last ones, whose skipped steps are warned of
EVALUATIONS = "evaluations.jsonl"  # of a run, and in `runs/` of the models that are no runs
LITTLE_DISK_GIB = 5.0

Record = dict[str, Any]
Version = tuple[int, int, int]  # of a file: inode, bytes, nanoseconds of its last change


def number(value: Any) -> float | None:
    """Return a number that a run can have measured unchanged, and None for everything else."""
    return value if is_number(value, 0) else None


def number_of(record: Record, key: str) -> float | None:
    """Return a number in a record, as `number` does; None without such a key."""
    return number(record.get(key))


def words(value: object) -> str | None:
    """Return a text of a run on one line of limited length; None if there is none."""
    return one_line(value[:MAX_WORDS]) if isinstance(value, str) and value else None


def version_of(path: Path) -> Version | None:
    """Return what changes when a file is appended to or replaced; None if missing or too large.

    None for a link too: what a run directory shows is its own.
    """
    with suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_RECORDS_BYTES:
            return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def last_records(path: Path) -> tuple[Record, ...]:
    """Return the records at the end of a `metrics.jsonl`, and the last validation before them."""
    version = version_of(path)
    return _last_records(path, version) if version else ()


@lru_cache(maxsize=256)
def _last_records(path: Path, version: Version) -> tuple[Record, ...]:
    """Read them; while the file's version is the same, they are not read again."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, version[1] - SEARCHED_BYTES))
            content = file.read()
    except OSError:  # removed or replaced meanwhile
        return ()
    before, content = content[:-END_BYTES], content[-END_BYTES:]
    line = b""  # with the last validation, if that is before the end
    if VALIDATION not in content and (place := before.rfind(VALIDATION)) >= 0:
        line = before[before.rfind(b"\n", 0, place) + 1 :].partition(b"\n")[0]
    return tuple(valid_records(b"\n".join((line, content)).decode(errors="replace")))


def last_value(records: Sequence[Record], key: str) -> float | None:
    """Return the last number under a key that a run can have measured; None if there is none."""
    for record in reversed(records):
        value = number_of(record, key)
        if value is not None:
            return value
    return None


def append_evaluation(path: Path, record: Record) -> None:
    """Add a line with the time to an evaluations.jsonl; a failure is only a warning."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_whole(path, to_json(record | {"time": now}) + "\n")
    except OSError as error:
        print_error(f"warning: result not saved: {path}: {error.strerror or error}")


def launched_runs(runs_dir: Path) -> list[str]:
    """Return the names of all runs that have been launched, sorted. Raises: UserError."""
    try:
        names = sorted(os.listdir(runs_dir))
    except FileNotFoundError:
        remedy = "train a run (uv run ddp_train.py demo), or name another directory with --runs-dir"
        if SHIPPED_RUNS.is_dir() and launched_runs(SHIPPED_RUNS):
            remedy = f"there are trained runs in another one: --runs-dir {SHIPPED_RUNS}"
        raise UserError(f"{runs_dir.absolute()}: no such directory; {remedy}") from None
    except OSError as error:
        raise UserError(
            f"{runs_dir}: cannot be read ({error.strerror}); set the directory of"
            " your runs with --runs-dir"
        ) from None
    return [name for name in names if is_launched(runs_dir, name)]


def is_launched(runs_dir: Path, name: str) -> bool:
    """Return whether a run has a file that a launch writes, with something in it.

    Or a checkpoint of the original system, which writes none of these.
    """
    if not RUN_NAME.fullmatch(name):  # a name from a browser could be a path out of the directory
        return False
    versions = [version_of(runs_dir / name / file) for file in LAUNCHED]
    return any(version and version[1] for version in versions) or bool(
        of_the_original(runs_dir / name / "checkpoints")
    )


def chosen_runs(runs_dir: Path, names: Iterable[str], *, models: Iterable[str] = ()) -> list[str]:
    """Return these runs, or all that have been launched.

    Raises: UserError: one of them is not; it names those that are, and other `models`.
    """
    launched = launched_runs(runs_dir)
    chosen = []
    for text in dict.fromkeys(names):
        if find_run(runs_dir, text) is None and not is_run_dir(Path(text)):
            trained = ", ".join(launched) or "none"
            others = f"; models: {', '.join(models)}" if models else ""
            raise UserError(
                f"{runs_dir}: no run {text[:60]!r}{did_you_mean(text, [*launched, *models])};"
                f" trained runs: {trained}{others}"
            )
        name = run_name(runs_dir, text)
        if name not in launched:
            raise UserError(
                f"{runs_dir / name}: has not been trained yet; train it with: uv run"
                f" ddp_train.py {name}"
            )
        chosen.append(name)
    return list(dict.fromkeys(chosen)) or launched


def records_of(run_dir: Path, own: Iterable[Record]) -> tuple[Record, ...]:
    """Return a run's own records, or of the original system's checkpoints a record each."""
    return tuple(own) or tuple(
        {"global_step": step_of(path), **losses_of_the_original(path)}
        for path in of_the_original(run_dir / "checkpoints")
    )


@dataclass(frozen=True)
class RunFiles:
    """What a run's `summary.json` and `heartbeat.json` tell."""

    run_dir: Path
    summary: Record
    beat: Record
    status: str  # as in `summary.json`; NO_HEARTBEAT if it should run and may have been killed
    heartbeat_seconds: float | None  # since the last heartbeat; None if there is none

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        summary, beat = map(found_object, (run_dir / "summary.json", run_dir / "heartbeat.json"))
        age = seconds_since(run_dir, "heartbeat.json")
        status = words(summary.get("status"))
        if status in (None, RUNNING) and age is not None and age <= HEARTBEAT_SECONDS:
            status = RUNNING  # without a status it starts
        elif status is None:
            status = NO_SUMMARY
            if (run_dir / "summary.json").exists():
                status = "summary damaged"
            elif of_the_original(run_dir / "checkpoints"):
                status = OF_THE_ORIGINAL
        elif status == RUNNING and age is not None:
            status = NO_HEARTBEAT
        elif status == RUNNING:
            written = seconds_since(run_dir, "summary.json", "metrics.jsonl") or 0.0
            status = LAST_WRITTEN if written > HEARTBEAT_SECONDS else RUNNING
        return cls(run_dir, summary, beat, status, age)

    @property
    def has_ended(self) -> bool:
        return "global_step" in self.summary

    def part(self, name: str) -> Record:
        """Return an object of the summary; empty if it is missing."""
        found = self.summary.get(name)
        return found if isinstance(found, dict) else {}

    def phases(self, kind: str) -> dict[str, float]:
        """Return seconds or US dollars by phase, as far as they are numbers."""
        numbers = {key: number(value) for key, value in self.part(kind).items()}
        return {key: value for key, value in numbers.items() if value is not None}

    def spent(self, records: Sequence[Record]) -> tuple[float | None, float | None]:
        """Return the seconds and the US dollars of all launches until now.

        The summary of a run that has not ended has those of its start: the last record and the
        heartbeat tell more.
        """
        seconds, usd = self.phases("seconds"), self.phases("usd").get("total")
        if self.has_ended and seconds:
            return sum(seconds.values()), usd
        recorded = last_value(records, "seconds") or 0.0
        dollars = last_value(records, "usd") or 0.0
        latest = max(sum(seconds.values()), recorded, number_of(self.beat, "seconds") or 0.0)
        if dollars and recorded:  # at the same price until now
            dollars *= max(1.0, latest / recorded)
        return latest or None, max(usd or 0.0, dollars) or usd


def seconds_since(run_dir: Path, *names: str) -> float | None:
    """Return the age of the newest of some files of a run; None if there is none."""
    versions = [version_of(run_dir / name) for name in names]
    times = [version[2] / 1e9 for version in versions if version]
    return max(0.0, time.time() - max(times)) if times else None


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
    tokens_per_second: float | None = None  # as last reported; of a run that has ended its mean
    mfu: float | None = None  # as last reported, a fraction
    seconds: float | None = None  # spent by all launches, as `usd` is
    usd: float | None = None
    seconds_left: float | None = None  # as it last recorded while it trains, as `usd_at_end` is
    usd_per_hour: float | None = None  # the mean until now, while it trains and has a price
    usd_at_end: float | None = None
    download_seconds: float | None = None  # a part of `seconds`
    bill: Bill | None = None  # of its machines, where `read_bills` was asked for it
    memory_gib: float | None = None  # of the fullest GPU as last reported, else a process's peak
    tokenizer: str | None = None
    bytes_per_token: float | None = None  # the mean, in the validation text
    reference: str | None = None  # the curve that it is compared with
    train_compared: Compared | None = None  # its last losses with those of the reference
    validation_compared: Compared | None = None
    warnings: tuple[str, ...] = ()  # one line each


def read_state(runs_dir: Path, name: str, bill: Bill | None = None) -> RunState:
    """Read the state of one run; the name is one of `launched_runs`. Its files lack its bill."""
    files = RunFiles.read(runs_dir / name)
    records = records_of(files.run_dir, last_records(files.run_dir / "metrics.jsonl"))
    is_running = files.status == RUNNING
    step = number_of(files.summary, "global_step")
    num_steps = number_of(files.summary, "num_steps")
    if step is None:
        step = max((record["global_step"] for record in records), default=None)
    seconds, usd = files.spent(records)
    left = at_end = price = None
    phase = words(files.beat.get("phase")) if is_running else None
    if is_running:
        # Not as an earlier launch recorded them: its machine, or the run's length, may have been
        # another. The summary has what was spent before this launch, once that has started up.
        before = sum(files.phases("seconds").values())
        of_launch = [record for record in records if (number_of(record, "seconds") or 0) > before]
        if phase not in (STARTUP, DOWNLOAD):
            left = last_value(of_launch, "seconds_left")
            at_end = last_value(of_launch, "usd_at_end")
        if usd and seconds:
            price = usd / seconds * 3600
    gpus = _last_list(records, "gpu_memory_gib")
    # A summary of a run that has ended tells more than its last record.
    told = [files.summary, *records] if is_running else [*records, files.summary]
    return RunState(
        name=name,
        status=files.status,
        reason=words(files.summary.get("reason")),
        phase=phase,
        heartbeat_seconds=files.heartbeat_seconds,
        global_step=None if step is None else int(step),
        num_steps=None if num_steps is None else int(num_steps),
        **{
            key: last_value(told, key)
            for key in ("tokens", "train_loss", "validation_loss", "tokens_per_second", "mfu")
        },
        seconds=seconds,
        usd=usd,
        seconds_left=left,
        usd_per_hour=price,
        usd_at_end=at_end,
        bill=bill,
        download_seconds=files.phases("seconds").get("download"),
        memory_gib=max(
            (gib for gib in gpus if gib),
            default=number_of(files.part("machine"), "peak_memory_gib"),
        ),
        tokenizer=words(files.summary.get("tokenizer")),
        bytes_per_token=bytes_per_token(told),
        reference=words(found_object(runs_dir / name / RUN_REFERENCE).get("name")),
        train_compared=_compared(records, "train"),
        validation_compared=_compared(records, "validation"),
        warnings=tuple(_warnings(files, records)),
    )


def bytes_per_token(records: Sequence[Record]) -> float | None:
    """Return the mean length of the validation text's tokens: its last loss is in both units."""
    for record in reversed(records):
        nats = number_of(record, "validation_loss")
        bits = number_of(record, "validation_bits_per_byte")
        if nats and bits:
            return nats / math.log(2) / bits
    return None


def _compared(records: Sequence[Record], kind: str) -> Compared | None:
    """Compare a run's last loss with its reference; None if they have not been compared there."""
    for record in reversed(records):
        loss = number_of(record, f"{kind}_loss")
        if loss is None:
            continue
        expected = number_of(record, f"{kind}_reference_loss")
        if expected is None:
            return None
        tokens = number_of(record, "tokens")
        same_loss_tokens = number_of(record, f"{kind}_reference_tokens")
        is_known = tokens and same_loss_tokens is not None
        return Compared(loss - expected, same_loss_tokens / tokens - 1 if is_known else None)
    return None


def _last_list(records: tuple[Record, ...], key: str) -> list:
    return next((record[key] for record in reversed(records) if key in record), [])


def _warnings(files: RunFiles, records: tuple[Record, ...]) -> list[str]:
    if files.status == LAST_WRITTEN:
        ago = duration(seconds_since(files.run_dir, "summary.json", "metrics.jsonl"))
        return [f"last written {ago} ago, and no heartbeat.json: a copy, or it was killed"]
    if files.status not in (RUNNING, NO_HEARTBEAT):
        return []
    found = []
    if files.status == NO_HEARTBEAT:
        ago = duration(files.heartbeat_seconds)
        found.append(f"no heartbeat for {ago}: the run may have been killed")
    if skipped := sum(record.get("skipped_steps") or 0 for record in records[-WARNED_RECORDS:]):
        found.append(f"{skipped:.0f} of the last steps skipped: a gradient was not finite")
    by_reason: dict[str, list[str]] = {}
    for gpu, reasons in enumerate(_last_list(records, THROTTLING)):
        if slowed_by := slowdowns(reasons):
            by_reason.setdefault(slowed_by, []).append(str(gpu))
    found += [f"GPU {', '.join(gpus)}: {reasons}" for reasons, gpus in by_reason.items()]
    free = last_value(records, "disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return found


def slowdowns(reasons: str) -> str:
    """Return which of `SLOWDOWNS` an item of `gpu_throttling` has; a power limit is usual."""
    return ", ".join(reason for reason in reasons.split(", ") if reason in SLOWDOWNS)
