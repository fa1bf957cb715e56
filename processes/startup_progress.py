"""Lines that say what a launch is doing, until its first step is taken."""

import threading
from collections.abc import Callable

from basics.errors import print_line

FIRST_SECONDS, MOST_SECONDS = 10.0, 120.0  # between two lines: they become rarer


class StartupProgress:
    """Prints now and then, by a thread, what a launch is doing, until it is closed.

    The thread calls `doing`, `seconds` (since the launch began) and `say`. A launch has two: in the
    command that starts torchrun, and on rank 0.
    """

    def __init__(
        self, run: str, doing: Callable[[], str], seconds: Callable[[], float], *, is_active: bool
    ) -> None:
        self.run, self.doing, self.seconds = run, doing, seconds
        self.say = print_line
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._print, name="progress", daemon=True)
        if is_active:
            self._thread.start()

    def _print(self) -> None:
        interval = FIRST_SECONDS
        while not self._closed.wait(interval):
            self.say(f"{self.run}: {self.doing()}, {self.seconds():.0f} s since the start")
            interval = min(MOST_SECONDS, 1.5 * interval)

    def close(self) -> None:
        """End the lines; hold on to nothing, such as the log of a trainer with its model."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self.say = print_line
