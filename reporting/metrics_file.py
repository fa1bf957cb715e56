"""`metrics.jsonl`: one JSON record per line, read without trusting it. Needs no torch.

A metric is declared here, in `METRICS`: its key, its bounds, and the name that trackers show.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError
from basics.files import MAX_BYTES, fsync, read_regular_file, write_atomically
from basics.json_files import to_json

MAX_RECORDS_BYTES = 2**27  # per file: about four million steps
MAX_RECORD_LENGTH = 2**18
MAX_STEP = 2**40
MAX_LAYERS, MAX_GPUS, MAX_TEXT_LENGTH = 2**10, 2**8, 200
THROTTLING = "gpu_throttling"
STEP = "step"  # the x axis of trackers that have no steps of their own


class Metric(NamedTuple):
    """A key of a record.

    Attributes:
        name: what trackers show; {layer} and {gpu} stand for the place in a list, counted from 1
            and, as nvidia-smi does, from 0.
        least, most: of each number.
        or_none: whether it may be null, as a loss that is not finite.
    """

    name: str
    most: float = 1e100
    least: float = -1e100
    or_none: bool = True

    @property
    def max_values(self) -> int:
        """The longest list; 0 if it is one number."""
        return MAX_LAYERS if "{layer}" in self.name else MAX_GPUS if "{gpu}" in self.name else 0


def _amount(name: str, most: float = 1e12) -> Metric:
    return Metric(name, most, least=0, or_none=False)


METRICS = {
    "train_loss": Metric("train/loss"),
    "train_loss_min": Metric("train/loss_min"),
    "train_loss_max": Metric("train/loss_max"),
    "learning_rate": Metric("train/learning_rate"),
    "grad_norm": Metric("train/grad_norm"),
    "grad_norm_max": Metric("train/grad_norm_max"),
    "skipped_steps": _amount("train/skipped_steps", MAX_STEP),
    "tokens_per_second": Metric("train/tokens_per_second"),
    "mfu": _amount("train/mfu", 1e3),
    "slowest_step": Metric("train/slowest_step"),
    "slowest_step_seconds": Metric("train/slowest_step_seconds"),
    "validation_loss": Metric("validation/loss"),
    "validation_bits_per_byte": Metric("validation/bits_per_byte"),
    "validation_seconds": Metric("validation/seconds"),
    "tokens": _amount("progress/tokens", 2**60),
    "seconds": _amount("progress/seconds"),
    "usd": _amount("progress/usd"),
    "layer_grad_norm": Metric("layers/{layer}/grad_norm"),
    "layer_update_ratio": Metric("layers/{layer}/update_ratio"),
    "layer_activation_norm": Metric("layers/{layer}/activation_norm"),
    "layer_max_attention_logit": Metric("layers/{layer}/max_attention_logit"),
    "layer_attention_entropy": Metric("layers/{layer}/attention_entropy"),
    "embedding_grad_norm": Metric("layers/embedding/grad_norm"),
    "embedding_update_ratio": Metric("layers/embedding/update_ratio"),
    "embedding_activation_norm": Metric("layers/embedding/activation_norm"),
    "head_grad_norm": Metric("layers/head/grad_norm"),
    "head_update_ratio": Metric("layers/head/update_ratio"),
    "logit_p1": Metric("logits/p1"),
    "logit_p50": Metric("logits/p50"),
    "logit_p99": Metric("logits/p99"),
    "logit_max": Metric("logits/max"),
    "token_loss_p1": Metric("token_losses/p1"),
    "token_loss_p50": Metric("token_losses/p50"),
    "token_loss_p99": Metric("token_losses/p99"),
    "token_loss_max": Metric("token_losses/max"),
    "host_ram_gib": _amount("machine/host_ram_gib"),
    "host_load": _amount("machine/host_load"),
    "disk_free_gib": _amount("machine/disk_free_gib"),
    "energy_kwh": _amount("machine/energy_kwh"),
    "gpu_memory_gib": Metric("machine/gpu_{gpu}/memory_gib"),
    "gpu_use_percent": Metric("machine/gpu_{gpu}/use_percent"),
    "gpu_temperature_c": Metric("machine/gpu_{gpu}/temperature_c"),
    "gpu_power_w": Metric("machine/gpu_{gpu}/power_w"),
    THROTTLING: Metric("machine/gpu_{gpu}/is_throttled"),  # texts, "" for no: 1 or 0
}
# These differ between runs of the same training.
OF_MACHINE = ("mfu", *(key for key in METRICS if METRICS[key].name.startswith("machine/")))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the valid records of a `metrics.jsonl`; none if there is no such file.

    Lines cut short by a kill are left out, and records with numbers that are out of bounds.

    Raises:
        UserError: it cannot be read.
    """
    return valid_records(read_records(path))


def read_records(path: Path, *, max_bytes: int = MAX_RECORDS_BYTES) -> str:
    """Return the text of a file of records, empty if there is none. Raises: UserError."""
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
            and all(_is_valid(key, value) for key, value in record.items() if key in METRICS))


def _is_valid(key: str, value: Any) -> bool:
    _, most, least, or_none = metric = METRICS[key]
    if not metric.max_values:
        return is_number(value, least, most) or value is None and or_none
    if not isinstance(value, list) or not 1 <= len(value) <= metric.max_values:
        return False
    if key == THROTTLING:
        return all(isinstance(text, str) and len(text) <= MAX_TEXT_LENGTH and text.isprintable()
                   for text in value)
    return all(one is None or is_number(one, least, most) for one in value)


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether a value of JSON is a number between two others; NaN is not."""
    return type(value) in (int, float) and least <= value <= most


def shown_step(record: dict[str, Any]) -> int:
    """Return a record's step as people count it, from 1."""
    return record["global_step"] + 1


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a valid record under the names that trackers show."""
    return {METRICS[key].name.format(layer=place + 1, gpu=place):
                float(bool(value)) if key == THROTTLING else float(value)
            for key in METRICS.keys() & record.keys()
            for place, value in enumerate(
                record[key] if METRICS[key].max_values else [record[key]])
            if value is not None}


def spent_before(records: list[dict[str, Any]], summary_path: Path) -> tuple[float, float, float]:
    """Return the seconds, dollars and kWh that a run has used, by its records and its summary.

    Raises:
        UserError: the summary cannot be read.
    """
    known: dict[str, Any] = {}
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError,
                  OverflowError):  # none yet, or damaged: the records suffice
        summary = json.loads(read_records(summary_path, max_bytes=MAX_BYTES))
        known["energy_kwh"] = summary.get("energy_kwh")
        known["seconds"] = sum(summary["seconds"].values())
        known["usd"] = (summary["usd"] or {"total": 0.0})["total"]
    seconds, usd, energy_kwh = (max((found[key] for found in [*records, known]
                                     if is_number(found.get(key), 0, 1e12)), default=0.0)
                                for key in ("seconds", "usd", "energy_kwh"))
    return seconds, usd, energy_kwh


def remove_metrics_from(path: Path, first_step: int, *, lacks_validation: bool = False) -> None:
    """Drop the records of steps that a resumed run takes again, from `first_step` on.

    Args:
        lacks_validation: drop the validation and samples before that step too: they are repeated.
    """
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["global_step"] < first_step
            and not (lacks_validation and record["global_step"] == first_step - 1
                     and record.keys() & {"validation_loss", "prompt"})]
    write_atomically(path, "".join(to_json(record) + "\n" for record in kept), durable=True)


def fsync_records(run_dir: Path) -> None:
    """Call fsync on a run's metrics and samples, if there are any."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        with suppress(FileNotFoundError):
            fsync(run_dir / name)
