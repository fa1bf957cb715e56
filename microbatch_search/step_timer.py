"""How long a global step takes, without a wait for the GPU between two steps."""

from __future__ import annotations

import itertools
import statistics
import time

import torch


class StepTimer:
    """Measures steps that follow one another.

    A wait after each step would leave the GPU idle while the CPU begins the next one, which
    training does not do. So the GPU itself records when each step ends, and the CPU waits once,
    for the last one. A CPU is done with a step when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record the end of a step, or the beginning of the first one."""
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def median_seconds(self) -> float:
        """Return the median time of a step: one slow step does not count. Waits for the device."""
        if not self._events:
            return statistics.median(end - start for start, end in itertools.pairwise(self._times))
        self._events[-1].synchronize()
        return statistics.median(start.elapsed_time(end) / 1000  # milliseconds
                                 for start, end in itertools.pairwise(self._events))
