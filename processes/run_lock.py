"""One launch at a time trains a run: its lock and its heartbeat file. Needs no torch.

The kernel releases a lock when the process that has the locked directory open ends, however it
ends. A launch takes an exclusive lock on the run directory and turns it into a shared one, which
rank 0, its child, takes too and keeps to its own end: after a kill of torchrun it may still save
for some seconds. So a launch waits where the parent of the process with the heartbeat is gone, or
nothing is known of it yet.

The heartbeat file says what all launches have taken until then, so that the next one counts the
time of one that was killed. Where the file system has no locks, or each machine its own, a launch
is also refused while the heartbeat of another process changes. That does not hold two launches that
begin in the same moment, or see each other's files late: so a line says that there is no lock.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError, print_line
from basics.files import NoLocksError, lock_directory, write_atomically
from basics.json_files import found_object, to_json
from basics.machine import seconds_since_process_start
from processes.signals import Deadlines

HEARTBEAT, SUMMARY = "heartbeat.json", "summary.json"
POLL_SECONDS = 0.1  # between two tries to lock, and two looks at a heartbeat
TOLD_AFTER_SECONDS = 0.5  # a process that has just been killed keeps its files for a moment
MISSED = 3  # heartbeats that a living process may miss
STARTUP_SECONDS = 1.0  # between two heartbeats before the watchdog writes them
COUNTED_SECONDS = 60.0  # a launch that ended by itself before is not counted
RECENT_SECONDS = 120.0  # an older heartbeat is that of a process that was killed
MAX_SECONDS = 1e12
# Environment variables for the processes of a launch: its first process, which holds the lock, and
# the seconds of all launches before it.
LAUNCH, EARLIER = "DDP_TRAIN_LAUNCH", "DDP_TRAIN_EARLIER_SECONDS"
_locks: list[int] = []
_parent = 0  # of this process when it asked for the lock; a process that loses it ends soon
_seconds: Callable[[], float] = float  # returns those of all launches until now
_beginning: list[_Beginning] = []  # of the launch that this process has begun, if any


class LockedError(UserError):
    """The run directory is locked by another process, or cannot be written to."""


def lock_run(run_dir: Path) -> None:
    """Lock a run directory until `release_run` or the end of this process, however it ends.

    Called before anything is written there, by rank 0 and by the process that becomes torchrun.
    Commands that only read need no lock.

    Raises:
        LockedError: another launch trains the run, or the directory cannot be written to.
    """
    try:
        for path in (run_dir, run_dir / "checkpoints"):
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        try:
            _lock(run_dir)
            beat = _changing_heartbeat(run_dir, is_locked=True)
        except NoLocksError:
            print_line(f"warning: {run_dir}: its file system has no locks; only the heartbeat tells"
                       " whether another launch trains this run")
            beat = _changing_heartbeat(run_dir, is_locked=False)
    except OSError as error:
        raise LockedError(f"{error.filename or run_dir}: cannot be written to ({error.strerror});"
                          " a run writes its checkpoints and charts there",
                          FAILED if error.errno in TRANSIENT else BAD_INPUT) from None
    if beat:
        release_run()
        raise _locked(run_dir, beat)


def _lock(run_dir: Path) -> None:
    """Wait for the lock for as long as processes without torchrun may save."""
    global _parent
    _parent = os.getppid()
    is_child = os.environ.get(LAUNCH) == str(_parent)
    began, has_told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            descriptor = lock_directory(run_dir, is_shared=is_child)
            try:
                # Rank 0 is to have it too. Another launch may come in between: it has the run then.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
            _locks.append(descriptor)
            os.environ[LAUNCH] = str(os.getpid())
            return
        waited, beat = time.monotonic() - began, read_heartbeat(run_dir)
        if waited > Deadlines.read().orphans or _is_healthy(beat):
            raise _locked(run_dir, beat)
        if waited > TOLD_AFTER_SECONDS and not has_told:
            has_told = True
            print_line(f"{run_dir}: waiting for another launch to end{_name(beat)}")
        time.sleep(POLL_SECONDS)


def _locked(run_dir: Path, beat: dict[str, Any]) -> LockedError:
    return LockedError(f"{run_dir}: another launch is training this run{_name(beat)}; stop it, or"
                       " wait for its end")


def _name(beat: dict[str, Any]) -> str:
    """Name the process of a heartbeat, unless it is known to have ended."""
    if beat and (beat["host"] != socket.gethostname() or _is_running(beat["pid"])):
        return f": process {beat['pid']} on {beat['host']}, last heartbeat {beat['time']}"
    return ", which has just begun"


def _is_healthy(beat: dict[str, Any]) -> bool:
    """Return whether a process of this machine and its parent run, so that it will not end soon."""
    return beat.get("host") == socket.gethostname() and (
        _is_running(beat["pid"]) and _is_running(beat.get("parent")))


def _is_running(pid: Any) -> bool:
    if type(pid) is not int:
        return False
    with suppress(TypeError, ValueError, OverflowError, psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def release_run() -> None:
    """Release the lock of this process, if it holds one."""
    while _locks:
        os.close(_locks.pop())
    if os.environ.get(LAUNCH) == str(os.getpid()):
        del os.environ[LAUNCH]


def trained_by(run_dir: Path) -> int | None:
    """Return the process of this machine that trains a run, by its heartbeat; None without one."""
    beat = read_heartbeat(run_dir)
    is_here = beat.get("host") == socket.gethostname() and _is_running(beat["pid"])
    return beat["pid"] if is_here else None


def write_heartbeat(path: Path, *, phase: str, step: int | None) -> dict[str, Any]:
    """Show that the run makes progress, to people and to other launches; return what is written."""
    beat = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "phase": phase,
            "global_step": step, "seconds": round(_seconds(), 3), "pid": os.getpid(),
            "parent": _parent, "host": socket.gethostname()}
    _write(path, beat)
    return beat


def _write(path: Path, beat: dict[str, Any]) -> None:
    write_atomically(path, to_json(beat) + "\n")


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return the last heartbeat; empty if there is none that can be read."""
    beat = found_object(run_dir / HEARTBEAT)
    keys = ("pid", "host", "time")
    return beat if all(type(beat.get(key)) in (str, int) for key in keys) else {}


