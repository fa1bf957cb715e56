"""The claim on a run whose file system has no locks, and the time of launches that were killed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from basics.directory_lock import lock_directory
from processes import heartbeat
from processes.heartbeat import (
    HEARTBEAT,
    announce,
    claim,
    read_heartbeat,
    seconds_before,
    withdraw,
)
from processes.run_lock import LockedError, lock_run, release_run
from tests.support import odd_files
from tests.support.runs import with_deadlines

REPLACE = os.replace


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory where nothing can be locked."""
    for patch in odd_files.patches(tmp_path):
        monkeypatch.setattr(*patch)
    for name, value in with_deadlines(heartbeat=0.2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat, "SETTLING_SECONDS", 0.3)
    yield tmp_path
    withdraw()


def wait_for_the_end_of_the_claim() -> None:
    until = time.monotonic() + 30
    while any(thread.name == "heartbeat" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


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


def test_a_launch_is_refused_while_the_heartbeat_of_another_one_changes(run_dir: Path) -> None:
    with beating(run_dir), pytest.raises(
            LockedError, match="another launch is training this run: process 7 on elsewhere"):
        lock_run(run_dir)


def test_a_heartbeat_that_stays_is_that_of_a_dead_process(
    run_dir: Path, capsys: pytest.CaptureFixture
) -> None:
    beat(run_dir, 0)
    lock_run(run_dir)
    assert read_heartbeat(run_dir)["pid"] == os.getpid()
    told = capsys.readouterr().out
    assert "has no locks" in told and "waiting 0.6 s whether the heartbeat of process 7" in told


@pytest.mark.parametrize("pid", [os.getpid, os.getppid])
def test_the_process_that_prepared_the_launch_is_not_another_one(run_dir: Path, pid) -> None:
    with beating(run_dir, pid=pid(), host=os.uname().nodename):
        assert not heartbeat._is_alive(run_dir)


def settled(monkeypatch: pytest.MonkeyPatch, run_dir: Path, **facts: object) -> dict:
    """Claim a run whose heartbeat is renewed before the claim has settled; return the other's."""
    genuine = time.sleep

    def settle(seconds: float) -> None:
        if seconds == heartbeat.SETTLING_SECONDS:
            beat(run_dir, 1, **facts)
        genuine(0)

    monkeypatch.setattr(heartbeat.time, "sleep", settle)
    return claim(run_dir)


def test_of_two_launches_at_once_one_trains(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has found no heartbeat either."""
    assert settled(monkeypatch, run_dir)["host"] == "elsewhere"


@pytest.mark.parametrize("pid", [os.getpid, os.getppid])
def test_a_claim_that_the_launch_itself_has_renewed_meanwhile_counts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, pid: Callable[[], int]
) -> None:
    assert settled(monkeypatch, run_dir, pid=pid(), host=os.uname().nodename) == {}


def test_a_claim_is_renewed_until_another_process_goes_on(run_dir: Path) -> None:
    assert claim(run_dir) == {}
    path = run_dir / HEARTBEAT
    first, until = path.read_text(), time.monotonic() + 20
    while path.read_text() == first:
        assert time.monotonic() < until
        time.sleep(0.05)
    beat(run_dir, 0)
    wait_for_the_end_of_the_claim()
    assert read_heartbeat(run_dir)["host"] == "elsewhere"


@pytest.fixture
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory on a mount whose locks are only this machine's."""
    for name, value in with_deadlines(heartbeat=0.2).items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    release_run()


def test_a_lock_does_not_outweigh_the_heartbeat_of_another_machine(own_locks: Path) -> None:
    with beating(own_locks), pytest.raises(
            LockedError, match="another launch is training this run: process 7 on elsewhere"):
        lock_run(own_locks)
    os.close(lock_directory(own_locks))  # it is released again
    lock_run(own_locks)  # that heartbeat stays as it is now


@pytest.mark.parametrize(("facts", "age"), [({"host": os.uname().nodename}, 0), ({}, 600)])
def test_an_old_heartbeat_and_one_of_this_machine_are_not_waited_for(
    own_locks: Path, facts: dict[str, str], age: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(own_locks, 0, **facts)
    os.utime(own_locks / HEARTBEAT, (time.time() - age,) * 2)
    monkeypatch.setattr(heartbeat, "_is_alive", lambda _: pytest.fail("waited"))
    lock_run(own_locks)
    with pytest.raises(BlockingIOError):  # it is held
        lock_directory(own_locks)


@pytest.mark.parametrize("content", ["", "[]", '{"pid": 1}', '{"pid": [], "host": 1, "time": 2}'])
def test_a_heartbeat_that_cannot_be_read_is_none(run_dir: Path, content: str) -> None:
    (run_dir / HEARTBEAT).write_text(content)
    assert read_heartbeat(run_dir) == {} and claim(run_dir) == {}


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """Begin a launch after the one before was killed; return what it finds of that."""
    monkeypatch.setattr(heartbeat, "STARTUP_SECONDS", 0.05)

    def begin() -> float:
        for renewal in heartbeat._begun.values():
            renewal.stop()  # it is killed
        heartbeat._begun.clear()
        os.environ.pop(heartbeat.EARLIER, None)
        announce(tmp_path)
        return seconds_before()

    yield begin
    withdraw()


def test_a_launch_that_is_killed_while_it_starts_is_counted_by_the_next_one(
    tmp_path: Path, launch: Callable[[], float]
) -> None:
    (tmp_path / "summary.json").write_text('{"seconds": {"training": 90.5, "lost": 9.5}}')
    assert launch() == 100
    first = read_heartbeat(tmp_path)["seconds"]
    assert first > 100
    killed = launch()
    assert killed >= first
    assert read_heartbeat(tmp_path)["seconds"] > killed
    withdraw()
    assert read_heartbeat(tmp_path)["seconds"] > killed  # nothing else tells it


def test_a_launch_that_ends_by_itself_after_a_while_is_counted(
    tmp_path: Path, launch: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "COUNTED_SECONDS", 0.0)
    launch()
    first = read_heartbeat(tmp_path)["seconds"]
    withdraw()  # as after a download that failed
    assert launch() >= first > 0


@pytest.mark.parametrize("seconds", ['"9"', "NaN", "-1", "1e300", "null", "[9]", '{"a": "9"}'])
def test_a_launch_that_ends_by_itself_before_it_trains_leaves_no_heartbeat(
    tmp_path: Path, launch: Callable[[], float], seconds: str
) -> None:
    (tmp_path / "summary.json").write_text(f'{{"seconds": {seconds}}}')
    assert launch() == 0 and (tmp_path / HEARTBEAT).exists()
    withdraw()
    assert not (tmp_path / HEARTBEAT).exists() and seconds_before() == 0


def test_the_processes_of_a_launch_keep_the_heartbeat_of_their_parent(
    tmp_path: Path, launch: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(tmp_path, 1, seconds=50)
    monkeypatch.setenv(heartbeat.EARLIER, "7")
    announce(tmp_path)
    assert read_heartbeat(tmp_path)["pid"] == 7 and seconds_before() == 7
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # after others of this launch
    announce(tmp_path)
    assert read_heartbeat(tmp_path)["pid"] == os.getpid() and seconds_before() == 50
