"""Figures at the end of a run's records, read without the rest of a long file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from basics.errors import one_line
from basics.gpu_readings import SLOWDOWNS
from lab.compare.run_figures import Record, number
from lab.watch.files import Identity, identity_of, read_part
from reporting.metrics_file import MAX_RECORD_LENGTH, MAX_RECORDS_BYTES, valid_records

TAIL_BYTES = 2**18  # some 900 records
PACE_RECORDS = 50  # the pace is that of so many reports
MAX_GPUS = 64
MAX_TRIES = 1000  # lines that look like a validation
MAX_WORDS = 200  # characters of a status, a phase or a reason
KEYS = ("tokens", "seconds", "usd", "train_loss", "tokens_per_second", "mfu", "disk_free_gib")


@dataclass(frozen=True)
class Latest:
    """Figures at the end of a run's records.

    Attributes:
        values: the last one of each key in `KEYS`.
        seconds_per_step, usd_per_hour: over the last reports.
        slowdowns: of GPUs that are too hot or get too little power, such as "GPUs 0-7: hw
            slowdown". A GPU at its power limit is none: that is usual.
    """

    values: dict[str, float]
    global_step: int | None = None
    validation_loss: float | None = None
    seconds_per_step: float | None = None
    usd_per_hour: float | None = None
    memory_gib: float | None = None
    skipped_steps: float = 0
    slowdowns: tuple[str, ...] = ()


def words(value: object) -> str | None:
    """Return a text of a run on one line of limited length; None if there is none."""
    return one_line(value[:MAX_WORDS]) if isinstance(value, str) and value else None


def latest_of(path: Path) -> Latest:
    """Return the latest figures of a `metrics.jsonl`; none if there is none that can be read."""
    found = identity_of(path)
    return _read_latest(path, found) if found is not None and found.is_readable else Latest({})


@lru_cache(maxsize=512)
def _read_latest(path: Path, found: Identity) -> Latest:
    """Read the end of a run's records; again only when the file has changed."""
    try:
        start = max(0, found.size - TAIL_BYTES)
        text = read_part(path, start, max_bytes=TAIL_BYTES).decode(errors="replace")
        records = valid_records(text.partition("\n")[2] if start else text)
        validation = _validations_of(path).last(found, _last(records, "validation_loss"))
    except OSError:  # removed or replaced meanwhile
        return Latest({})
    reports = [record for record in records if "train_loss" in record]
    machine = next((record for record in reversed(reports) if "gpu_memory_gib" in record), {})
    memory = [n for n in map(number, _list(machine.get("gpu_memory_gib"))) if n is not None]
    throttling = next((r["gpu_throttling"] for r in reversed(reports) if "gpu_throttling" in r), ())
    values = {key: _last(records, key) for key in KEYS}
    return Latest(
        values={key: value for key, value in values.items() if value is not None},
        global_step=max((record["global_step"] for record in records), default=None),
        validation_loss=validation, seconds_per_step=_seconds_per_step(reports),
        usd_per_hour=_usd_per_hour(reports),
        memory_gib=max(memory, default=None),
        skipped_steps=sum(record.get("skipped_steps", 0) for record in reports[-PACE_RECORDS:]),
        slowdowns=tuple(f"{_gpus(indices)}: {', '.join(reasons)}"
                        for reasons, indices in _by_slowdown(_list(throttling)).items()),
    )


def slowdowns_of(reasons: object) -> tuple[str, ...]:
    """Return why a GPU is slower than its power limit demands, by an item of `gpu_throttling`."""
    found = reasons.split(", ") if isinstance(reasons, str) else []
    return tuple(reason for reason in found if reason in SLOWDOWNS)


def _by_slowdown(throttling: list[object]) -> dict[tuple[str, ...], list[int]]:
    """Return which GPUs are slowed down, by the reasons."""
    found: dict[tuple[str, ...], list[int]] = {}
    for index, reasons in enumerate(throttling[:MAX_GPUS]):
        if slowdowns := slowdowns_of(reasons):
            found.setdefault(slowdowns, []).append(index)
    return found


def _gpus(indices: list[int]) -> str:
    """Name GPUs by their local ranks: "GPU 3", "GPUs 0-2, 5"."""
    starts = [index for index in indices if index - 1 not in indices]
    ends = [index for index in indices if index + 1 not in indices]
    parts = [f"{start}-{end}" if end > start else f"{start}"
             for start, end in zip(starts, ends, strict=True)]
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(parts)}"


class _Validations:
    """The last validation loss of a file. Of a file that grows, only what was appended is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset = path, -1, 0
        self._loss: float | None = None

    def last(self, found: Identity, loss: float | None) -> float | None:
        """Return the last one.

        Args:
            loss: the last one near the end of the file, if there is one.

        Raises:
            OSError: the file cannot be read.
        """
        if found.inode != self._inode or found.size < self._offset:
            self._inode, self._offset, self._loss = found.inode, 0, None
        if loss is not None:
            self._loss, self._offset = loss, max(0, found.size - MAX_RECORD_LENGTH)
        elif found.size > self._offset:
            content = read_part(self._path, self._offset, max_bytes=MAX_RECORDS_BYTES)
            later = _last_validation(content)
            self._loss = self._loss if later is None else later
            self._offset += content.rfind(b"\n") + 1  # the last line may not be complete yet
        return self._loss


@lru_cache(maxsize=512)
def _validations_of(path: Path) -> _Validations:
    return _Validations(path)


def _last_validation(content: bytes) -> float | None:
    """Return the last validation loss in the bytes of a `metrics.jsonl`."""
    end = len(content)
    for _ in range(MAX_TRIES):
        found = content.rfind(b'"validation_loss"', 0, end)
        if found < 0:
            break
        end = content.rfind(b"\n", 0, found) + 1
        line = content[end:end + MAX_RECORD_LENGTH].partition(b"\n")[0]
        loss = _last(valid_records(line.decode(errors="replace")), "validation_loss")
        if loss is not None:
            return loss
    return None


def _seconds_per_step(reports: list[Record]) -> float | None:
    """Return the pace over the last reports, with validations and saving."""
    timed = [r for r in reports[-PACE_RECORDS:] if number(r.get("seconds")) is not None]
    if len(timed) < 2:
        return None
    steps = timed[-1]["global_step"] - timed[0]["global_step"]
    seconds = timed[-1]["seconds"] - timed[0]["seconds"]
    return seconds / steps if steps > 0 and seconds >= 0 else None


def _usd_per_hour(reports: list[Record]) -> float | None:
    priced = [r for r in reports[-PACE_RECORDS:]
              if number(r.get("seconds")) is not None and number(r.get("usd")) is not None]
    if len(priced) < 2:
        return None
    hours = (priced[-1]["seconds"] - priced[0]["seconds"]) / 3600
    usd = priced[-1]["usd"] - priced[0]["usd"]
    return usd / hours if hours > 0 and usd > 0 else None


def _last(records: list[Record], key: str) -> float | None:
    return next((n for record in reversed(records) if (n := number(record.get(key))) is not None),
                None)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
