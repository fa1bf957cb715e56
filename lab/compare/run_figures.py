"""Figures of a run, read from the files that it writes.

The run may still be training or may have been killed; its files may be damaged, or written by an
older version. A value that cannot be read, or that no run can have measured, is None.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basics.directory_lock import only_writer
from basics.errors import UserError, print_error
from basics.files import append_whole
from basics.json_files import to_json
from reporting.metrics_file import MAX_RECORDS_BYTES, read_metrics

LARGEST = 1e15  # the largest number that a run could have measured

Record = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """The measured results of a run, or their means over several seeds."""

    global_batch_size: float | None = None
    microbatch_size: float | None = None
    tokens: float | None = None
    steps: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    test_loss: float | None = None
    validation_bits_per_byte: float | None = None
    test_bits_per_byte: float | None = None
    ift_score: float | None = None  # 0 to 100: a judge model's score after instruction fine-tuning
    ift_low: float | None = None  # the score's 95% interval
    ift_high: float | None = None
    seconds: float | None = None  # all phases
    validation_seconds: float | None = None
    tokens_per_second: float | None = None  # while training
    usd: float | None = None
    validation_usd: float | None = None
    num_gpus: float | None = None

    @property
    def seconds_without_validation(self) -> float | None:
        return _difference(self.seconds, self.validation_seconds)

    @property
    def usd_without_validation(self) -> float | None:
        return _difference(self.usd, self.validation_usd)

    @property
    def usd_per_hour(self) -> float | None:
        return _ratio(self.usd, _ratio(self.seconds, 3600))

    @property
    def usd_per_megatoken(self) -> float | None:
        return _ratio(self.usd, _ratio(self.tokens, 1e6))

    @property
    def usd_per_megatoken_without_validation(self) -> float | None:
        return _ratio(self.usd_without_validation, _ratio(self.tokens, 1e6))


@dataclass(frozen=True)
class Written:
    """The contents of the files that a run has written so far.

    Attributes:
        summary: `summary.json`; of a run that has not ended, only the cost of earlier launches.
        records: lines of `metrics.jsonl`.
        evaluations: lines of `evaluations.jsonl` with a loss on validation tokens.
        judged: the last line there of `lab judge`; empty if there is none.
        trials: of `microbatch-search.json`: the microbatches that fitted.
    """

    summary: Record
    records: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    judged: Record
    trials: tuple[Record, ...] = ()

    @classmethod
    def read(cls, run_dir: Path) -> Written:
        """Read a run's files; it may still be training."""
        evaluations = [_object(line)
                       for line in read_text(run_dir / "evaluations.jsonl").split("\n")]
        search = _object(read_text(run_dir / "microbatch-search.json"))
        trials = search["trials"] if isinstance(search.get("trials"), list) else []
        return cls(trials=tuple(trial for trial in trials if isinstance(trial, dict)
                                and trial.get("fits") is True),
                   summary=_object(read_text(run_dir / "summary.json")),
                   records=tuple(read_metrics(run_dir / "metrics.jsonl")),
                   evaluations=tuple(line for line in evaluations  # not of tokens trained on
                                     if number(line.get("loss")) is not None
                                     and line.get("split") == "validation"),
                   judged=next((line for line in reversed(evaluations)
                                if number(line.get("score")) is not None and "judge" in line), {}))

    @property
    def has_ended(self) -> bool:
        return "global_step" in self.summary

    def latest(self, key: str) -> float | None:
        """Return the summary's number; of a run that has not ended, the last recorded one."""
        if key in self.summary:
            return number(self.summary[key])
        return number(next((r[key] for r in reversed(self.records) if key in r), None))

    def recorded(self, key: str) -> list[float]:
        return [n for record in self.records if (n := number(record.get(key))) is not None]

    def part(self, name: str) -> Record:
        """Return an object of the summary; empty if it is missing."""
        found = self.summary.get(name)
        return found if isinstance(found, dict) else {}

    def phases(self, kind: str) -> dict[str, float]:
        """Return seconds or US dollars by phase; empty if one of them is not a number."""
        found = self.part(kind)
        return found if all(number(n) is not None for n in found.values()) else {}


