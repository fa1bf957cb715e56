"""The lock on a run directory: one launch at a time trains a run. Needs no torch.

The kernel ties a lock to an open file, and releases it when no process has that file open any more,
however they end. Under torchrun, rank 0 opens and locks the run directory. Without torchrun, the
process that becomes torchrun locks it before it prepares the run, and hands the open file over to
rank 0 through a socket. So

- nobody can take the lock between the two: it is never released;
- a kill of either leaves it with the other. An orphaned rank 0, which may still write, holds it
  until its end, and the processes of a run cannot outlive the lock otherwise: the kernel sends them
  SIGTERM when torchrun dies, and one that had not asked for that yet ends itself;
- a launch that finds only such orphans behind the lock waits for them.

Where the file system has no locks, or each machine its own, `processes/heartbeat.py` decides.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from basics.directory_lock import LOCK_NAME, NoLocksError, is_lock_of, lock_directory
from basics.errors import BAD_INPUT, FAILED, TRANSIENT, UserError, print_line
from basics.failpoints import failpoint
from processes.deadlines import Deadlines
from processes.heartbeat import claim, read_heartbeat, trained_elsewhere

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
HANDOVER = "DDP_TRAIN_LOCK"  # environment variable: the socket that hands the lock over
HANDOVER_SECONDS = 20.0  # rank 0 waits for it; the other end may be busy starting processes
ASK_SECONDS = 2.0  # for torchrun's store to answer
POLL_SECONDS = 0.1  # between two tries to lock
# A process that has just been killed keeps its files, and looks alive, for a moment.
SETTLING_SECONDS = 0.5
_descriptors: list[int] = []  # of the run directory that this process has locked, if any


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
    if torchrun_is_gone(os.environ):
        sys.exit(128 + signal.SIGTERM)


def torchrun_is_gone(environment: Mapping[str, str]) -> bool:
    """Return whether the store of a process's torchrun refuses connections.

    torchrun holds its store's socket to its end. False if it has none, or does not answer.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        socket.create_connection(address, timeout=ASK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, LookupError, ValueError, OverflowError):
        return False
    return False


def lock_run(run_dir: Path) -> None:
    """Lock a run directory until `release_run` or the end of this process, however it ends.

    Rank 0 calls it before anything is written there. Commands that only read need no lock. It waits
    for processes that hold the lock, but have lost their torchrun: they are about to end.

    Raises:
        LockedError: another launch holds the lock, or the directory cannot be written to.
    """
    try:
        for path in (run_dir, run_dir / "checkpoints"):
            if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        descriptor = _take_over(run_dir)
        try:
            _descriptors.append(_lock(run_dir) if descriptor is None else descriptor)
            beat = trained_elsewhere(run_dir) if descriptor is None else {}
        except NoLocksError:
            beat = claim(run_dir)
        if beat:
            release_run()
            raise LockedError(f"{run_dir}: another launch is training this run{_name(beat)}; stop"
                              " it, or wait for its end")
    except OSError as error:
        raise LockedError(f"{error.filename or run_dir}: cannot be written to ({error.strerror});"
                          " a run writes its checkpoints and charts there",
                          FAILED if error.errno in TRANSIENT else BAD_INPUT) from None


def _lock(run_dir: Path) -> int:
    began = last_ending = time.monotonic()
    has_told = False
    while True:
        try:
            return lock_directory(run_dir)
        except BlockingIOError:
            now, holders = time.monotonic(), _holders(run_dir)
        is_ending = bool(holders) and all(map(_is_ending, holders))
        if now > began + Deadlines.read().orphans or (
                not is_ending and now > last_ending + SETTLING_SECONDS):
            raise LockedError(f"{run_dir}: another launch is training this run"
                              f"{_describe(run_dir, holders)}; stop it, or wait for its end")
        if is_ending:  # if it has ended since, the next try to lock succeeds
            last_ending = time.monotonic()
        if is_ending and not has_told:
            has_told = True
            pids = ", ".join(map(str, holders))
            print_line(f"{run_dir}: waiting for process {pids} of an earlier launch to end; its"
                       " torchrun is gone")
        time.sleep(POLL_SECONDS)


