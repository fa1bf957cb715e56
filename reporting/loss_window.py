"""Training losses between two reports, and their averages.

On a GPU a window is read when the next one is full: the device never waits for a report.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from basics.device_time import Moment
from reporting.clock import PhaseClock

REPORT_INTERVAL = 10  # global steps between two reports of the losses
LAG = {"cuda": 1, "cpu": 0}  # closed windows that stay unread until `close` is told to wait


@dataclass(frozen=True)
class WindowSummary:
    """Averages over the global steps since the last report, all processes and all tokens."""

    train_loss: float
    train_loss_min: float
    train_loss_max: float
    grad_norm: float
    grad_norm_max: float
    skipped_steps: int  # with a gradient that was not finite on some process: no weight update
    slowest_step: int | None  # of those that were timed: the first one compiles
    slowest_step_seconds: float | None


@dataclass(frozen=True)
class ClosedWindow:
    """A window whose values are on their way to the host.

    Attributes:
        values: (2, n): losses, averaged over the processes, and gradient norms; on the host.
        seconds, usd: what the run had spent when the window was closed, by phase.
        moments: the start of the first timed step, and the end of each.
        ended: when `values` have arrived.
    """

    global_step: int  # the last one in it
    learning_rate: float  # of that step
    values: Tensor
    seconds: dict[str, float]
    usd: dict[str, float]
    moments: tuple[Moment, ...]
    ended: Moment

    def steps_per_second(self) -> float | None:
        """Return the speed on the device; None if no step was timed: the first one compiles."""
        timed_steps = len(self.moments) - 1
        return timed_steps / self.ended.seconds_since(self.moments[0]) if timed_steps else None

    def slowest_step(self) -> tuple[int, float] | tuple[None, None]:
        """Return the slowest timed step, with all that it waited for, and its seconds."""
        first = self.global_step - len(self.moments) + 2
        steps = [(ended.seconds_since(began), step) for step, (began, ended)
                 in enumerate(pairwise(self.moments), start=first)]
        return max(steps)[::-1] if steps else (None, None)


class LossWindow:
    """Losses and gradient norms since the last report, kept on the device until then.

    Attributes:
        longest_skipped: the longest run of steps with a non-finite gradient that ended in a window
            read last or still goes on; it is counted across reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lag = device, LAG[device.type]
        self._values = torch.zeros(2, REPORT_INTERVAL, device=device)
        self._filled = 0
        self._closed: list[ClosedWindow] = []
        self.restart_timing()
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0
        self._skipped_in_a_row = self.longest_skipped = 0

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a global step: this process's mean loss, (), and the gradient norm, ()."""
        self._values[0, self._filled] = loss
        self._values[1, self._filled] = grad_norm
        self._filled += 1
        self._moments.append(Moment(self._device))

    def restart_timing(self) -> None:
        """Time the steps from here on: since the last one, something else has been done."""
        self._moments = [Moment(self._device)]

    @property
    def is_full(self) -> bool:
        """Whether a report is due."""
        return self._filled == REPORT_INTERVAL

    def close(self, global_step: int, learning_rate: float, clock: PhaseClock, *,
              waits: bool) -> list[tuple[ClosedWindow, WindowSummary]]:
        """Average the losses over all processes, send them to the host, and empty the window.

        A collective: every rank.

        Args:
            global_step: the last one in the window.
            waits: also read windows that the device may not have finished yet.

        Returns:
            The windows that are read now, the oldest first.
        """
        values = self._values[:, : self._filled].clone()
        dist.all_reduce(values[0])  # gloo cannot average
        values[0] /= dist.get_world_size()  # the norms are the same on every rank
        on_host = values.to("cpu", non_blocking=True)  # in pinned memory
        ended = Moment(self._device)
        self._closed.append(ClosedWindow(
            global_step, learning_rate, on_host, clock.read(), clock.usd(),
            moments=tuple(self._moments), ended=ended))
        self._moments, self._filled = [ended], 0
        num_read = len(self._closed) - (0 if waits else self._lag)
        read, self._closed = self._closed[:num_read], self._closed[num_read:]
        self.longest_skipped = 0
        return [(window, self._summarise(window)) for window in read]

    def _summarise(self, window: ClosedWindow) -> WindowSummary:
        """Wait for a window's values and average them.

        Skipped steps are left out; if all were skipped, the averages are NaN.
        """
        window.ended.wait()
        losses, grad_norms = window.values
        taken = grad_norms.isfinite()
        for is_finite in taken.tolist():
            self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
            self.longest_skipped = max(self.longest_skipped, self._skipped_in_a_row)
        rest: list[Any] = [len(losses) - int(taken.sum()), *window.slowest_step()]
        losses, grad_norms = losses[taken], grad_norms[taken]
        if not len(losses):
            return WindowSummary(math.nan, math.nan, math.nan, math.nan, math.nan, *rest)
        self._loss_sum_since_checkpoint += losses.sum().item()
        self._steps_since_checkpoint += len(losses)
        numbers = [losses.mean(), losses.min(), losses.max(), grad_norms.mean(), grad_norms.max()]
        return WindowSummary(*torch.stack(numbers).tolist(), *rest)

    def pop_loss_since_checkpoint(self) -> float:
        """Return the mean loss of the steps reported since the last call, NaN if none. Rank 0."""
        mean = self._loss_sum_since_checkpoint / (self._steps_since_checkpoint or math.nan)
        self._loss_sum_since_checkpoint, self._steps_since_checkpoint = 0.0, 0
        return mean
