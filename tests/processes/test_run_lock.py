"""The lock of a run: who holds it, how it is handed over, and what a dead torchrun leaves."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from basics.directory_lock import lock_directory
from processes import run_lock
from processes.deadlines import Deadlines
from processes.run_lock import LockedError, lock_run, release_run
from tests.support.runs import with_deadlines
from tests.support.workplace import PROJECT_DIR

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who holds a lock")

LOCKS = """
import sys, time
from pathlib import Path
from processes.run_lock import lock_run
lock_run(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(3600)
"""
# Locks, starts a child that is to take the lock over, and waits for it.
LAUNCHES = """
import subprocess, sys
from pathlib import Path
from processes.run_lock import handing_over, lock_run
lock_run(Path(sys.argv[1]))
with handing_over():
    subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], check=True)
"""


class Torchrun:
    """The store of a torchrun, as its workers see it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))

    def environment(self) -> dict[str, str]:
        return {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.socket.getsockname()[1])}


@pytest.fixture
def torchrun() -> Iterator[Torchrun]:
    torchrun = Torchrun()
    yield torchrun
    torchrun.socket.close()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # other tests in this process may have left them
    yield tmp_path
    release_run()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its child too
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, *arguments: str,
          **environment: str) -> subprocess.Popen[str]:
    """Start Python code in a process group of its own, and wait for its first line."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=PROJECT_DIR,
                               env=os.environ | environment, stdout=subprocess.PIPE, text=True,
                               process_group=0)
    started.append(process)
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.parametrize(("is_up", "status"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_worker_that_starts_after_its_torchrun_died_ends(
    torchrun: Torchrun, is_up: bool, status: int
) -> None:
    environment = torchrun.environment()
    if not is_up:
        torchrun.socket.close()
    code = "from processes.run_lock import end_with_torchrun; end_with_torchrun()"
    result = subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, timeout=60,
                            capture_output=True, text=True, env=os.environ | environment)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")


def test_a_process_that_asks_after_its_parents_death_ends() -> None:
    code = "from processes.run_lock import end_with_parent; end_with_parent({})"
    for parent, status in ((2**22, -signal.SIGTERM), (os.getpid(), 0)):
        result = subprocess.run([sys.executable, "-c", code.format(parent)], cwd=PROJECT_DIR)
        assert result.returncode == status


def test_a_launch_waits_for_a_holder_that_has_lost_its_torchrun(
    run_dir: Path, torchrun: Torchrun, started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start(started, LOCKS, str(run_dir), **torchrun.environment())
    torchrun.socket.close()
    told = []

    def tell(line: str) -> None:
        told.append(line)
        holder.kill()

    monkeypatch.setattr(run_lock, "print_line", tell)
    lock_run(run_dir)
    assert told == [f"{run_dir}: waiting for process {holder.pid} of an earlier launch to end;"
                    " its torchrun is gone"]


@pytest.mark.parametrize("has_other_parent", [True, False])
def test_a_holder_whose_torchrun_was_replaced_at_the_same_port_is_waited_for(
    run_dir: Path, torchrun: Torchrun, started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch, has_other_parent: bool
) -> None:
    holder = start(started, LOCKS, str(run_dir), **torchrun.environment())
    for name, value in torchrun.environment().items():  # its socket is that of the new torchrun
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_lock, "print_line", lambda _: holder.kill())
    if has_other_parent:
        lock_run(run_dir)
        return
    monkeypatch.setattr(run_lock.os, "getppid", os.getpid)  # both are processes of one torchrun
    with pytest.raises(LockedError, match=f": process {holder.pid} on "):
        lock_run(run_dir)


def test_a_holder_that_ends_while_it_is_looked_for_is_no_reason_to_refuse(
    run_dir: Path, torchrun: Torchrun, started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start(started, LOCKS, str(run_dir), **torchrun.environment())
    torchrun.socket.close()
    answers = []

    def find(run_dir: Path) -> list[int]:
        if answers:
            holder.kill()
            holder.wait()
        answers.append([] if answers else [holder.pid])
        return answers[-1]

    monkeypatch.setattr(run_lock, "_holders", find)
    monkeypatch.setattr(run_lock, "SETTLING_SECONDS", 1.5)
    monkeypatch.setattr(run_lock, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "_is_ending", lambda pid: time.sleep(1.6) or True)
    lock_run(run_dir)
    assert answers == [[holder.pid], []]


def test_a_launch_that_has_waited_in_vain_is_refused(
    run_dir: Path, torchrun: Torchrun, started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = start(started, LOCKS, str(run_dir), **torchrun.environment())
    torchrun.socket.close()
    assert Deadlines().orphans == 30  # seconds, if nobody asks for others
    for name, value in with_deadlines(orphans=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockedError, match=f"another launch .*: process {holder.pid} on "):
        lock_run(run_dir)


@pytest.mark.parametrize("is_worker", [True, False])
def test_a_healthy_holder_is_not_waited_for(
    run_dir: Path, torchrun: Torchrun, started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, is_worker: bool
) -> None:
    for name, value in with_deadlines(orphans=3600).items():
        monkeypatch.setenv(name, value)
    environment = torchrun.environment() if is_worker else {}
    holder = start(started, LOCKS, str(run_dir), **environment)
    with pytest.raises(LockedError, match=f": process {holder.pid} on "):
        lock_run(run_dir)
    assert capsys.readouterr().out == ""


def test_the_lock_outlives_a_launch_that_has_handed_it_over(
    run_dir: Path, started: list[subprocess.Popen[str]]
) -> None:
    launch = start(started, LAUNCHES, str(run_dir), LOCKS)
    first, second = run_lock._holders(run_dir)
    assert launch.pid in (first, second)
    launch.kill()
    launch.wait()
    with pytest.raises(BlockingIOError):
        lock_directory(run_dir)
    rank_0, = run_lock._holders(run_dir)
    assert rank_0 != launch.pid
    os.kill(rank_0, signal.SIGKILL)
    until = time.monotonic() + 20
    while run_lock._holders(run_dir):
        assert time.monotonic() < until
    lock_run(run_dir)


class FailingOnce(socket.socket):
    """A socket that cannot accept the first connection: too many files are open."""

    has_failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_the_lock_is_handed_over_although_a_connection_failed(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(name: str) -> socket.socket:
        server = FailingOnce(socket.AF_UNIX)
        server.bind(f"\0{name}")
        server.listen()
        return server

    monkeypatch.setattr(run_lock, "_listen", listen)
    lock_run(run_dir)
    with run_lock.handing_over():
        child = start(started, LOCKS, str(run_dir))
    assert set(run_lock._holders(run_dir)) == {os.getpid(), child.pid}


def test_a_launch_that_has_closed_its_socket_ends_without_an_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = socket.socket(socket.AF_UNIX)
    closed.close()
    monkeypatch.setattr(run_lock, "_listen", lambda _: closed)
    lock_run(run_dir)
    with run_lock.handing_over():
        assert run_lock.HANDOVER in os.environ
    assert run_lock.HANDOVER not in os.environ


def test_rank_0_takes_the_lock_itself_if_its_launch_has_died(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_lock.HANDOVER, "ddp-train-of-a-launch-that-has-died")
    lock_run(run_dir)
    assert run_lock._holders(run_dir) == [os.getpid()]


def test_the_lock_outlives_rank_0_as_long_as_its_launch_lives(
    run_dir: Path, started: list[subprocess.Popen[str]]
) -> None:
    instead = LOCKS.replace("time.sleep(3600)", "") + "sys.stdout.close()"
    waits = LAUNCHES + "    print('ended', flush=True)\n    import time\n    time.sleep(3600)\n"
    launch = start(started, waits, str(run_dir), instead)
    assert launch.stdout.readline() == "ended\n"
    assert run_lock._holders(run_dir) == [launch.pid]


def test_only_a_child_of_the_launch_gets_its_lock(
    run_dir: Path, started: list[subprocess.Popen[str]]
) -> None:
    launch = start(started, LAUNCHES, str(run_dir), LOCKS)
    child, = (pid for pid in run_lock._holders(run_dir) if pid != launch.pid)
    variables = dict(line.split("=", 1) for line in
                     Path(f"/proc/{child}/environ").read_text().split("\0") if line)
    stranger = subprocess.run(
        [sys.executable, "-c", LOCKS, str(run_dir)], cwd=PROJECT_DIR, capture_output=True,
        text=True, timeout=60,
        env=os.environ | {run_lock.HANDOVER: variables[run_lock.HANDOVER]})
    assert "LockedError" in stranger.stderr and stranger.stdout == ""


@pytest.mark.parametrize(("number", "status"), [(errno.ESTALE, 1), (errno.EACCES, 2)])
def test_a_run_directory_that_is_out_of_reach_may_be_tried_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    def refuse(_: Path) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock, "lock_directory", refuse)
    with pytest.raises(LockedError, match=os.strerror(number)) as caught:
        run_lock.lock_run(run_dir)
    assert caught.value.status == status
