"""Work that may never end, such as a request to a server that sends a byte now and then."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result.

    Raises:
        TimeoutError: it has not ended in time; its thread stays until it ends, or the process does.
        Exception: what `work` raises.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="time limit", daemon=True).start()
    return future.result(timeout=seconds)
