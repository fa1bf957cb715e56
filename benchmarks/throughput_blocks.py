"""Time the steps of a training loop in blocks, after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WARM_UP_STEPS = 4  # at least: the first step may compile, three more follow
NUM_BLOCKS = 3


@dataclass(frozen=True)
class TimedSteps:
    """The results of all steps, and how long they took."""

    results: list[Any]
    seconds_to_first: float
    block_seconds: list[float]
    steps_per_block: int

    @property
    def step_seconds(self) -> float:
        """Seconds of a step in the median block."""
        return statistics.median(self.block_seconds) / self.steps_per_block

    def speeds(self, tokens_per_step: int) -> dict[str, Any]:
        """Return what a line of results says about the speed."""
        tokens = tokens_per_step * self.steps_per_block
        return {"tokens_per_second": tokens_per_step / self.step_seconds,
                "step_ms": self.step_seconds * 1e3,
                "blocks": [tokens / seconds for seconds in self.block_seconds]}


def time_steps(step: Callable[[], Any], num_steps: int, wait: Callable[[], object]) -> TimedSteps:
    """Take all steps; time the last ones as blocks of equal length.

    Within a block nothing waits for the device, as in a run.

    Args:
        wait: waits until the device has done all that was asked of it.
    """
    length = max(1, (num_steps - WARM_UP_STEPS) // NUM_BLOCKS)
    ends = {num_steps - length * blocks for blocks in range(NUM_BLOCKS + 1)}
    began, results, times, to_first = time.perf_counter(), [], [], 0.0
    for number in range(1, num_steps + 1):
        results.append(step())
        if number == 1:
            wait()
            to_first = time.perf_counter() - began
        if number in ends:
            wait()
            times.append(time.perf_counter())
    seconds = [late - early for early, late in zip(times, times[1:], strict=False)]
    return TimedSteps(results, to_first, seconds, length)
