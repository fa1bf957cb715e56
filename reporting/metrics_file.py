"""`metrics.jsonl`, `samples.jsonl`: a JSON record a line, read without trusting it. No torch."""

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from basics.errors import FAILED, UserError, status_of_place, visible
from basics.files import MAX_BYTES, fsync, read_regular_file, write_atomically
from basics.gpu_readings import SLOWDOWNS
from basics.json_files import parsed_object, to_json
from settings.validation import SET_NAME

MAX_RECORDS_BYTES = 2**27  # per file: about four million steps
MAX_STEP = 2**40
BOUND = 1e100  # of the numbers of a record
SAMPLES_BYTES = 2**18  # of the end of `samples.jsonl`, in which samples are looked for
WARNED_RECORDS = 50  # the last ones, whose skipped steps are warned of
LITTLE_DISK_GIB = 5.0
MAX_SAMPLES = 40  # the newest ones
MAX_TEXT = 4000  # characters of a prompt or of a text
LARGEST = 1e15  # the largest number that a run could have measured
THROTTLING = "gpu_throttling"
INITIAL_LOSS = "validation_initial_loss"  # before the first step
NUM_LAYERS = "num_layers"  # from this step on: the model has grown
CHANGED = "changed"  # settings between two launches: see `setting_changes`
# Where trackers show the keys of a record, and the beginning of a key that they leave out. {layer}
# and {gpu} are the place in a list, counted from 1 and, as nvidia-smi does, from 0.
SECTIONS = {
    ("train", "train_"): (
        "train_loss",
        "train_loss_min",
        "train_loss_max",
        "train_reference_loss",
        "train_reference_tokens",
        "learning_rate",
        "grad_norm",
        "grad_norm_max",
        "skipped_steps",
        "tokens_per_second",
        "mfu",
        "slowest_step",
        "slowest_step_seconds",
    ),
    ("validation", "validation_"): (
        "validation_loss",
        "validation_reference_loss",
        "validation_reference_tokens",
        "validation_perplexity",
        "validation_bits_per_byte",
        "validation_seconds",
        INITIAL_LOSS,
    ),
    ("progress", ""): (
        "tokens",
        "seconds",
        "usd",
        "seconds_left",
        "usd_at_end",
        NUM_LAYERS,
    ),
    ("layers/{layer}", "layer_"): (
        "layer_grad_norm",
        "layer_update_ratio",
        "layer_activation_norm",
        "layer_max_attention_logit",
        "layer_attention_entropy",
    ),
    ("layers/embedding", "embedding_"): (
        "embedding_grad_norm",
        "embedding_update_ratio",
        "embedding_activation_norm",
    ),
    ("layers/head", "head_"): ("head_grad_norm", "head_update_ratio"),
    ("logits", "logit_"): ("logit_p1", "logit_p50", "logit_p99", "logit_max"),
    ("token_losses", "token_loss_"): (
        "token_loss_p1",
        "token_loss_p50",
        "token_loss_p99",
        "token_loss_max",
    ),
    ("machine", ""): ("host_ram_gib", "host_load", "disk_free_gib", "energy_kwh"),
    ("machine/gpu_{gpu}", "gpu_"): (
        "gpu_memory_gib",
        "gpu_use_percent",
        "gpu_temperature_c",
        "gpu_power_w",
    ),
}
# By key the name that trackers show: all metrics. `gpu_throttling` has texts, "" for no.
METRICS = {
    key: f"{section}/{key.removeprefix(prefix)}"
    for (section, prefix), keys in SECTIONS.items()
    for key in keys
}
METRICS[THROTTLING] = "machine/gpu_{gpu}/is_throttled"
# Of the validation sets after the first one these have keys of their own: see `set_key`.
OF_SETS = ("validation_loss", "validation_perplexity", "validation_bits_per_byte")
SET_KEY = re.compile(rf"({'|'.join(OF_SETS)})/({SET_NAME})")


def set_key(key: str, name: str) -> str:
    """Return the key of a validation set: "validation_loss/code"."""
    return f"{key}/{name}"


def set_keys(record: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the metric and the name of the set of each `set_key` in a record of a validation."""
    if "validation_loss" not in record:  # most records: looking at each key takes longer
        return {}
    matches = (SET_KEY.fullmatch(key) for key in record if key.startswith(OF_SETS))
    return {match[0]: (match[1], match[2]) for match in matches if match}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the valid records of a `metrics.jsonl`; none without such a file. Raises: UserError.

    Lines cut short by a kill are left out, and records with numbers that are out of bounds.
    """
    return valid_records(read_records(path))


def read_records(path: Path, *, max_bytes: int = MAX_RECORDS_BYTES) -> str:
    """Return the text of a file of records, empty if there is none. Raises: UserError."""
    try:
        return read_regular_file(path, max_bytes=max_bytes)
    except FileNotFoundError:
        return ""
    except OSError as error:
        status = status_of_place(error)
        advice = "start again" if status == FAILED else "make it readable, or move it away"
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}", status) from None


