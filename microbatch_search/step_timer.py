"""How long a global step takes, without a wait for the GPU between two steps."""

from __future__ import annotations

import itertools
import statistics

import torch

from basics.device_time import Moment


class StepTimer:
    """Measures steps that follow one another.

    A wait after each step would leave the GPU idle while the CPU begins the next one, which
    training does not do. So the CPU waits once, for the last step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[Moment] = []

    def mark(self) -> None:
        """Record the end of a step, or the beginning of the first one."""
        self._moments.append(Moment(self._device))

    def median_seconds(self) -> float:
        """Return the median time of a step: one slow step does not count. Waits for the device."""
        self._moments[-1].wait()
        return statistics.median(end.seconds_since(start)
                                 for start, end in itertools.pairwise(self._moments))
