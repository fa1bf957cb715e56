"""Work that may never end."""

import threading

import pytest

from basics.time_limit import within


def test_work_in_time_returns_its_result_or_raises_its_error():
    assert within(60.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)


def test_work_that_does_not_end_is_left_alone():
    never = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, never.wait)
    never.set()
