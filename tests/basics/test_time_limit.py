"""Work that is left where it makes no progress."""

from __future__ import annotations

import threading

import pytest

from basics import time_limit
from basics.time_limit import within


def test_the_result_and_the_error_are_those_of_the_work() -> None:
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError, match="x"):
        within(60, lambda: {}["x"])


def test_work_without_an_end_is_left() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, lambda: released.wait(60))
    released.set()


def test_work_that_makes_progress_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "POLL_SECONDS", 0.01)
    released, looks = threading.Event(), []

    def progress() -> int:
        looks.append(0)
        if len(looks) > 20:
            released.set()
        return len(looks)

    assert within(0.0, lambda: released.wait(60), progress=progress)
