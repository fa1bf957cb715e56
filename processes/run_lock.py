"""The lock on a run directory: one launch at a time trains a run. Needs no torch.

The kernel ties a lock to an open file, and releases it when the process that has it open ends,
however it ends. Two files of a run are locked:

- the run directory, by the process that writes there: rank 0, and before it the process that
  becomes torchrun, while it prepares the run. After a kill of torchrun, rank 0 may still save for
  some seconds, so a launch waits for this lock. The processes of a run end with their torchrun: the
  kernel sends them SIGTERM, and one that starts after its torchrun's end exits by itself;
- `train.json`, by the process that becomes torchrun, until its end: so a second launch is refused
  at once, and nobody takes the run between its preparation and rank 0's start. Rank 0 under a
  torchrun of the user's own only looks whether it is locked.

Where the file system has no locks, or each machine its own, `processes/heartbeat.py` decides.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from basics.directory_lock import LOCK_NAME, NoLocksError, lock_directory
from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError, print_line
from basics.failpoints import failpoint
from processes.deadlines import Deadlines
from processes.heartbeat import claim, read_heartbeat, trained_elsewhere

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
ASK_SECONDS = 2.0  # for torchrun's store to answer
POLL_SECONDS = 0.1  # between two tries to lock
TOLD_AFTER_SECONDS = 0.5  # a process that has just been killed keeps its files for a moment
LAUNCH = "DDP_TRAIN_LAUNCH"  # environment variable: the process that has locked `train.json`
_of_launch: list[int] = []  # `train.json`, locked by the process that becomes torchrun
_of_writer: list[int] = []  # the run directory, locked by the process that writes there


class LockedError(UserError):
    """The run directory is locked by another process, or cannot be written to."""


def end_with_parent(parent: int | None = None) -> None:
    """Have the system send SIGTERM to this process when its parent dies. Linux only.

    Args:
        parent: its process id, if known from before: where it is gone, the signal comes now.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def end_with_torchrun() -> None:
    """End this process, which torchrun has started, when torchrun dies, or if it is dead already.

    One that asks only after torchrun's death gets no signal, and its new parent tells nothing: in a
    container torchrun itself may have the id 1.
    """
    failpoint("worker")
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    # torchrun holds its store's socket to its end.
    with suppress(OSError, LookupError, ValueError, OverflowError):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, timeout=ASK_SECONDS).close()
        except ConnectionRefusedError:
            sys.exit(128 + signal.SIGTERM)


def lock_run(run_dir: Path) -> None:
    """Lock a run directory until `release_run` or the end of this process, however it ends.

    Called before anything is written there, by rank 0 and by the process that becomes torchrun.
    Commands that only read need no lock. It waits for the processes of a launch whose torchrun is
    gone: they are about to end.

    Raises:
        LockedError: another launch trains the run, or the directory cannot be written to.
    """
    try:
        for path in (run_dir, run_dir / "checkpoints"):
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if os.environ.get(LAUNCH) != str(os.getppid()):
            _lock_launch(run_dir)
        try:
            _of_writer.append(_wait_for_lock(run_dir))
            beat = trained_elsewhere(run_dir)
        except NoLocksError:
            beat = claim(run_dir)
        if beat:
            raise _locked(run_dir, beat)
    except LockedError:
        release_run()
        raise
    except OSError as error:
        release_run()
        raise LockedError(f"{error.filename or run_dir}: cannot be written to ({error.strerror});"
                          " a run writes its checkpoints and charts there",
                          FAILED if error.errno in TRANSIENT else BAD_INPUT) from None


def _lock_launch(run_dir: Path) -> None:
    """Lock `train.json`, where the file system can. Raises: LockedError."""
    with suppress(OSError):
        path = run_dir / "train.json"  # NFS locks only files that are open for writing
        flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        _of_launch.append(os.open(path, flags))
        try:
            fcntl.flock(_of_launch[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(run_dir, read_heartbeat(run_dir)) from None
    if "RANK" in os.environ:  # a process that has lost its torchrun must not refuse a launch
        while _of_launch:
            os.close(_of_launch.pop())


def _wait_for_lock(run_dir: Path) -> int:
    """Return the open file with the lock on the run directory. Raises: LockedError, OSError."""
    began, has_told = time.monotonic(), False
    while True:
        try:
            return lock_directory(run_dir)
        except BlockingIOError:
            waited, beat = time.monotonic() - began, read_heartbeat(run_dir)
        if waited > Deadlines.read().orphans:
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
    with suppress(TypeError, OverflowError):
        if beat and (beat["host"] != socket.gethostname() or psutil.pid_exists(beat["pid"])):
            return f": process {beat['pid']} on {beat['host']}, last heartbeat {beat['time']}"
    return ", which has just begun"


def hand_over() -> None:
    """Leave the lock on the run directory to rank 0, which torchrun starts now."""
    os.environ[LAUNCH] = str(os.getpid())
    while _of_writer:
        os.close(_of_writer.pop())


def release_run() -> None:
    """Release the locks of this process, if it holds any."""
    for descriptors in (_of_writer, _of_launch):
        while descriptors:
            os.close(descriptors.pop())


def trained_by(run_dir: Path) -> int | None:
    """Return a process of this machine that holds a run's lock; None without one, or not known."""
    with suppress(OSError):
        found = [path.stat() for path in (run_dir / "train.json", run_dir, run_dir / LOCK_NAME)
                 if path.exists()]
        places = {f"{os.major(each.st_dev):02x}:{os.minor(each.st_dev):02x}:{each.st_ino}"
                  for each in found}
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, place, _, _ = line.split()
            if kind == "FLOCK" and place in places:
                return int(pid)
    return None
