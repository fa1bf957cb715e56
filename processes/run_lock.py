"""One launch at a time trains a run: its lock and its heartbeat file. Needs no torch.

The kernel releases a lock when the process that holds it ends, however it ends. A launch takes an
exclusive lock on the run directory and then shares it with rank 0, its child. Rank 0 keeps the lock
until it ends: after a kill of torchrun, rank 0 may still save for some seconds. So another
launch waits for a while, unless the process with the heartbeat and its parent both run here. If
the file system has no locks, or separate ones for each machine, a launch is also refused while the
heartbeat of another process changes; two launches that start at the same time are then not noticed.
"""

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from basics.errors import UserError, print_line, status_of_place
from basics.files import UNSUPPORTED, lock_directory, share_lock, write_atomically
from basics.json_files import found_object, to_json
from processes.signals import Deadlines

HEARTBEAT = "heartbeat.json"
POLL_SECONDS = 0.1  # between two tries to lock
TOLD_AFTER_SECONDS = 0.5  # a process that has just been killed keeps its files for a moment
MISSED = 3  # heartbeats that a living process may miss
RECENT_SECONDS = 120.0  # an older heartbeat is that of a process that was killed
MAX_SECONDS = 1e12
LAUNCH = "DDP_TRAIN_LAUNCH"  # environment variable: the process that has locked the run
_locks: list[int] = []


class LockedError(UserError):
    """The run directory is locked by another process, or cannot be written to."""


def lock_run(run_dir: Path) -> None:
    """Lock a run directory until `release_run` or the end of this process, however it ends.

    Called before anything is written there, by rank 0 and by the process that becomes torchrun.
    Commands that only read need no lock. Raises: LockedError.
    """
    has_lock, is_child = True, os.environ.get(LAUNCH) == str(os.getppid())
    try:
        # Found out here, not by the first checkpoint after an hour.
        for path in (run_dir, run_dir / "checkpoints"):
            if os.path.lexists(path) and not path.is_dir():  # such as a link to a disk that is gone
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
                number = errno.EROFS if is_read_only else errno.EACCES
                raise OSError(number, os.strerror(number), str(path))
        _wait_for_lock(run_dir, is_child=is_child)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise LockedError(
                f"{error.filename or run_dir}: cannot be written to ({error.strerror}); a run"
                " writes its checkpoints and charts there",
                status_of_place(error),
            ) from None
        has_lock = False
        print_line(
            f"warning: {run_dir}: its file system has no locks; only the heartbeat tells"
            " whether another launch trains this run"
        )
    if not is_child:  # else its parent has watched it
        _watch_heartbeat(run_dir, has_lock=has_lock)
    os.environ[LAUNCH] = str(os.getpid())


def _wait_for_lock(run_dir: Path, *, is_child: bool) -> None:
    """Take the lock; wait for as long as processes without torchrun may save."""
    began, has_told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            # Made shared, so that rank 0 can take it too. If another launch takes it in between,
            # that launch has the run.
            _locks.append(share_lock(lock_directory(run_dir, is_shared=is_child)))
            return
        # Processes that have lost their torchrun still save before they end: that is waited for.
        waited, beat = time.monotonic() - began, read_heartbeat(run_dir)
        is_healthy = _is_running_here(beat, "pid") and _is_running_here(beat, "parent")
        if waited > Deadlines.read().orphans or is_healthy:
            raise _locked(run_dir, beat)
        if waited > TOLD_AFTER_SECONDS and not has_told:
            has_told = True
            print_line(f"{run_dir}: waiting for another launch to end{_name(beat)}")
        time.sleep(POLL_SECONDS)


def _watch_heartbeat(run_dir: Path, *, has_lock: bool) -> None:
    """Refuse a run whose heartbeat changes within the time of a few.

    For processes of this machine the lock is enough. Some mounts, such as those of object stores,
    lock files for each machine separately: there the lock says nothing about other machines.
    """
    if not (first := read_heartbeat(run_dir)):
        return
    with suppress(OSError):
        age = abs(time.time() - (run_dir / HEARTBEAT).stat().st_mtime)
        if has_lock and (first["host"] == socket.gethostname() or age > RECENT_SECONDS):
            return
    seconds = MISSED * Deadlines.read().heartbeat
    print_line(
        f"{run_dir}: waiting {seconds:g} s whether the heartbeat of process {first['pid']}"
        f" on {first['host']} goes on"
    )
    time.sleep(seconds)
    if (beat := read_heartbeat(run_dir)) not in ({}, first):
        release_run()
        raise _locked(run_dir, beat)


def _locked(run_dir: Path, beat: dict[str, Any]) -> LockedError:
    return LockedError(
        f"{run_dir}: another launch is training this run{_name(beat)}; stop it, or wait for its end"
    )


def _name(beat: dict[str, Any]) -> str:
    if beat and (beat["host"] != socket.gethostname() or _is_running_here(beat, "pid")):
        return f": process {beat['pid']} on {beat['host']}, last heartbeat {beat['time']}"
    return " (without a heartbeat: it begins or ends)"


def _is_running_here(beat: dict[str, Any], key: str) -> bool:
    if beat.get("host") == socket.gethostname() and type(beat.get(key)) is int:
        with suppress(ValueError, OverflowError, psutil.Error):
            # A zombie has ended, and nobody has asked for its status yet.
            return psutil.Process(beat[key]).status() != psutil.STATUS_ZOMBIE
    return False


def release_run() -> None:
    while _locks:
        os.close(_locks.pop())
    if os.environ.get(LAUNCH) == str(os.getpid()):
        del os.environ[LAUNCH]


def trained_by(run_dir: Path) -> int | None:
    """Return the process of this machine that trains a run, by its heartbeat; None without one."""
    beat = read_heartbeat(run_dir)
    return beat["pid"] if _is_running_here(beat, "pid") else None


def write_heartbeat(
    path: Path, *, phase: str, step: int | None, seconds: float, parent: int
) -> None:
    """Show that the run makes progress, to people and to other launches.

    Args:
        seconds: of all launches until now.
        parent: the torchrun of this process; one that loses it ends soon.
    """
    write_atomically(
        path,
        to_json(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "phase": phase,
                "global_step": step,
                "seconds": round(seconds, 3),
                "pid": os.getpid(),
                "parent": parent,
                "host": socket.gethostname(),
            }
        )
        + "\n",
    )


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """Return the last heartbeat; empty if there is none that can be read."""
    beat = found_object(run_dir / HEARTBEAT)
    return beat if all(type(beat.get(key)) in (str, int) for key in ("pid", "host", "time")) else {}


def seconds_before(run_dir: Path) -> float:
    """Return what all launches had taken when the last one was killed; 0 if none was."""
    seconds = read_heartbeat(run_dir).get("seconds")
    is_number = isinstance(seconds, int | float) and 0 <= seconds <= MAX_SECONDS
    return float(seconds) if is_number else 0.0  # type: ignore[arg-type]
