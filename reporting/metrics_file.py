"""`metrics.jsonl`: one JSON record per line, read without trusting it. Needs no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from basics.directory_lock import only_writer
from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError
from basics.files import MAX_BYTES, fsync, read_regular_file, write_atomically
from basics.json_files import to_json

MAX_RECORDS_BYTES, MAX_RECORDS = 2**27, 10**6  # per file: about four million steps
MAX_RECORD_LENGTH = 2**18
MAX_STEP = 2**40
# Keys of a record: with upper bounds, and at least 0; and any finite numbers.
UPPER_BOUNDS = {"seconds": 1e12, "usd": 1e12, "tokens": 2**60, "skipped_steps": MAX_STEP,
                "mfu": 1e3, "host_ram_gib": 1e12, "host_load": 1e12, "disk_free_gib": 1e12,
                "energy_kwh": 1e12}
NUMBERS = ("train_loss", "train_loss_min", "train_loss_max", "validation_loss",
           "grad_norm",
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


def check_records(path: Path) -> None:
    """Refuse to resume a run whose metrics are not a file that a run has written.

    Raises:
        UserError: it is a link, a pipe or a directory, or far too large, or cannot be read.
    """
    if _read(path, max_bytes=MAX_RECORDS_BYTES).count("\n") > MAX_RECORDS:
        raise UserError(f"{path}: has more lines than any run writes; move it away")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the valid records of a `metrics.jsonl`; none if there is no such file.

    Lines cut short by a kill are left out, and records with numbers that are out of bounds.

    Raises:
        UserError: it cannot be read.
    """
    return valid_records(_read(path, max_bytes=MAX_RECORDS_BYTES))


def _read(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    try:
        return read_regular_file(path, max_bytes=max_bytes)
    except FileNotFoundError:
        return ""
    except OSError as error:
        advice, status = ("start again", FAILED) if error.errno in TRANSIENT else (
            "make it readable, or move it away", BAD_INPUT)
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}", status) from None


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


def spent_before(records: list[dict[str, Any]], summary_path: Path) -> tuple[float, float, float]:
    """Return the seconds, dollars and kWh that a run has used, by its records and its summary.

    Raises:
        UserError: the summary cannot be read.
    """
    known: dict[str, Any] = {}
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError,
                  OverflowError):  # none yet, or damaged: the records suffice
        summary = json.loads(_read(summary_path))
        known["energy_kwh"] = summary.get("energy_kwh")
        known["seconds"] = sum(summary["seconds"].values())
        known["usd"] = (summary["usd"] or {"total": 0.0})["total"]
    seconds, usd, energy_kwh = (max((found[key] for found in [*records, known]
                                     if _is_number(found.get(key), 0, 1e12)), default=0.0)
                                for key in ("seconds", "usd", "energy_kwh"))
    return seconds, usd, energy_kwh


def remove_metrics_from(path: Path, first_step: int, *, lacks_validation: bool = False) -> None:
    """Drop the records of steps that a resumed run takes again, from `first_step` on.

    Args:
        lacks_validation: drop the validation and samples before that step too: they are repeated.
    """
    if not path.exists():
        return
    with only_writer(path):  # `lab evaluate` may append meanwhile
        kept = [record for record in read_metrics(path) if record["global_step"] < first_step
                and not (lacks_validation and record["global_step"] == first_step - 1
                         and record.keys() & {"validation_loss", "prompt"})]
        write_atomically(path, "".join(to_json(record) + "\n" for record in kept), durable=True)


def fsync_records(run_dir: Path) -> None:
    """Call fsync on a run's metrics and samples, if there are any."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        with suppress(FileNotFoundError):
            fsync(run_dir / name)
