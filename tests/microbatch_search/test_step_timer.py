"""The time of a step: its median, and one wait for the GPU."""

from __future__ import annotations

import pytest
import torch

from basics import device_time
from microbatch_search.step_timer import StepTimer


def test_one_slow_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 13.0, 113.0, 114.5, 115.5])  # steps of 2, 1, 100, 1.5 and 1 seconds
    monkeypatch.setattr(device_time.time, "perf_counter", lambda: next(times))
    timer = StepTimer(torch.device("cpu"))
    for _ in range(6):
        timer.mark()
    assert timer.median_seconds() == 1.5


class FakeEvent:
    """An event of a GPU that has worked for 3 ms more at each event but the third, 90 ms later."""

    log: list[str] = []

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing and blocking
        self.is_reached = False

    def record(self, stream: str) -> None:
        self.log.append(f"record on {stream}")
        count = len(self.log)
        self.milliseconds = 3.0 * count + 90.0 * (count > 2)

    def synchronize(self) -> None:
        if not self.is_reached and self.log[-1] != "wait":
            self.log.append("wait")
        self.is_reached = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.milliseconds - self.milliseconds


def test_a_gpu_is_waited_for_once_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s stream")
    monkeypatch.setattr(FakeEvent, "log", [])
    timer = StepTimer(torch.device("cuda", 1))
    for _ in range(6):
        timer.mark()
    assert timer.median_seconds() == pytest.approx(0.003)
    assert FakeEvent.log == ["record on cuda:1's stream"] * 6 + ["wait"]


@pytest.mark.gpu
def test_a_gpus_own_time_is_measured_and_steps_do_not_wait() -> None:
    device = torch.device("cuda", 0)
    timer, matrix = StepTimer(device), torch.ones(4096, 4096, device=device)
    (matrix @ matrix).sum().item()
    torch.cuda.set_sync_debug_mode("error")
    try:
        timer.mark()
        for _ in range(5):
            matrix @ matrix
            timer.mark()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 1e-5 < timer.median_seconds() < 60  # 137 GFLOP