def append_evaluation(path: Path, record: Record) -> None:
    """Add a line with the time to a run's evaluations.jsonl; a failure is only a warning."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        with only_writer(path):  # a launch may replace it meanwhile
            append_whole(path, to_json(record | {"time": time}) + "\n")
    except OSError as error:
        print_error(f"warning: result not saved: {path}: {error.strerror or error}")


def number(value: Any) -> float | None:
    """Return a number that a run can have measured unchanged, and None for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 <= value <= LARGEST else None


def read_text(path: Path) -> str:
    """Return a file's text; empty if it cannot be read. Raises: UserError: it is far too large."""
    try:
        size = path.stat().st_size if path.is_file() else 0
        if size > MAX_RECORDS_BYTES:
            raise UserError(f"{path}: has {size:,} bytes, more than any run has; move it away")
        return path.read_text(encoding="utf-8", errors="replace") if size else ""
    except OSError:
        return ""


def _object(text: str) -> Record:
    """Parse a JSON object; return an empty one if the text is damaged or only partly written."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _difference(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def figures_of(written: Written, config: dict[str, Any]) -> Figures:
    """Return a run's figures without its test loss. Losses are the last ones, not the best."""
    step, tokens = written.latest("global_step"), written.latest("tokens")
    steps = None if step is None else step + 1
    rate = written.latest("tokens_per_second")
    if not written.has_ended and (rates := written.recorded("tokens_per_second")):
        rate = statistics.median(rates)
    planned, machine = written.part("batch").get("microbatch_size"), written.part("machine")
    return Figures(
        global_batch_size=_batch_size(written, config, _ratio(tokens, steps)),
        microbatch_size=number(planned) or number(config.get("microbatch_size")),
        tokens=tokens, steps=steps, tokens_per_second=rate,
        train_loss=written.latest("train_loss"),
        validation_loss=written.latest("validation_loss"),
        validation_bits_per_byte=written.latest("validation_bits_per_byte"),
        **_judged(written.judged),
        num_gpus=number(machine.get("processes")) if machine.get("device_type") == "cuda" else None,
        **(_spent(written) if written.has_ended else _spent_so_far(written)),
    )


def _judged(line: Record) -> dict[str, float | None]:
    found = line.get("score_interval")
    interval = found if isinstance(found, list) and len(found) == 2 else (None, None)
    return dict(zip(("ift_score", "ift_low", "ift_high"),
                    map(number, (line.get("score"), *interval)), strict=True))


def _batch_size(written: Written, config: dict[str, Any],
                tokens_per_step: float | None) -> float | None:
    """Return the sequences per global step: as planned, else as measured, else as configured."""
    planned = [number(written.part("batch").get(key)) for key in
               ("microbatch_size", "gradient_accumulation_steps", "world_size")]
    if all(planned):
        return number(math.prod(planned))
    measured = _ratio(tokens_per_step, number(config.get("context_length")))
    return round(measured) if measured else number(config.get("global_batch_size"))


def _spent(written: Written) -> dict[str, float | None]:
    seconds, usd = written.phases("seconds"), written.phases("usd")
    return {"seconds": sum(seconds.values()) if seconds else None,
            "validation_seconds": seconds.get("validation", 0.0) if seconds else None,
            "usd": usd.get("total"), "validation_usd": usd.get("validation", 0.0)}


def _spent_so_far(written: Written) -> dict[str, float | None]:
    """Return the cost so far of a run that has not ended; validation's dollars by its time."""
    earlier = sum(written.phases("seconds").values()), written.phases("usd").get("total", 0.0)
    seconds, usd = (max([before, *written.recorded(key)[-1:]]) or None
                    for before, key in zip(earlier, ("seconds", "usd"), strict=True))
    validation_seconds = sum(written.recorded("validation_seconds"))
    share = _ratio(validation_seconds, seconds)
    return {"seconds": seconds, "validation_seconds": validation_seconds, "usd": usd,
            "validation_usd": None if usd is None or share is None else usd * share}
