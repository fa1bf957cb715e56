"""Work on a place that may never answer, such as a network file system whose server is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

POLL_SECONDS = 0.5  # between two looks at the progress
T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], *,
           progress: Callable[[], Any] = lambda: None) -> T:
    """Run `work` in a thread and return its result; leave it if it makes no progress.

    Args:
        seconds: for all of it, counted again whenever `progress` returns another value.

    Raises:
        TimeoutError: it has not ended; its thread stays until the process ends.
        Exception: what `work` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="time limit", daemon=True)
    thread.start()
    seen, deadline = progress(), time.monotonic() + seconds
    while thread.is_alive():
        thread.join(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        if (now := progress()) != seen:
            seen, deadline = now, time.monotonic() + seconds
        elif thread.is_alive() and time.monotonic() >= deadline:
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]
