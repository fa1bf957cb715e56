"""The lock of a run, the heartbeat where there are no locks; locks of other directories."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import pytest

from basics.files import lock_directory
from processes import run_lock
from processes.run_lock import (
    HEARTBEAT,
    LockedError,
    lock_run,
    read_heartbeat,
    release_run,
    seconds_before,
    trained_by,
)
from processes.signals import Deadlines
from tests.support import stand_ins
from tests.support.runs import with_deadlines
from tests.support.workplace import PROJECT_DIR

# Locks a run, writes its heartbeat, and goes on after its parent's end.
LOCKS = """
import os, sys, time
from pathlib import Path
from processes import run_lock
run_lock.lock_run(Path(sys.argv[1]))
run_lock.write_heartbeat(Path(sys.argv[1]) / run_lock.HEARTBEAT, phase="training", step=1,
                         seconds=100.5, parent=os.getppid())
print("locked", flush=True)
time.sleep(3600)
"""
HERE = os.uname().nodename


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    for name in ("RANK", run_lock.LAUNCH):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in with_deadlines(heartbeat=0.2, orphans=60).items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    release_run()


@pytest.fixture
def start(run_dir):
    """Start a launch in a process group of its own, and wait until it has the lock."""
    started: list[subprocess.Popen[str]] = []

    def start(shell=""):
        command = [sys.executable, "-c", LOCKS, str(run_dir)]
        process = subprocess.Popen(
            ["sh", "-c", shell, *command] if shell else command,
            cwd=PROJECT_DIR,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its child too
        process.communicate()


def beat(run_dir, number, **facts):
    """Write the heartbeat of another process."""
    (run_dir / HEARTBEAT).write_text(
        json.dumps({"pid": 7, "host": "elsewhere", "time": f"at {number}"} | facts)
    )


def is_held(run_dir):
    try:
        os.close(lock_directory(run_dir))
    except BlockingIOError:
        return True
    return False


def test_a_launch_waits_until_the_processes_of_an_earlier_one_have_ended(
    run_dir, start, monkeypatch
):
    """Its torchrun was killed: rank 0, which may still save, holds the lock to its end."""
    assert Deadlines().orphans == 30  # seconds, if nobody asks for others
    said: list[str] = []
    orphan = start(shell='"$0" "$@" & wait')
    rank_0 = read_heartbeat(run_dir)["pid"]
    orphan.kill()
    orphan.wait()
    monkeypatch.setattr(run_lock, "print_line", said.append)
    with monkeypatch.context() as patch:
        for name, value in with_deadlines(orphans=1).items():
            patch.setenv(name, value)
        with pytest.raises(LockedError, match=f"another launch .*: process {rank_0} on .*; stop"):
            lock_run(run_dir)
    assert len(said) == 1 and said[0].startswith(
        f"{run_dir}: waiting for another launch to end: process {rank_0} on "
    )
    os.kill(rank_0, signal.SIGKILL)
    lock_run(run_dir)
    assert is_held(run_dir)


def test_a_healthy_launch_is_not_waited_for(run_dir, start, monkeypatch):
    """Rank 0, its child, shares its lock, and keeps it after the launch's end."""
    launch = start()
    assert trained_by(run_dir) == launch.pid and seconds_before(run_dir) == 100.5
    with pytest.raises(LockedError, match=f"another launch .*: process {launch.pid} on .*; stop"):
        lock_run(run_dir)
    monkeypatch.setenv(run_lock.LAUNCH, str(os.getppid()))  # as its child
    lock_run(run_dir)
    launch.kill()
    launch.wait()
    assert trained_by(run_dir) is None and is_held(run_dir)
    release_run()
    assert not is_held(run_dir)


@pytest.mark.parametrize(("number", "status"), [(errno.ESTALE, 1), (errno.EACCES, 2)])
def test_a_run_directory_that_is_out_of_reach_may_be_tried_again(
    run_dir, monkeypatch, number, status
):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock, "lock_directory", refuse)
    with pytest.raises(LockedError, match=os.strerror(number)) as caught:
        lock_run(run_dir)
    assert caught.value.status == status


# A lock says enough of this machine's processes; a heartbeat that old is that of a dead one.
@pytest.mark.parametrize(
    ("has_locks", "goes_on", "facts", "age", "outcome"),
    [
        (True, True, {}, 0, "refused"),
        (False, True, {}, 0, "refused"),
        (False, True, {"host": HERE}, 600, "refused"),
        (False, False, {}, 0, "waits"),
        (True, False, {}, 0, "waits"),
        (True, True, {"host": HERE}, 0, ""),
        (True, True, {}, 600, ""),
    ],
)
def test_the_heartbeat_of_another_launch_refuses_this_one_while_it_changes(
    run_dir, monkeypatch, capsys, has_locks, goes_on, facts, age, outcome
):
    """Where nothing can be locked, and on a mount whose locks are only this machine's."""
    numbers = count()
    beat(run_dir, next(numbers), **facts)
    os.utime(run_dir / HEARTBEAT, (time.time() - age,) * 2)

    def beat_or_sleep(seconds):
        if goes_on:
            beat(run_dir, next(numbers), **facts)
        else:
            time.sleep(seconds)

    # Not of the module itself: a thread that an earlier test has left may sleep too.
    monkeypatch.setattr(run_lock, "time", SimpleNamespace(**vars(time) | {"sleep": beat_or_sleep}))
    if not has_locks:
        for patch in stand_ins.odd_file_system(run_dir):
            monkeypatch.setattr(*patch)
    if outcome == "refused":
        with pytest.raises(LockedError, match="another launch is training this run: process 7 on"):
            lock_run(run_dir)
    else:
        lock_run(run_dir)
    said = capsys.readouterr().out
    assert ("waiting 0.6 s whether the heartbeat of process 7 on" in said) is bool(outcome)
    assert ("has no locks" in said) is not has_locks


@pytest.mark.parametrize("has_locks", [True, False])
def test_rank_0_does_not_wait_again_where_its_parent_has(run_dir, monkeypatch, capsys, has_locks):
    beat(run_dir, 0)
    if not has_locks:
        for patch in stand_ins.odd_file_system(run_dir):
            monkeypatch.setattr(*patch)
    lock_run(run_dir)
    assert os.environ[run_lock.LAUNCH] == str(os.getpid())
    monkeypatch.setenv(run_lock.LAUNCH, str(os.getppid()))
    release_run()
    lock_run(run_dir)
    assert capsys.readouterr().out.count("waiting 0.6 s") == 1


@pytest.mark.parametrize("seconds", ["NaN", "-1", "1e300", "null", '{"a": "9"}'])
def test_a_heartbeat_that_is_damaged_counts_no_time(run_dir, seconds):
    (run_dir / HEARTBEAT).write_text(
        f'{{"pid": 7, "host": "elsewhere", "time": "now", "seconds": {seconds}}}'
    )
    assert seconds_before(run_dir) == 0
