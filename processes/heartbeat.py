"""The heartbeat file of a run, and the claim on a run whose file system has no locks.

A launch writes it from its start on. It says what all launches have taken until then, so that the
next one counts the time of one that was killed.

Without locks the heartbeat decides who trains a run: a launch is refused while the heartbeat of
another process changes. A launch claims the run by its own heartbeat, which a thread renews until
the watchdog of rank 0 does. Two launches that claim within the same second see each other's, since
each reads its own again a moment later. Unlike a lock this does not hold a process that is stopped
for longer than it is waited for, nor two machines that see each other's files late: so a line says
that there is no lock. A lock file made with O_EXCL would need the same heartbeat to tell whether
its process is alive, and could also be left behind.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from basics.errors import print_line
from basics.files import read_regular_file, write_atomically
from basics.json_files import found_object, to_json
from basics.machine import seconds_since_process_start
from processes.deadlines import Deadlines

HEARTBEAT, SUMMARY = "heartbeat.json", "summary.json"
MISSED = 3  # heartbeats that a living process may miss
SETTLING_SECONDS = 1.0  # between a claim and the look whether another launch has made one too
POLL_SECONDS = 0.1
STARTUP_SECONDS = 1.0  # between two heartbeats before the watchdog writes them
COUNTED_SECONDS = 60.0  # a launch that ended by itself before is not counted
RECENT_SECONDS = 120.0  # an older heartbeat is that of a process that was killed
EARLIER = "DDP_TRAIN_EARLIER_SECONDS"  # environment variable, for all processes of a launch
MAX_SECONDS = 1e12
_seconds: Callable[[], float] = float  # returns those of all launches until now
_begun: dict[Path, _Renewal] = {}  # the run whose heartbeat this process has begun, if any


def write_heartbeat(path: Path, *, phase: str, step: int | None) -> str:
    """Show that the run makes progress, to people and to other launches; return what is written."""
    text = to_json({
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "phase": phase,
        "global_step": step, "seconds": round(_seconds(), 3), "pid": os.getpid(),
        "host": socket.gethostname()}) + "\n"
    write_atomically(path, text)
    return text


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return the last heartbeat; empty if there is none that can be read."""
    beat = found_object(run_dir / HEARTBEAT)
    keys = ("pid", "host", "time")
    return beat if all(type(beat.get(key)) in (str, int) for key in keys) else {}


def announce(run_dir: Path) -> None:
    """Write the heartbeat of a launch from its start on, until rank 0's watchdog does."""
    is_odd = os.path.lexists(run_dir / HEARTBEAT) and not _text(run_dir)  # refused later
    if run_dir not in _begun and not _is_begun() and not is_odd:
        with suppress(OSError):  # a full disk is reported by what needs it more
            _begin(run_dir).start()


def count_by(seconds: Callable[[], float]) -> None:
    """Have the heartbeats tell the seconds of all launches by the run's clock."""
    global _seconds
    _seconds = seconds


def seconds_before() -> float:
    """Return what earlier launches had taken, by their heartbeat or summary, when this began."""
    return float(os.environ.get(EARLIER, 0.0))


def withdraw() -> None:
    """Remove this process's heartbeat, unless it alone tells what launches have taken.

    A launch that ends within a minute, before it trains, leaves nothing behind.
    """
    while _begun:
        run_dir, renewal = _begun.popitem()
        renewal.stop()
        if read_heartbeat(run_dir).get("pid") != os.getpid():
            continue
        if renewal.is_long or seconds_before() > _seconds_in(run_dir / SUMMARY):
            with suppress(OSError):
                renewal.write()
        else:
            (run_dir / HEARTBEAT).unlink(missing_ok=True)
    os.environ.pop(EARLIER, None)


