"""Windows of losses: what is read when, and by how many windows a report may be late."""

import math

import pytest
import torch
import torch.distributed as dist

from basics import tensors
from reporting import loss_window
from reporting.clock import PhaseClock
from reporting.loss_window import REPORT_INTERVAL, LossWindow
from tests.support.stand_ins import FakeTime

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def late(monkeypatch):
    """Windows are read one window late, as on a GPU."""
    monkeypatch.setitem(loss_window.LAG, "cpu", 1)


def fill(window, number, *, steps=REPORT_INTERVAL, waits=False):
    """Add losses of `number`, and close the window.

    Returns:
        The last step, learning rate and mean loss of each window that is read.
    """
    for _ in range(steps):
        window.add(torch.tensor(float(number)), torch.tensor(2.0 * number))
    closed = window.close(number * REPORT_INTERVAL, number / 10, PhaseClock(), waits=waits)
    return [(each.global_step, each.learning_rate, each.numbers["train_loss"]) for each in closed]


def test_a_window_is_read_at_once_and_with_a_lag_when_the_next_one_is_closed(monkeypatch):
    assert fill(LossWindow(CPU), 1) == [(10, 0.1, 1.0)]
    monkeypatch.setitem(loss_window.LAG, "cpu", 1)
    window = LossWindow(CPU)
    assert [fill(window, number) for number in (1, 2, 3)] == [
        [], [(10, 0.1, 1.0)], [(20, 0.2, 2.0)]]


def test_whoever_waits_gets_all_windows_in_order(late):
    window = LossWindow(CPU)
    fill(window, 1)
    assert fill(window, 2, steps=3, waits=True) == [(10, 0.1, 1.0), (20, 0.2, 2.0)]
    assert window.pop_loss_since_checkpoint() == pytest.approx((10 * 1.0 + 3 * 2.0) / 13)


def test_losses_are_averaged_over_processes_and_without_skipped_steps(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda losses: losses.mul_(3))  # the other has twice
    window = LossWindow(CPU)
    for loss, norm in ((2.0, 1.0), (4.0, math.inf), (4.0, math.inf), (6.0, 3.0)):
        window.add(torch.tensor(loss), torch.tensor(norm))
    (closed,) = window.close(4, 0.1, PhaseClock(), waits=True)
    assert [closed.numbers[key] for key in ("train_loss", "train_loss_max", "grad_norm")] == [
        6.0, 9.0, 2.0]
    assert closed.numbers["skipped_steps"] == window.longest_skipped == 2


def test_consecutive_skipped_steps_are_counted_across_reports():
    window, found = LossWindow(CPU), []
    for group in ("1100", "0000", "0001", "1111", "0010"):  # 1 is a good step
        for step in group:
            window.add(torch.tensor(1.0), torch.tensor(1.0 if step == "1" else math.inf))
        window.close(0, 1e-3, PhaseClock(), waits=False)
        found.append(window.longest_skipped)
    assert found == [2, 6, 9, 0, 2]


def test_speed_and_slowest_step_are_those_of_the_windows_own_steps(late, monkeypatch):
    """Whenever a window is read, and whatever is done between two windows."""
    now, window = FakeTime(), LossWindow(CPU)
    monkeypatch.setattr(tensors.time, "perf_counter", now)
    found = []

    def train(last_step, *seconds, waits=True):
        for each in seconds:
            now.seconds += each
            window.add(torch.tensor(1.0), torch.tensor(math.nan))  # skipped steps count too
        for closed in window.close(last_step, 0.1, PhaseClock(), waits=waits):
            found.append((closed.steps_per_second, closed.numbers["slowest_step"],
                          closed.numbers["slowest_step_seconds"]))

    now.seconds += 100  # it compiles
    window.add(torch.tensor(1.0), torch.tensor(1.0))
    window.restart_timing()
    train(4, 0.5, 0.5, 0.25, 0.75, waits=False)
    train(8, 0.25, 0.25, 0.25, 0.25, waits=False)
    train(10, 0.125, 0.125)
    now.seconds += 1000  # a checkpoint and a validation
    window.restart_timing()
    train(13, 1.0, 29.0, 2.0)
    assert found == [(2.0, 4, 0.75), (4.0, 8, 0.25), (8.0, 10, 0.125), (3 / 32, 12, 29.0)]


@pytest.mark.gpu
def test_closing_and_reading_windows_never_waits_for_the_device():
    device = torch.device("cuda", 0)
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    window = LossWindow(device)
    value = torch.tensor(3.0, device=device)
    fill(window, 1, waits=True)  # NCCL starts
    torch.cuda._sleep(10**9)  # some tenths of a second
    window.add(value, value)
    assert window.close(2, 0.1, PhaseClock(), waits=False) == []
    ((_, values, _, ended),) = window._closed
    assert not ended._event.query() and values.is_pinned()  # the device is still asleep
    window.add(value, value)
    _, last = window.close(3, 0.1, PhaseClock(), waits=True)
    assert last.numbers["train_loss"] == 3.0 and last.steps_per_second > 0
