"""Lines that say what a launch is doing, until its first step is taken."""

import threading
from collections.abc import Callable

from basics.errors import print_line
from basics.machine import seconds_since_process_start

INTERVAL_SECONDS = 10.0


class StartupProgress:
    """Prints now and then, by a thread, what a launch is doing, until it is closed.

    The thread calls `doing` and `say`. A launch has two: in the command that starts torchrun, and
    on rank 0.
    """

    def __init__(self, run: str, doing: Callable[[], str], *, is_active: bool) -> None:
        self.run, self.doing = run, doing
        self.say = print_line
        self._closed = threading.Event()
        if is_active:
            threading.Thread(target=self._print, daemon=True).start()

    def _print(self) -> None:
        while not self._closed.wait(INTERVAL_SECONDS):
            self.say(f"{self.run}: {self.doing()}, {seconds_since_process_start():.0f} s")

    def close(self) -> None:
        self._closed.set()
