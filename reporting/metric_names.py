"""The names that trackers show for the keys of `metrics.jsonl`. Needs no torch."""

from __future__ import annotations

import math
from typing import Any

STEP = "step"  # the x axis of trackers that have no steps of their own
MAX_VALUES = 2**10  # of a key with a list
# {layer} and {gpu} stand for the place in a list, counted from 1 and, as nvidia-smi does, from 0.
NAMES = {
    "train_loss": "train/loss",
    "train_loss_min": "train/loss_min",
    "train_loss_max": "train/loss_max",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "grad_norm_max": "train/grad_norm_max",
    "skipped_steps": "train/skipped_steps",
    "tokens_per_second": "train/tokens_per_second",
    "mfu": "train/mfu",
    "slowest_step": "train/slowest_step",
    "slowest_step_seconds": "train/slowest_step_seconds",
    "validation_loss": "validation/loss",
    "validation_bits_per_byte": "validation/bits_per_byte",
    "validation_seconds": "validation/seconds",
    "tokens": "progress/tokens",
    "seconds": "progress/seconds",
    "usd": "progress/usd",
    "layer_grad_norm": "layers/{layer}/grad_norm",
    "layer_update_ratio": "layers/{layer}/update_ratio",
    "layer_activation_norm": "layers/{layer}/activation_norm",
    "layer_max_attention_logit": "layers/{layer}/max_attention_logit",
    "layer_attention_entropy": "layers/{layer}/attention_entropy",
    "embedding_grad_norm": "layers/embedding/grad_norm",
    "embedding_update_ratio": "layers/embedding/update_ratio",
    "embedding_activation_norm": "layers/embedding/activation_norm",
    "head_grad_norm": "layers/head/grad_norm",
    "head_update_ratio": "layers/head/update_ratio",
    "logit_p1": "logits/p1",
    "logit_p50": "logits/p50",
    "logit_p99": "logits/p99",
    "logit_max": "logits/max",
    "token_loss_p1": "token_losses/p1",
    "token_loss_p50": "token_losses/p50",
    "token_loss_p99": "token_losses/p99",
    "token_loss_max": "token_losses/max",
    "host_ram_gib": "machine/host_ram_gib",
    "host_load": "machine/host_load",
    "disk_free_gib": "machine/disk_free_gib",
    "energy_kwh": "machine/energy_kwh",
    "gpu_memory_gib": "machine/gpu_{gpu}/memory_gib",
    "gpu_use_percent": "machine/gpu_{gpu}/use_percent",
    "gpu_temperature_c": "machine/gpu_{gpu}/temperature_c",
    "gpu_power_w": "machine/gpu_{gpu}/power_w",
    "gpu_throttling": "machine/gpu_{gpu}/is_throttled",  # text, "" for no: 1 or 0
}
FINAL_KEYS = ("global_step", "num_steps", "tokens", "num_parameters", "train_loss",
              "validation_loss", "validation_bits_per_byte",
              "skipped_steps", "tokens_per_second", "tokens_per_second_overall")


def shown_step(record: dict[str, Any]) -> int:
    """Return a record's step as people count it, from 1."""
    return record["global_step"] + 1


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under the names that trackers show."""
    metrics = {}
    for key in NAMES.keys() & record.keys():
        values = record[key] if isinstance(record[key], list) else [record[key]]
        for place, value in enumerate(values[:MAX_VALUES]):
            number = _number(value, is_text=key == "gpu_throttling")
            if number is not None:
                metrics[NAMES[key].format(layer=place + 1, gpu=place)] = number
    return metrics


def final_figures(summary: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a complete `summary.json`; empty if the run has not ended."""
    figures: dict[str, Any] = {key: summary.get(key) for key in FINAL_KEYS}
    for key, value in (("seconds", summary.get("seconds")), ("usd", summary.get("usd"))):
        values: list[Any] = (
            list(map(_number, value.values())) if isinstance(value, dict) else [None])
        if key == "usd" and isinstance(value, dict):
            values = [_number(value.get("total"))]
        figures[key] = None if None in values else sum(values)
    if isinstance(summary.get("best"), dict):
        figures["best_loss"] = summary["best"].get("loss")
    if _number(figures["global_step"]) is None:  # only a status: it was not the end
        return {}
    figures["steps"] = figures.pop("global_step") + 1
    return {f"final/{key}": number for key, value in figures.items()
            if (number := _number(value)) is not None}


def _number(value: Any, *, is_text: bool = False) -> float | None:
    """Return a finite number, or None for anything else."""
    if is_text and isinstance(value, str):
        return float(bool(value))
    if type(value) not in (int, float) or abs(value) > 1e300:  # false for NaN
        return None
    return float(value) if math.isfinite(value) else None