@contextmanager
def handing_over() -> Iterator[None]:
    """Hand the lock over to rank 0, a child of this process, which torchrun starts meanwhile.

    The socket has a name without a file, which nothing has to remove after a kill. Its server is a
    thread: torchrun closes all inherited files of the processes that it starts.
    """
    name = f"ddp-train-{uuid.uuid4().hex}"
    server = _listen(name) if _descriptors else None
    if server is None:
        release_run()  # rank 0 takes it, as under a torchrun of the user's own
        yield
        return
    ends = threading.Event()
    threading.Thread(target=_serve, args=(server, ends), name="lock", daemon=True).start()
    os.environ[HANDOVER] = name
    try:
        yield
    finally:
        del os.environ[HANDOVER]
        ends.set()
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread


def _listen(name: str) -> socket.socket | None:
    """Return a socket of that name; None on a system without such sockets."""
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0{name}")
        server.listen()
        return server
    return None


def _serve(server: socket.socket, ends: threading.Event) -> None:
    with server:
        while not ends.is_set():
            try:
                connection, _ = server.accept()
                with connection:
                    peer, _, _ = struct.unpack("3i", connection.getsockopt(
                        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
                    if psutil.Process(peer).ppid() == os.getpid():
                        socket.send_fds(connection, [b"\0"], _descriptors[:1])
            except (OSError, psutil.Error):  # too many open files, or the other end has gone
                time.sleep(POLL_SECONDS)


def _take_over(run_dir: Path) -> int | None:
    """Return the open file with the lock that the parent of this process hands over, if it does."""
    name = os.environ.get(HANDOVER)
    if name is None:
        return None
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # OSError: it has ended
        connection.settimeout(HANDOVER_SECONDS)
        connection.connect(f"\0{name}")
        for found in socket.recv_fds(connection, 1, 1)[1]:
            os.set_inheritable(found, False)
            if is_lock_of(run_dir, found):
                return found
            os.close(found)
    return None


def release_run() -> None:
    """Release the lock of this process, if it holds one."""
    while _descriptors:
        os.close(_descriptors.pop())


def trained_by(run_dir: Path) -> int | None:
    """Return a process of this machine that holds a run's lock; None without one."""
    return next(iter(_holders(run_dir)), None)


def _describe(run_dir: Path, holders: list[int]) -> str:
    """Describe the processes that hold the lock. The heartbeat may be that of a dead process."""
    host = socket.gethostname()
    with suppress(TypeError, OverflowError):
        beat = read_heartbeat(run_dir)
        if beat.get("host") == host:
            is_its_own = beat["pid"] in holders if holders else psutil.pid_exists(beat["pid"])
        else:
            is_its_own = bool(beat) and not holders
        if is_its_own:
            return _name(beat)
    return f": process {holders[0]} on {host}, which has just begun" if holders else (
        ", which has just begun")


def _name(beat: dict[str, Any]) -> str:
    return f": process {beat['pid']} on {beat['host']}, last heartbeat {beat['time']}"


def _holders(run_dir: Path) -> list[int]:
    """Return the processes on this machine that hold the lock, as far as this user may see them.

    /proc/locks names only the process that took the lock, not one that it was handed over to.
    """
    places = {os.path.realpath(path) for path in (run_dir, run_dir / LOCK_NAME)}
    return [pid for pid in psutil.pids() if _holds(pid, places)]


def _holds(pid: int, places: set[str]) -> bool:
    """Return whether a process has one of these places open, and locked."""
    with suppress(OSError):  # it has ended, or belongs to another user
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed since
                if os.readlink(link) in places and (
                        "FLOCK" in Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()):
                    return True
    return False


def _is_ending(pid: int) -> bool:
    """Return whether a process has lost its torchrun, or exits already."""
    try:
        process = psutil.Process(pid)
        return not process.cmdline() or torchrun_is_gone(process.environ()) or (
            _is_replaced(process))
    except psutil.AccessDenied:
        return False
    except psutil.Error:
        return True


def _is_replaced(process: psutil.Process) -> bool:
    """Return whether the torchrun of this process has the address that another process's had.

    With a fixed port (--master-port) an orphan finds a torchrun there, which is not its own.
    """
    keys, environment = ("MASTER_ADDR", "MASTER_PORT"), process.environ()
    have_stores = all(each.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                      for each in (os.environ, environment))
    return have_stores and process.ppid() != os.getppid() and all(
        environment.get(key) == os.environ.get(key) for key in keys)
