"""Losses as they are measured while a run trains, and the file that keeps them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from run_clock import REPORT_INTERVAL


@dataclass(frozen=True)
class WindowSummary:
    """The global steps since the last report, averaged over all processes and all tokens."""

    train_loss: float
    train_loss_min: float
    train_loss_max: float
    grad_norm: float
    grad_norm_max: float


class StepWindow:
    """Losses and gradient norms of a few global steps, kept on the device until reported."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(REPORT_INTERVAL, device=device)
        self._grad_norms = torch.zeros(REPORT_INTERVAL, device=device)
        self._filled = 0
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Note one global step: this process's mean loss, () and the gradient's norm, ()."""
        self._losses[self._filled] = loss
        self._grad_norms[self._filled] = grad_norm
        self._filled += 1

    @property
    def is_full(self) -> bool:
        return self._filled == len(self._losses)

    def summarise(self) -> WindowSummary:
        """Average over the processes and start anew. A collective: every rank."""
        losses = self._losses[: self._filled].clone()
        dist.all_reduce(losses)  # gloo cannot average
        losses /= dist.get_world_size()
        grad_norms = self._grad_norms[: self._filled]
        numbers = [losses.mean(), losses.min(), losses.max(), grad_norms.mean(), grad_norms.max()]
        summary = WindowSummary(*torch.stack(numbers).tolist())
        self._loss_sum_since_checkpoint += summary.train_loss * self._filled
        self._steps_since_checkpoint += self._filled
        self._filled = 0
        return summary

    def take_loss_since_checkpoint(self) -> float:
        """Give the mean loss of the steps reported since the last call. Rank 0."""
        mean = self._loss_sum_since_checkpoint / self._steps_since_checkpoint
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0
        return mean


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a `metrics.jsonl`; a line cut short by a kill is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def spent_before(metrics_path: Path, summary_path: Path) -> tuple[float, float]:
    """Give the seconds and dollars that a run's records know of, whatever was saved of it."""
    records = read_metrics(metrics_path)
    seconds = [record["seconds"] for record in records]
    usd = [record["usd"] for record in records if "usd" in record]
    try:
        summary = json.loads(summary_path.read_text())
        seconds.append(sum(summary["seconds"].values()))
        usd.append((summary["usd"] or {"total": 0.0})["total"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none yet, or it is damaged: it is not needed
    return max(seconds, default=0.0), max(usd, default=0.0)


def remove_metrics_from(path: Path, first_step: int) -> None:
    """Drop what lies behind the checkpoint that a run goes on from: those steps come again."""
    kept = [record for record in read_metrics(path) if record["global_step"] < first_step]
    write_aside(path, "".join(to_json(record) + "\n" for record in kept))


def write_aside(path: Path, text: str) -> None:
    """Replace a file in one step, so that a reader sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def to_json(values: Any, **options: Any) -> str:
    """Write JSON in which a number that is not finite stands as null: JSON has no NaN."""
    return json.dumps(_finite(values), allow_nan=False, **options)


def finite_or_none(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    return finite_or_none(values) if isinstance(values, float) else values
