"""Stop signals, for a thread that waits for them.

Python's handlers run in the main thread, and wait there for the end of what it does in C++.
"""

from __future__ import annotations

import select
import signal
import socket

from basics.errors import STOP_SIGNALS


def stop_signals() -> list[int]:
    """Return the stop signals that this process handles: under nohup it ignores SIGHUP."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def torchrun_signals() -> str:
    """Return torchrun's option with the signals that it passes on; others would only end it."""
    return f"--signals-to-handle={','.join(STOP_SIGNALS[n] for n in stop_signals())},SIGQUIT"


class StopSignals:
    """Collects stop signals in a socket until `release`. Create it in the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in stop_signals():
            signal.signal(number, lambda *_: None)  # their numbers are in the socket

    def wait(self, timeout_seconds: float) -> list[int]:
        """Return the numbers of received signals, also of others with a handler; none in time."""
        ready, _, _ = select.select([self._reader], [], [], timeout_seconds)
        return [number for number in self._reader.recv(64) if number] if ready else []

    def wake(self) -> None:
        """Let the thread that waits go on at once. Any thread."""
        self._writer.send(b"\0")

    def release(self) -> None:
        """Let stop signals end this process again. Call it in the main thread."""
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
