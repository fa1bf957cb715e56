"""`metrics.jsonl`: one JSON record per line, read without trusting it. Needs no torch."""

from __future__ import annotations

import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from basics.errors import UserError
from basics.files import fsync, read_regular_file, recover, write_atomically, write_held
from basics.json_files import to_json

MAX_RECORDS_BYTES, MAX_RECORDS = 2**27, 10**6  # per file: about four million steps
MAX_RECORD_LENGTH = 2**18
MAX_STEP = 2**40
# Keys of a record: with upper bounds, and at least 0; and any finite numbers.
UPPER_BOUNDS = {"seconds": 1e12, "usd": 1e12, "tokens": 2**60, "skipped_steps": MAX_STEP,
                "mfu": 1e3, "host_ram_gib": 1e12, "host_load": 1e12, "disk_free_gib": 1e12,
                "energy_kwh": 1e12}
NUMBERS = ("train_loss", "train_loss_min", "train_loss_max", "validation_loss",
           "raw_validation_loss", "grad_norm",
           "grad_norm_max", "learning_rate", "slowest_step", "slowest_step_seconds",
           "validation_seconds",
           "embedding_grad_norm", "head_grad_norm", "embedding_update_ratio", "head_update_ratio",
           "embedding_activation_norm", "logit_p1", "logit_p50", "logit_p99", "logit_max",
           "token_loss_p1", "token_loss_p50", "token_loss_p99", "token_loss_max")
# Keys with a list of such numbers, one for each layer.
BY_LAYER = ("layer_grad_norm", "layer_update_ratio", "layer_activation_norm",
            "layer_max_attention_logit", "layer_attention_entropy")
MAX_LAYERS = 2**10
# Keys with a list of such numbers, one for each GPU, and one with a list of texts.
BY_GPU = ("gpu_memory_gib", "gpu_use_percent", "gpu_temperature_c", "gpu_power_w")
THROTTLING = "gpu_throttling"
MAX_GPUS, MAX_TEXT_LENGTH = 2**8, 200
OF_MACHINE = ("mfu", "host_ram_gib", "host_load", "disk_free_gib", "energy_kwh", *BY_GPU,
              THROTTLING)  # differ between runs of the same training
NO_SUMMARY = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
              OverflowError)  # what reading a missing or damaged one may raise


def check_records(path: Path) -> None:
    """Refuse to resume a run whose metrics are not a file that a run has written.

    Raises:
        UserError: it is a link, a pipe or a directory, or far too large.
    """
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path}: is not a plain file; move it away")
        with path.open("rb") as file:
            pieces = iter(lambda: file.read(2**20), b"")
            is_long = (found.st_size > MAX_RECORDS_BYTES
                       or sum(piece.count(b"\n") for piece in pieces) > MAX_RECORDS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); move it away") from None
    if is_long:
        raise UserError(f"{path}: has {found.st_size:,} bytes, more than any run has; move it away")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the valid records of a `metrics.jsonl`.

    Lines cut short by a kill are left out, and records with numbers that are out of bounds.
    """
    try:
        return valid_records(read_regular_file(path, max_bytes=MAX_RECORDS_BYTES))
    except OSError:  # none yet, or refused by `check_records` at launch
        return []


def valid_records(text: str) -> list[dict[str, Any]]:
    """Parse lines of a `metrics.jsonl`; the others are left out, as `read_metrics` says."""
    records = []
    for line in text.split("\n"):
        if len(line) > MAX_RECORD_LENGTH:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _is_record(record):
            records.append(record)
    return records


def _is_record(record: dict[str, Any]) -> bool:
    step = record.get("global_step")
    return (type(step) is int and 0 <= step < MAX_STEP
            and all(_is_number(record[key], 0, most) for key, most in UPPER_BOUNDS.items()
                    if key in record)
            and all(_is_number_or_none(record.get(key)) for key in NUMBERS)
            and all(_are_numbers(record[key], MAX_LAYERS) for key in BY_LAYER if key in record)
            and all(_are_numbers(record[key], MAX_GPUS) for key in BY_GPU if key in record)
            and (THROTTLING not in record or _are_texts(record[THROTTLING], MAX_GPUS)))


def _are_numbers(values: Any, most: int) -> bool:
    return (isinstance(values, list) and 1 <= len(values) <= most
            and all(map(_is_number_or_none, values)))


def _are_texts(values: Any, most: int) -> bool:
    return (isinstance(values, list) and 1 <= len(values) <= most
            and all(isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH
                    and value.isprintable() for value in values))


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value, -1e100, 1e100)


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def spent_before(metrics_path: Path, summary_path: Path) -> tuple[float, float]:
    """Return the seconds and dollars that a run has spent, by its metrics and its summary."""
    records = read_metrics(metrics_path)
    seconds = [record.get("seconds") for record in records]
    usd = [record.get("usd") for record in records]
    try:
        summary = json.loads(read_regular_file(summary_path))
        seconds.append(sum(summary["seconds"].values()))
        usd.append((summary["usd"] or {"total": 0.0})["total"])
    except NO_SUMMARY:
        pass  # none yet, or damaged: the metrics suffice
    return tuple(max((n for n in numbers if _is_number(n, 0, 1e12)), default=0.0)
                 for numbers in (seconds, usd))


def energy_before(metrics_path: Path, summary_path: Path) -> float:
    """Return the kWh that a run has used, by its metrics and its summary; 0 if none is known."""
    found = [record.get("energy_kwh") for record in read_metrics(metrics_path)]
    with suppress(*NO_SUMMARY):
        found.append(json.loads(read_regular_file(summary_path))["energy_kwh"])
    return max((kwh for kwh in found if _is_number(kwh, 0, 1e12)), default=0.0)


def remove_metrics_from(path: Path, first_step: int, *, lacks_validation: bool = False) -> None:
    """Drop the records of steps that a resumed run takes again, from `first_step` on.

    Args:
        lacks_validation: drop the validation and samples before that step too: they are repeated.
    """
    recover(path)
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["global_step"] < first_step
            and not (lacks_validation and record["global_step"] == first_step - 1
                     and record.keys() & {"validation_loss", "prompt"})]
    write_atomically(path, "".join(to_json(record) + "\n" for record in kept), durable=True)


def fsync_records(path: Path) -> None:
    """Call fsync on a run's metrics, if there are any."""
    write_held(path)
    with suppress(FileNotFoundError):
        fsync(path)