def claim(run_dir: Path) -> dict[str, Any]:
    """Claim a run whose file system has no locks; return another launch's heartbeat if it has it.

    Raises:
        OSError: the heartbeat cannot be written.
    """
    print_line(f"warning: {run_dir}: its file system has no locks; only the heartbeat tells whether"
               " another launch trains this run")
    if _is_alive(run_dir):
        return read_heartbeat(run_dir)
    renewal = _begin(run_dir)
    time.sleep(SETTLING_SECONDS)
    if _text(run_dir) != renewal.own and not _is_ours(beat := read_heartbeat(run_dir)):
        return beat
    renewal.start()
    return {}


def _is_alive(run_dir: Path) -> bool:
    """Return whether a heartbeat of another launch changes within the time of a few."""
    first, beat = _text(run_dir), read_heartbeat(run_dir)
    if not beat or _is_ours(beat):
        return False
    seconds = MISSED * Deadlines.read().heartbeat
    print_line(f"{run_dir}: waiting {seconds:g} s whether the heartbeat of process {beat['pid']} on"
               f" {beat['host']} goes on")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (text := _text(run_dir)) and text != first:  # empty while it is written in place
            return True
        time.sleep(POLL_SECONDS)
    return False


def trained_elsewhere(run_dir: Path) -> dict[str, Any]:
    """Return the heartbeat of another machine that trains a run; empty if none does.

    Some mounts, of object stores for one, lock each machine's files by themselves: a lock that this
    machine has got says nothing of the others.
    """
    beat = read_heartbeat(run_dir)
    if not beat or beat["host"] == socket.gethostname() or not _is_recent(run_dir):
        return {}
    return read_heartbeat(run_dir) if _is_alive(run_dir) else {}


def _is_recent(run_dir: Path) -> bool:
    with suppress(OSError):
        return abs(time.time() - (run_dir / HEARTBEAT).stat().st_mtime) < RECENT_SECONDS
    return False


def _is_ours(beat: dict[str, Any]) -> bool:
    """Return whether a heartbeat is of this launch, which the parent of this process prepared."""
    return beat.get("host") == socket.gethostname() and (
        beat.get("pid") in (os.getpid(), os.getppid()))


def _is_begun() -> bool:
    """Return whether the process that started torchrun has begun this launch."""
    return EARLIER in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _begin(run_dir: Path) -> _Renewal:
    """Write the first heartbeat, after reading what the one before tells. Raises: OSError."""
    if not _is_begun():
        os.environ[EARLIER] = str(max(_seconds_in(run_dir / HEARTBEAT),
                                      _seconds_in(run_dir / SUMMARY)))
    count_by(lambda: seconds_before() + seconds_since_process_start())
    _begun[run_dir] = _Renewal(run_dir)
    atexit.register(withdraw)
    return _begun[run_dir]


def _seconds_in(path: Path) -> float:
    """Return the seconds that a heartbeat or a summary tells; 0 if it cannot be read."""
    try:
        seconds = found_object(path)["seconds"]
        total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        return float(total) if 0 <= total <= MAX_SECONDS else 0.0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0.0


class _Renewal(threading.Thread):
    """Renews the heartbeat until rank 0's watchdog, here or in a child, writes it.

    A child may claim the run between the look here and the write: it accepts this heartbeat.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._run_dir, self._is_over = run_dir, threading.Event()
        self._began, self.own = time.monotonic(), self.write()

    def run(self) -> None:
        while not self._is_over.wait(min(STARTUP_SECONDS, Deadlines.read().heartbeat)):
            if _text(self._run_dir) != self.own:
                return
            with suppress(OSError):
                self.own = self.write()

    @property
    def is_long(self) -> bool:
        """Whether this launch has taken so long that its time is to be counted."""
        return time.monotonic() > self._began + COUNTED_SECONDS

    def stop(self) -> None:
        self._is_over.set()
        if self.is_alive():
            self.join()

    def write(self) -> str:
        return write_heartbeat(self._run_dir / HEARTBEAT, phase="startup", step=None)


def _text(run_dir: Path) -> str:
    with suppress(OSError):
        return read_regular_file(run_dir / HEARTBEAT)
    return ""
