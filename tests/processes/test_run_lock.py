"""The lock of a run: who holds it, who waits for it, and what a dead torchrun leaves."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from processes import run_lock
from processes.deadlines import Deadlines
from processes.heartbeat import write_heartbeat
from processes.run_lock import LockedError, lock_run, release_run, trained_by
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
# Locks as the process that becomes torchrun does, and leaves the run directory to rank 0.
LAUNCHES = """
import sys, time
from pathlib import Path
from processes.run_lock import hand_over, lock_run
lock_run(Path(sys.argv[1]))
hand_over()
print("locked", flush=True)
time.sleep(3600)
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
    for name in ("RANK", run_lock.LAUNCH):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.json").write_text("{}")
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


def test_a_launch_waits_until_the_processes_of_an_earlier_one_have_ended(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its torchrun was killed: rank 0, which may still save, holds the lock to its end."""
    said: list[str] = []
    rank_0 = start(started, LOCKS, str(run_dir), RANK="0")

    def tell(line: str) -> None:
        said.append(line)
        rank_0.kill()

    monkeypatch.setattr(run_lock, "print_line", tell)
    lock_run(run_dir)
    assert said == [f"{run_dir}: waiting for another launch to end, which has just begun"]
    assert trained_by(run_dir) == os.getpid()


def test_a_launch_that_has_waited_in_vain_is_refused(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_0 = start(started, LOCKS, str(run_dir), RANK="0")
    write_heartbeat(run_dir / "heartbeat.json", phase="training", step=3)
    assert Deadlines().orphans == 30  # seconds, if nobody asks for others
    for name, value in with_deadlines(orphans=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LockedError, match=f"another launch .*: process {os.getpid()} on .*; stop"):
        lock_run(run_dir)
    assert trained_by(run_dir) == rank_0.pid
    release_run()  # what it had locked before it was refused
    rank_0.kill()
    lock_run(run_dir)


@pytest.mark.parametrize("code", [LOCKS, LAUNCHES])
def test_a_healthy_launch_is_not_waited_for(
    run_dir: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Also between its preparation and the start of rank 0."""
    launch = start(started, code, str(run_dir))
    for name, value in with_deadlines(orphans=3600).items():
        monkeypatch.setenv(name, value)
    assert trained_by(run_dir) == launch.pid
    with pytest.raises(LockedError, match="another launch is training this run, which has just"):
        lock_run(run_dir)
    monkeypatch.setenv("RANK", "0")
    if code == LAUNCHES:
        with pytest.raises(LockedError, match="another launch"):  # under a torchrun of its own
            lock_run(run_dir)
        monkeypatch.setenv(run_lock.LAUNCH, str(os.getppid()))  # rank 0 of that launch
        lock_run(run_dir)
        monkeypatch.delenv(run_lock.LAUNCH)
    release_run()
    launch.kill()
    launch.wait()
    lock_run(run_dir)
    assert not run_lock._of_launch  # rank 0 only looks at it


def test_a_launch_that_was_refused_holds_no_lock(run_dir: Path) -> None:
    run_dir.chmod(0o500)
    if os.access(run_dir, os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(LockedError, match="cannot be written to"):
        lock_run(run_dir)
    assert trained_by(run_dir) is None


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