def _changing_heartbeat(run_dir: Path, *, is_locked: bool) -> dict[str, Any]:
    """Return the heartbeat of another launch if it changes within the time of a few; else empty.

    A lock says enough of this machine's processes. Some mounts, of object stores for one, lock each
    machine's files by themselves: it says nothing of the others.
    """
    first = read_heartbeat(run_dir)
    if not first or _is_ours(first):
        return {}
    with suppress(OSError):
        age = abs(time.time() - (run_dir / HEARTBEAT).stat().st_mtime)
        if is_locked and (first["host"] == socket.gethostname() or age > RECENT_SECONDS):
            return {}
    seconds = MISSED * Deadlines.read().heartbeat
    print_line(f"{run_dir}: waiting {seconds:g} s whether the heartbeat of process {first['pid']}"
               f" on {first['host']} goes on")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (beat := read_heartbeat(run_dir)) and beat != first:  # empty while it is written
            return beat
        time.sleep(POLL_SECONDS)
    return {}


def _is_ours(beat: dict[str, Any]) -> bool:
    """Return whether a heartbeat is of this launch, which the parent of this process prepared."""
    return beat.get("host") == socket.gethostname() and (
        beat.get("pid") in (os.getpid(), os.getppid()))


def announce(run_dir: Path) -> None:
    """Write the heartbeat of a launch from its start on, until rank 0's watchdog does.

    The process that starts torchrun does it for its children, but for those of a restart.
    """
    is_begun = EARLIER in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    is_odd = os.path.lexists(run_dir / HEARTBEAT) and not read_heartbeat(run_dir)  # or damaged
    if not (_beginning or is_begun or is_odd):
        with suppress(OSError):  # a full disk is reported by what needs it more
            os.environ[EARLIER] = str(max(_seconds_in(run_dir / HEARTBEAT),
                                          _seconds_in(run_dir / SUMMARY)))
            count_by(lambda: seconds_before() + seconds_since_process_start())
            _beginning.append(_Beginning(run_dir))
            _beginning[0].start()
            atexit.register(withdraw)


def count_by(seconds: Callable[[], float]) -> None:
    """Have the heartbeats tell the seconds of all launches by the run's clock."""
    global _seconds
    _seconds = seconds


def seconds_before() -> float:
    """Return what earlier launches had taken, by their heartbeat or summary, when this began."""
    return float(os.environ.get(EARLIER, 0.0))


def _seconds_in(path: Path) -> float:
    """Return the seconds that a heartbeat or a summary tells; 0 if it cannot be read."""
    try:
        seconds = found_object(path)["seconds"]
        total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        return float(total) if 0 <= total <= MAX_SECONDS else 0.0
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0.0


def withdraw() -> None:
    """Take this process's heartbeat back, unless the launch has taken long enough to be counted.

    A launch that ends within a minute, before it trains, leaves nothing behind.
    """
    while _beginning:
        _beginning.pop().end()
    os.environ.pop(EARLIER, None)


class _Beginning(threading.Thread):
    """Renews the heartbeat until rank 0's watchdog, here or in a child, writes it."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._run_dir, self._is_over, self._began = run_dir, threading.Event(), time.monotonic()
        self._before, self._own = read_heartbeat(run_dir), self._beat()

    def run(self) -> None:
        while not self._is_over.wait(min(STARTUP_SECONDS, Deadlines.read().heartbeat)):
            if read_heartbeat(self._run_dir) != self._own:
                return
            with suppress(OSError):
                self._own = self._beat()

    def end(self) -> None:
        """Stop, and leave what is right for a launch that ends by itself before it trains."""
        self._is_over.set()
        self.join()
        with suppress(OSError):
            if read_heartbeat(self._run_dir) != self._own:
                return
            if time.monotonic() > self._began + COUNTED_SECONDS:
                self._beat()
            elif self._before:  # it alone may tell what a launch has taken
                _write(self._run_dir / HEARTBEAT, self._before)
            else:
                (self._run_dir / HEARTBEAT).unlink(missing_ok=True)

    def _beat(self) -> dict[str, Any]:
        return write_heartbeat(self._run_dir / HEARTBEAT, phase="startup", step=None)
