"""Training losses between two reports, and their averages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

REPORT_INTERVAL = 10  # global steps between two reports of the losses


@dataclass(frozen=True)
class WindowSummary:
    """Averages over the global steps since the last report, all processes and all tokens."""

    train_loss: float
    train_loss_min: float
    train_loss_max: float
    grad_norm: float
    grad_norm_max: float
    skipped_steps: int  # with a gradient that was not finite on some process: no weight update


class LossWindow:
    """Losses and gradient norms since the last report, kept on the device until then.

    Attributes:
        longest_skipped: the longest run of steps with a non-finite gradient that ended in the last
            window or still goes on; it is counted across reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros(REPORT_INTERVAL, device=device)
        self._grad_norms = torch.zeros(REPORT_INTERVAL, device=device)
        self._filled = 0
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0
        self._skipped_in_a_row = self.longest_skipped = 0

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a global step: this process's mean loss, (), and the gradient norm, ()."""
        self._losses[self._filled] = loss
        self._grad_norms[self._filled] = grad_norm
        self._filled += 1

    @property
    def is_full(self) -> bool:
        """Whether a report is due."""
        return self._filled == len(self._losses)

    def summarise(self) -> WindowSummary:
        """Average over all processes and empty the window. A collective: every rank.

        Skipped steps are left out; if all were skipped, the averages are NaN.
        """
        losses = self._losses[: self._filled].clone()
        dist.all_reduce(losses)  # gloo cannot average
        losses = (losses / dist.get_world_size()).cpu()
        grad_norms = self._grad_norms[: self._filled].cpu()  # the same on every rank
        self.longest_skipped = 0
        for is_finite in grad_norms.isfinite().tolist():
            self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
            self.longest_skipped = max(self.longest_skipped, self._skipped_in_a_row)
        taken = grad_norms.isfinite()
        losses, grad_norms = losses[taken], grad_norms[taken]
        num_skipped, self._filled = self._filled - len(losses), 0
        if not len(losses):
            return WindowSummary(*[math.nan] * 5, skipped_steps=num_skipped)
        self._loss_sum_since_checkpoint += losses.sum().item()
        self._steps_since_checkpoint += len(losses)
        numbers = [losses.mean(), losses.min(), losses.max(), grad_norms.mean(), grad_norms.max()]
        return WindowSummary(*torch.stack(numbers).tolist(), skipped_steps=num_skipped)

    def take_loss_since_checkpoint(self) -> float:
        """Return the mean loss of the steps reported since the last call, NaN if none. Rank 0."""
        mean = self._loss_sum_since_checkpoint / (self._steps_since_checkpoint or math.nan)
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0
        return mean