def whole_lines(path: Path, offset: int) -> bytes:
    """Return the lines from a place in a file on, but one that is being written."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:  # none yet, or removed meanwhile
        return b""
    return content[: content.rfind(b"\n") + 1]


def valid_records(text: str) -> list[dict[str, Any]]:
    """Parse lines of a `metrics.jsonl`; the others are left out, as `read_metrics` says."""
    return [
        record
        for record in map(parsed_object, text.split("\n"))
        if is_step(record.get("global_step"))
        and all(_is_valid(key, value) for key, value in record.items() if key in METRICS)
        and all(_is_number_or_none(record[key]) for key in set_keys(record))
    ]


def is_step(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MAX_STEP


def is_list(key: str) -> bool:
    """Return whether a metric has a number for each layer or GPU."""
    return "{" in METRICS[key]


def _is_valid(key: str, value: Any) -> bool:
    if is_list(key) != isinstance(value, list):
        return False
    if key == THROTTLING:
        return all(isinstance(text, str) and text.isprintable() for text in value)
    numbers = value if is_list(key) else [value]
    return all(map(_is_number_or_none, numbers))


def _is_number_or_none(value: Any) -> bool:
    return value is None or is_number(value, -BOUND, BOUND)


def is_number(value: Any, least: float, most: float = LARGEST) -> bool:
    """Return whether a value of JSON is a number between two others; NaN is not."""
    return type(value) in (int, float) and least <= value <= most


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a valid record under the names that trackers show."""
    return {
        METRICS[key].format(layer=place + 1, gpu=place): float(bool(value))
        if key == THROTTLING
        else float(value)
        for key in METRICS.keys() & record.keys()
        for place, value in enumerate(record[key] if is_list(key) else [record[key]])
        if value is not None
    } | {
        f"validation/{name}/{metric.removeprefix('validation_')}": float(record[key])
        for key, (metric, name) in set_keys(record).items()
        if record[key] is not None
    }


def spent_before(records: list[dict[str, Any]], summary_path: Path) -> tuple[float, float, float]:
    """Return the seconds, dollars and kWh that a run has used, by its records and its summary.

    Raises: UserError: the summary cannot be read.
    """
    known: dict[str, Any] = {}
    summary = parsed_object(read_records(summary_path, max_bytes=MAX_BYTES))
    with suppress(LookupError, TypeError, AttributeError, OverflowError):  # the records suffice
        known["energy_kwh"] = summary.get("energy_kwh")
        known["seconds"] = sum(summary["seconds"].values())
        known["usd"] = (summary["usd"] or {"total": 0.0})["total"]
    seconds, usd, energy_kwh = (
        max(
            (found[key] for found in [*records, known] if is_number(found.get(key), 0, 1e12)),
            default=0.0,
        )
        for key in ("seconds", "usd", "energy_kwh")
    )
    return seconds, usd, energy_kwh


def remove_metrics_from(path: Path, first_step: int, *, lacks_validation: bool = False) -> None:
    """Drop the records of steps that a resumed run takes again, from `first_step` on.

    If it lacks the validation before that step, drop that and its samples too. A change of settings
    after the step before is recorded anew, if there still is one.
    """
    dropped = {CHANGED, "validation_loss", "prompt"} if lacks_validation else {CHANGED}
    if path.exists():
        kept = [
            record
            for record in read_metrics(path)
            if record["global_step"] < first_step
            and not (record["global_step"] == first_step - 1 and record.keys() & dropped)
        ]
        write_atomically(path, "".join(to_json(record) + "\n" for record in kept), durable=True)


def fsync_records(run_dir: Path) -> None:
    """Call fsync on a run's metrics and samples, if there are any."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        with suppress(FileNotFoundError):
            fsync(run_dir / name)


class Sample(NamedTuple):
    """What a model has written; orders to a terminal are escaped."""

    step: int  # counted from 1
    prompt: str
    text: str


def read_samples(path: Path) -> list[Sample]:
    """Return the samples at the end of a `samples.jsonl`, the newest first."""
    try:
        content = whole_lines(path, max(0, path.stat().st_size - SAMPLES_BYTES))
    except OSError:
        return []
    found = []
    for line in content.decode(errors="replace").split("\n"):
        sample = parsed_object(line)
        step, prompt, text = (sample.get(key) for key in ("global_step", "prompt", "text"))
        if is_step(step) and isinstance(prompt, str) and isinstance(text, str):
            found.append(Sample(step + 1, visible(prompt[:MAX_TEXT]), visible(text[:MAX_TEXT])))
    return sorted(found[-MAX_SAMPLES:], key=lambda sample: -sample.step)


def record_warnings(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the last records of a run that trains warn of, one line each."""
    found = []
    last = records if len(records) <= WARNED_RECORDS else records[-WARNED_RECORDS:]
    if skipped := sum(record.get("skipped_steps") or 0 for record in last):
        found.append(f"{skipped:.0f} of the last steps skipped: a gradient was not finite")
    by_reason: dict[str, list[str]] = {}
    for gpu, reasons in enumerate(_last_value(records, THROTTLING) or ()):
        if slowed_by := slowdowns(reasons):
            by_reason.setdefault(slowed_by, []).append(str(gpu))
    found += [f"GPU {', '.join(gpus)}: {reasons}" for reasons, gpus in by_reason.items()]
    free = _last_value(records, "disk_free_gib")
    if free is not None and free < LITTLE_DISK_GIB:
        found.append(f"only {free:.1f} GiB free on the disk")
    return found


def slowdowns(reasons: str) -> str:
    """Return which of `SLOWDOWNS` an item of `gpu_throttling` has; a power limit is usual."""
    return ", ".join(reason for reason in reasons.split(", ") if reason in SLOWDOWNS)


def _last_value(records: Sequence[dict[str, Any]], key: str) -> Any:
    values = (record[key] for record in reversed(records) if record.get(key) is not None)
    return next(values, None)
