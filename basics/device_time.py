"""Moments on a device's own time line, recorded without waiting for it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Moment:
    """The end of all work that a device has been given so far.

    A GPU records it when it gets there. A CPU is done with its work when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | Any = None  # on a CPU
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._seconds = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has come to this moment."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments of one device. Waits for this one."""
        self.wait()
        if self._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000  # milliseconds
