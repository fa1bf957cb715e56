"""What was measured of a checkpoint, for its card."""

from __future__ import annotations

from typing import Any

from basics.errors import one_line
from lab.runs import number
from reporting.metrics_file import read_metrics
from trainer.models import LoadedModel

MEASURED = {"loss": "loss (nats per token)", "perplexity": "perplexity",
            "bits_per_byte": "bits per byte", "accuracy": "accuracy",
            "normalised_accuracy": "length-normalised accuracy"}


def measurements(target: LoadedModel, dataset: str) -> list[dict[str, Any]]:
    """Collect the results of this checkpoint: its validation loss and its evaluations.

    Of repeated evaluations the newest counts; losses of the training split, and values that are
    not numbers, are left out.
    """
    checkpoint, found = target.checkpoint, {}
    if target.run.train.validates and checkpoint.loss is not None:
        name = "validation loss during training (nats per token)"
        found[dataset, name] = {"metric": "loss", "value": checkpoint.loss, "split": "validation"}
    for record in read_metrics(target.run.evaluations_path):
        if record.get("checkpoint") == checkpoint.name and not _is_of_training(record):
            for metric, name in MEASURED.items():
                if (value := number(record.get(metric))) is not None:
                    where = one_line(str(record.get("benchmark") or record.get("dataset")))
                    found[where, name + _slice(record)] = {
                        "metric": metric, "value": value, "split": _split(record)}
    return [{"dataset": where, "name": name} | values for (where, name), values in found.items()]


def _is_of_training(record: dict[str, Any]) -> bool:
    """Return whether a record is a loss of tokens trained on, which says nothing about others."""
    return "benchmark" not in record and record.get("split", "validation") != "validation"


def _split(record: dict[str, Any]) -> str | None:
    """Return the split; None of questions that are not from the task's own dataset."""
    found = record.get("split", None if "benchmark" in record else "validation")
    return None if found is None else one_line(str(found))


def _slice(record: dict[str, Any]) -> str:
    """Return what the tokens or questions of a record were, to follow the name of its figure."""
    if "benchmark" in record:
        is_own = isinstance(record.get("split"), str) or "questions_from" not in record
        return "" if is_own else f", questions of {one_line(str(record['questions_from']))}"
    count, start = number(record.get("num_tokens")), number(record.get("start_token"))
    if count is None or start is None:
        return ""
    return f", {count:,.0f} tokens from token {start:,.0f}"
