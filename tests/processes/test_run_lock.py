"""The lock of a run, the heartbeat where there are no locks, the time of killed launches."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from basics.directory_lock import lock_directory
from processes import run_lock
from processes.run_lock import (
    HEARTBEAT,
    LockedError,
    announce,
    lock_run,
    read_heartbeat,
    release_run,
    seconds_before,
    trained_by,
    withdraw,
)
from processes.signals import Deadlines
from tests.support import odd_files
from tests.support.runs import with_deadlines
from tests.support.workplace import PROJECT_DIR

# Locks a run, and goes on after its parent's end; the words after the directory are functions.
LOCKS = """
import sys, time
from pathlib import Path
from processes import run_lock
run_lock.lock_run(Path(sys.argv[1]))
for name in sys.argv[2:]:
    getattr(run_lock, name)(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(3600)
"""
REPLACE = os.replace


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("RANK", run_lock.LAUNCH, run_lock.EARLIER):
        monkeypatch.delenv(name, raising=False)
    for name, value in with_deadlines(heartbeat=0.2, orphans=60).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_lock, "SETTLING_SECONDS", 0.3)
    monkeypatch.setattr(run_lock, "STARTUP_SECONDS", 0.05)
    yield tmp_path
    withdraw()
    release_run()


@pytest.fixture
def without_locks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory where nothing can be locked."""
    for patch in odd_files.patches(run_dir):
        monkeypatch.setattr(*patch)
    return run_dir


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its child too
        process.communicate()


def start(started: list[subprocess.Popen[str]], run_dir: Path, *functions: str,
          shell: str = "") -> subprocess.Popen[str]:
    """Start a launch in a process group of its own, and wait until it has the lock."""
    command = [sys.executable, "-c", LOCKS, str(run_dir), *functions]
    process = subprocess.Popen(["sh", "-c", shell, *command] if shell else command,
                               cwd=PROJECT_DIR, stdout=subprocess.PIPE, text=True, process_group=0)
    started.append(process)
    assert process.stdout.readline() == "locked\n"
    return process


def beat(run_dir: Path, number: int, **facts: object) -> None:
    partial = run_dir / "partial"
    partial.write_text(json.dumps(
        {"pid": 7, "host": "elsewhere", "time": f"at {number}"} | facts))
    REPLACE(partial, run_dir / HEARTBEAT)


@contextmanager
def beating(run_dir: Path, **facts: object) -> Iterator[None]:
    """Renew the heartbeat of another process."""
    beat(run_dir, 0, **facts)
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            beat(run_dir, number, **facts)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_launch_waits_until_the_processes_of_an_earlier_one_have_ended(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torchrun was killed: rank 0, which may still save, holds the lock to its end."""
    said: list[str] = []
    orphan = start(started, run_dir, "announce", shell='"$0" "$@" & wait')
    rank_0 = read_heartbeat(run_dir)["pid"]
    orphan.kill()
    orphan.wait()

    def tell(line: str) -> None:
        said.append(line)
        os.kill(rank_0, signal.SIGKILL)

    monkeypatch.setattr(run_lock, "print_line", tell)
    lock_run(run_dir)
    assert len(said) == 1 and said[0].startswith(
        f"{run_dir}: waiting for another launch to end: process {rank_0} on ")


def test_a_launch_that_has_waited_in_vain_is_refused(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_0 = start(started, run_dir)
    assert Deadlines().orphans == 30  # seconds, if nobody asks for others
    for name, value in with_deadlines(orphans=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockedError, match="another launch is training this run, which has just"):
        lock_run(run_dir)
    rank_0.kill()
    rank_0.wait()
    lock_run(run_dir)


def test_a_healthy_launch_is_not_waited_for(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, its child, shares its lock, and keeps it after the launch's end."""
    launch = start(started, run_dir, "announce")
    assert trained_by(run_dir) == launch.pid
    with pytest.raises(LockedError, match=f"another launch .*: process {launch.pid} on .*; stop"):
        lock_run(run_dir)
    with pytest.raises(BlockingIOError):
        lock_directory(run_dir)
    monkeypatch.setenv(run_lock.LAUNCH, str(os.getppid()))  # as its child
    lock_run(run_dir)
    launch.kill()
    launch.wait()
    assert trained_by(run_dir) is None
    with pytest.raises(BlockingIOError):
        lock_directory(run_dir)
    release_run()
    monkeypatch.delenv(run_lock.LAUNCH, raising=False)
    lock_run(run_dir)


@pytest.mark.parametrize(("number", "status"), [(errno.ESTALE, 1), (errno.EACCES, 2)])
def test_a_run_directory_that_is_out_of_reach_may_be_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock, "lock_directory", refuse)
    with pytest.raises(LockedError, match=os.strerror(number)) as caught:
        run_lock.lock_run(run_dir)
    assert caught.value.status == status


@pytest.mark.parametrize("has_locks", [False, True])
def test_a_launch_is_refused_while_the_heartbeat_of_another_one_changes(
    run_dir: Path, has_locks: bool, request: pytest.FixtureRequest
) -> None:
    """Where nothing can be locked, and on a mount whose locks are only this machine's."""
    if not has_locks:
        request.getfixturevalue("without_locks")
    with beating(run_dir), pytest.raises(
            LockedError, match="another launch is training this run: process 7 on elsewhere"):
        lock_run(run_dir)
    lock_run(run_dir)  # that heartbeat stays as it is now


def test_a_heartbeat_that_stays_is_that_of_a_dead_process(
    without_locks: Path, capsys: pytest.CaptureFixture
) -> None:
    beat(without_locks, 0)
    lock_run(without_locks)
    assert read_heartbeat(without_locks)["pid"] == os.getpid()
    told = capsys.readouterr().out
    assert "has no locks" in told and "waiting 0.6 s whether the heartbeat of process 7" in told


@pytest.mark.parametrize(("pid", "is_refused"), [
    (7, True), (os.getpid(), False), (os.getppid(), False)], ids=["other", "own", "parent"])
def test_of_two_launches_at_once_one_trains(
    without_locks: Path, monkeypatch: pytest.MonkeyPatch, pid: int, is_refused: bool
) -> None:
    """The other one has found no heartbeat either; this launch's own processes are no other one."""
    genuine = time.sleep

    def settle(seconds: float) -> None:
        if seconds == run_lock.SETTLING_SECONDS:
            beat(without_locks, 1, pid=pid, host=os.uname().nodename)
        genuine(0)

    monkeypatch.setattr(run_lock.time, "sleep", settle)
    if is_refused:
        with pytest.raises(LockedError, match="another launch"):
            lock_run(without_locks)
    else:
        lock_run(without_locks)


def test_a_heartbeat_is_renewed_until_another_process_goes_on(run_dir: Path) -> None:
    def wait_until(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.05)

    announce(run_dir)
    first = (run_dir / HEARTBEAT).read_text()
    wait_until(lambda: (run_dir / HEARTBEAT).read_text() != first)
    beat(run_dir, 0)
    wait_until(lambda: all(thread.name != "heartbeat" for thread in threading.enumerate()))
    withdraw()
    assert read_heartbeat(run_dir)["host"] == "elsewhere"


@pytest.mark.parametrize(("facts", "age"), [({"host": os.uname().nodename}, 0), ({}, 600)])
def test_an_old_heartbeat_and_one_of_this_machine_are_not_waited_for(
    run_dir: Path, facts: dict[str, str], age: float, capsys: pytest.CaptureFixture
) -> None:
    beat(run_dir, 0, **facts)
    os.utime(run_dir / HEARTBEAT, (time.time() - age,) * 2)
    lock_run(run_dir)
    assert capsys.readouterr().out == ""
    with pytest.raises(BlockingIOError):  # it is held
        lock_directory(run_dir)


def begin(run_dir: Path) -> float:
    """Begin a launch after the one before was killed; return what it finds of that."""
    for beginning in run_lock._beginning:
        beginning._is_over.set()
    run_lock._beginning.clear()
    os.environ.pop(run_lock.EARLIER, None)
    announce(run_dir)
    return seconds_before()


def test_a_launch_that_is_killed_while_it_starts_is_counted_by_the_next_one(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text('{"seconds": {"training": 90.5, "lost": 9.5}}')
    assert begin(run_dir) == 100
    first = read_heartbeat(run_dir)["seconds"]
    assert first > 100
    killed = begin(run_dir)
    assert killed >= first
    assert read_heartbeat(run_dir)["seconds"] > killed
    withdraw()
    assert read_heartbeat(run_dir)["seconds"] == killed  # as it was: nothing else tells it


def test_a_launch_that_ends_by_itself_after_a_while_is_counted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "COUNTED_SECONDS", 0.0)
    begin(run_dir)
    first = read_heartbeat(run_dir)["seconds"]
    withdraw()  # as after a download that failed
    assert begin(run_dir) >= first > 0


@pytest.mark.parametrize("seconds", ['"9"', "NaN", "-1", "1e300", "null", "[9]", '{"a": "9"}'])
def test_a_launch_that_ends_by_itself_before_it_trains_leaves_no_heartbeat(
    run_dir: Path, seconds: str
) -> None:
    (run_dir / "summary.json").write_text(f'{{"seconds": {seconds}}}')
    assert begin(run_dir) == 0 and (run_dir / HEARTBEAT).exists()
    withdraw()
    assert not (run_dir / HEARTBEAT).exists() and seconds_before() == 0


def test_the_processes_of_a_launch_keep_the_heartbeat_of_their_parent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(run_dir, 1, seconds=50)
    monkeypatch.setenv(run_lock.EARLIER, "7")
    announce(run_dir)
    assert read_heartbeat(run_dir)["pid"] == 7 and seconds_before() == 7
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # after others of this launch
    announce(run_dir)
    assert read_heartbeat(run_dir)["pid"] == os.getpid() and seconds_before() == 50
