"""Training losses between two reports, and their averages; the device never waits for a report."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from basics.device import CPU, GPU, DeviceTime
from reporting.clock import PhaseClock

REPORT_INTERVAL = 10  # global steps between two reports of the losses
LAG = {GPU: 1, CPU.type: 0}  # closed windows that stay unread, but when `close` is told to wait


@dataclass
class Window:
    """The steps since the last report."""

    global_step: int  # the last one
    num_steps: int
    learning_rate: float
    seconds: dict[str, float]  # what the run had spent when the window was closed, by phase
    usd: dict[str, float]
    # Keys of a record, set when the window is read. Averages are over all processes and tokens,
    # without skipped steps; NaN if all were skipped. Losses are of steps with all entries of the
    # vocabulary, and absent if there is none: see `sampled_softmax`.
    numbers: dict[str, Any] = field(default_factory=dict)
    num_timed: int = 0  # steps: the first one of a launch, which compiles, is not
    timed_seconds: float = 0.0

    @property
    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        return self.seconds, self.usd

    @property
    def steps_per_second(self) -> float | None:
        return self.num_timed / self.timed_seconds if self.num_timed else None


class LossWindow:
    """Losses and gradient norms since the last report, kept on the device until then.

    `longest_skipped` is the largest number of consecutive steps with a non-finite gradient, as of
    the windows that the last `close` has read; steps in earlier windows count if they adjoin.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lag = LAG[device.type]
        self._values = torch.zeros(2, REPORT_INTERVAL, device=device)
        self._filled = 0
        # Each with its values on their way to the host, the start of the first timed step and the
        # end of each, and when the values have arrived.
        self._closed: list[tuple[Window, Tensor, list[DeviceTime], DeviceTime]] = []
        self.restart_timing()
        self._loss_sum_since_checkpoint = 0.0
        self._steps_since_checkpoint = 0
        self._skipped_in_a_row = self.longest_skipped = 0

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Record a global step: this process's mean loss, (), and the gradient norm, ()."""
        self._values[0, self._filled] = loss
        self._values[1, self._filled] = grad_norm
        self._filled += 1
        self._times.append(DeviceTime(self._device))

    def restart_timing(self) -> None:
        """Time the steps from here on: since the last one, something else has been done."""
        self._times = [DeviceTime(self._device)]

    @property
    def is_full(self) -> bool:
        return self._filled == REPORT_INTERVAL

    def close(
        self, global_step: int, learning_rate: float, clock: PhaseClock, *, waits: bool
    ) -> list[Window]:
        """Average the losses over all processes, send them to the host, and empty the window.

        A collective: every rank. Returns the windows that are read now, the oldest first; with
        `waits` those too that the device may not have finished yet.
        """
        values = self._values[:, : self._filled].clone()
        # One collective a report, not one a step.
        dist.all_reduce(values[0])  # gloo cannot average
        values[0] /= dist.get_world_size()  # the norms are the same on every rank
        on_host = values.to("cpu", non_blocking=True)  # in pinned memory
        ended = DeviceTime(self._device)
        window = Window(global_step, self._filled, learning_rate, *clock.spent())
        self._closed.append((window, on_host, self._times, ended))
        self._times = [ended]
        self._filled = 0
        self.longest_skipped = 0
        read = []
        while len(self._closed) > (0 if waits else self._lag):
            read.append(self._read(*self._closed.pop(0)))
        return read

    def _read(
        self, window: Window, values: Tensor, times: list[DeviceTime], ended: DeviceTime
    ) -> Window:
        """Wait for the values of a window, losses and gradient norms, (2, n), and average them."""
        ended.wait()
        taken = values[1].isfinite()
        for is_finite in taken.tolist():
            self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
            self.longest_skipped = max(self.longest_skipped, self._skipped_in_a_row)
        losses, grad_norms = values[:, taken]
        has_steps = len(losses) > 0
        losses = losses[~losses.isnan()]  # a step with a part of the vocabulary has none
        self._loss_sum_since_checkpoint += losses.sum().item()
        self._steps_since_checkpoint += len(losses)
        if not has_steps:
            losses = grad_norms = torch.tensor([math.nan])
        num_timed = len(times) - 1
        durations = [end.seconds_since(start) for start, end in pairwise(times)]
        first_timed = window.global_step - num_timed + 1
        timed = ((seconds, step) for step, seconds in enumerate(durations, first_timed))
        slowest_seconds, slowest_step = max(timed, default=(None, None))
        if len(losses):
            window.numbers = {
                "train_loss": losses.mean().item(),
                "train_loss_min": losses.min().item(),
                "train_loss_max": losses.max().item(),
            }
        window.numbers |= {
            "grad_norm": grad_norms.mean().item(),
            "grad_norm_max": grad_norms.max().item(),
            "skipped_steps": int((~taken).sum()),
            "slowest_step": slowest_step,
            "slowest_step_seconds": slowest_seconds,
            "learning_rate": window.learning_rate,
        }
        if num_timed:
            window.num_timed, window.timed_seconds = num_timed, ended.seconds_since(times[0])
        return window

    def pop_loss_since_checkpoint(self) -> float:
        """Return the mean loss of the steps reported since the last call, NaN if none. Rank 0."""
        mean = self._loss_sum_since_checkpoint / (self._steps_since_checkpoint or math.nan)
        self._loss_sum_since_checkpoint = 0.0
        self._steps_since_checkpoint = 0
        return mean
