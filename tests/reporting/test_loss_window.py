"""Windows of losses: what is read when, and by how many windows a report may be late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from reporting.loss_window import REPORT_INTERVAL, LossWindow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fill(window: LossWindow, number: int, *, steps: int = REPORT_INTERVAL) -> None:
    """Add losses of `number`, and close the window."""
    for _ in range(steps):
        window.add(torch.tensor(float(number)), torch.tensor(2.0 * number))
    window.close(number * REPORT_INTERVAL, learning_rate=number / 10)


def read(window: LossWindow, *, waits: bool) -> list[tuple[int, float, float]]:
    """Take windows; return the last step, learning rate and mean loss of each."""
    return [(closed.global_step, closed.learning_rate, window.summarise(closed).train_loss)
            for closed in window.take(waits=waits)]


def test_on_a_cpu_a_window_is_read_at_once() -> None:
    window = LossWindow(CPU)
    fill(window, 1)
    assert read(window, waits=False) == [(10, 0.1, 1.0)]
    assert read(window, waits=True) == []


def test_with_a_lag_a_window_is_read_when_the_next_one_is_closed() -> None:
    window, found = LossWindow(CPU, lag=1), []
    for number in (1, 2, 3):
        fill(window, number)
        found.append(read(window, waits=False))
    assert found == [[], [(10, 0.1, 1.0)], [(20, 0.2, 2.0)]]


def test_whoever_waits_gets_all_windows_in_order() -> None:
    window = LossWindow(CPU, lag=1)
    fill(window, 1)
    fill(window, 2, steps=3)
    assert read(window, waits=True) == [(10, 0.1, 1.0), (20, 0.2, 2.0)]
    assert window.take_loss_since_checkpoint() == pytest.approx((10 * 1.0 + 3 * 2.0) / 13)


def test_a_closed_window_keeps_its_values() -> None:
    """The buffers on the device are filled again before a late window is read."""
    window = LossWindow(CPU, lag=1)
    fill(window, 1)
    fill(window, 2)
    (first,) = window.take(waits=False)
    summary = window.summarise(first)
    assert (summary.train_loss, summary.grad_norm) == (1.0, 2.0)


@pytest.mark.gpu
def test_closing_and_taking_windows_never_waits_for_the_device() -> None:
    device = torch.device("cuda", 0)
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    window = LossWindow(device)
    steps = [torch.tensor(float(number), device=device) for number in range(1, 4)]
    window.add(steps[0], steps[0])
    window.close(0, 0.1)  # NCCL starts
    read(window, waits=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, value in enumerate(steps):
            window.add(value, value)
            window.close(number, 0.1)
            early = window.take(waits=False)
            assert [closed.global_step for closed in early] == [number - 1][:number]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (last,) = window.take(waits=True)
    assert last.copied is not None and last.values.is_pinned()
    assert window.summarise(last).train_loss == 3.0
