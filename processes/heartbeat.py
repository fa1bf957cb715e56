"""The heartbeat file of a run, and the claim on a run whose file system has no locks.

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
from contextlib import suppress
from pathlib import Path
from typing import Any

from basics.errors import print_line
from basics.files import read_regular_file, write_atomically
from basics.json_files import found_object, to_json
from processes.deadlines import Deadlines

HEARTBEAT = "heartbeat.json"
MISSED = 3  # heartbeats that a living process may miss
SETTLING_SECONDS = 1.0  # between a claim and the look whether another launch has made one too
POLL_SECONDS = 0.1
RECENT_SECONDS = 120.0  # an older heartbeat is that of a process that was killed


def write_heartbeat(path: Path, *, phase: str, step: int | None) -> str:
    """Show that the run makes progress, to people and to other launches; return what is written."""
    text = to_json({
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "phase": phase,
        "global_step": step, "pid": os.getpid(), "host": socket.gethostname()}) + "\n"
    write_atomically(path, text)
    return text


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return the last heartbeat; empty if there is none that can be read."""
    beat = found_object(run_dir / HEARTBEAT)
    keys = ("pid", "host", "time")
    return beat if all(type(beat.get(key)) in (str, int) for key in keys) else {}


def claim(run_dir: Path) -> dict[str, Any]:
    """Claim a run whose file system has no locks; return another launch's heartbeat if it has it.

    Raises:
        OSError: the heartbeat cannot be written.
    """
    print_line(f"warning: {run_dir}: its file system has no locks; only the heartbeat tells whether"
               " another launch trains this run")
    if _is_alive(run_dir):
        return read_heartbeat(run_dir)
    own = write_heartbeat(run_dir / HEARTBEAT, phase="startup", step=None)
    time.sleep(SETTLING_SECONDS)
    if _text(run_dir) != own and not _is_ours(beat := read_heartbeat(run_dir)):
        return beat
    threading.Thread(target=_renew, args=(run_dir, own), name="heartbeat", daemon=True).start()
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


def _renew(run_dir: Path, own: str) -> None:
    """Renew the claim until rank 0's watchdog, here or in a child, writes the heartbeats.

    A child may claim the run between the look here and the write: it accepts this heartbeat.
    """
    atexit.register(_withdraw, run_dir)
    while True:
        time.sleep(Deadlines.read().heartbeat)
        if _text(run_dir) != own:
            return
        with suppress(OSError):
            own = write_heartbeat(run_dir / HEARTBEAT, phase="startup", step=None)


def _withdraw(run_dir: Path) -> None:
    """Remove the own heartbeat: a launch that ends before it trains leaves none behind."""
    if read_heartbeat(run_dir).get("pid") == os.getpid():
        (run_dir / HEARTBEAT).unlink(missing_ok=True)


def _text(run_dir: Path) -> str:
    with suppress(OSError):
        return read_regular_file(run_dir / HEARTBEAT)
    return ""
