"""What the thread beside each process does where a run's own ways out do not help."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from basics.failpoints import VARIABLE
from processes.peers import Peers, PeerStore, this_machine
from tests.faults.test_faults import SETTINGS, last_line_of_ours, summary_of, with_fault
from tests.support.workplace import PROJECT_DIR, Workplace, children_of, start_forked, succeeded

PATIENT = {"hang_timeout_seconds": 600.0, "collective_timeout_seconds": 600.0}


def train(workplace: Workplace, fault: str, folder: Path | None = None,
          ) -> multiprocessing.process.BaseProcess:
    """Start a run on two processes by the script itself, so that its status is to be seen."""
    process, _ = start_forked("ddp_train.py", workplace.arguments("tiny", "--nproc-per-node", "2"),
                              environment={VARIABLE: fault}, folder=folder)
    return process


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.05)


def assert_none_lives_on(process: multiprocessing.process.BaseProcess) -> None:
    """Nothing of what a process has started is left; all of it is in its process group."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError("a process lives on")


@pytest.fixture
def run_dir(workplace: Workplace) -> Path:
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS | {"collective_timeout_seconds": 3.0})


@pytest.fixture
def patient_dir(workplace: Workplace) -> Path:
    workplace.add_dataset()
    return workplace.add_run(train=PATIENT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_before_the_first_step_has_its_line_and_status(
    workplace: Workplace, run_dir: Path, rank: int
) -> None:
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2",
                                 **{VARIABLE: f"compile:hang:rank={rank}"})
    assert result.returncode == 5, result.stderr
    line = last_line_of_ours(result)
    assert line.startswith(f"Error: rank {rank} hung in compile: no answer within the collective")
    assert summary_of(run_dir)["status"] == "failed"
    succeeded(workplace.torchrun(2, "tiny"))


@pytest.mark.parametrize("fault", ["train:hang:rank=1:hit=7", "train:raise:rank=1:hit=7"])
def test_a_log_on_a_full_disk_keeps_no_failure_from_ending_the_run(
    workplace: Workplace, run_dir: Path, tmp_path: Path, fault: str
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("stdout", "stderr"):
        (folder / name).symlink_to("/dev/full")
    process = train(workplace, fault, folder)
    process.join(timeout=60)
    assert process.exitcode == (5 if "hang" in fault else 1)
    assert_none_lives_on(process)
    assert summary_of(run_dir)["status"] == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_the_watch_itself_ends_the_run(
    workplace: Workplace, run_dir: Path, rank: int
) -> None:
    faults = f"watch:raise:rank={rank}:hit=12;train:slow:seconds=60:hit=7"
    result = with_fault(workplace, faults)
    assert result.returncode > 0
    assert last_line_of_ours(result).startswith(f"Error: rank {rank} failed in its watchdog ")
    assert summary_of(run_dir)["status"] == "failed"


# To the process that is slow, and to the other one.
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_a_step_that_takes_long_has_all_leave_in_time(
    workplace: Workplace, patient_dir: Path, rank: int
) -> None:
    process = train(workplace, "train:slow:seconds=100:hit=7:rank=0")
    signalled = when_it_is_slow(process, patient_dir)
    began = time.monotonic()
    os.kill(signalled[rank], signal.SIGTERM)
    process.join(timeout=60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 28  # 13 seconds, and what a busy machine takes
    assert_none_lives_on(process)
    summary = summary_of(patient_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")


def test_a_second_signal_is_not_waited_for(workplace: Workplace, patient_dir: Path) -> None:
    process = train(workplace, "train:slow:seconds=100:hit=7")
    workers = when_it_is_slow(process, patient_dir)
    began = time.monotonic()
    for _ in range(2):
        os.kill(workers[1], signal.SIGTERM)
        time.sleep(2)
    process.join(timeout=60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 12  # of the 13 and more that it would have had
    assert_none_lives_on(process)
    summary = summary_of(patient_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGTERM")


@pytest.mark.parametrize(("seconds", "saved"), [(4, [4, 6]), (100, [])])
def test_a_signal_while_a_checkpoint_is_written_waits_for_it_as_long_as_there_is_time(
    workplace: Workplace, patient_dir: Path, seconds: int, saved: list[int]
) -> None:
    at = "rank=0:hit=1"
    process = train(workplace, f"save.trainer:slow:{at}:seconds={seconds};"
                               "train:signal:number=15:rank=1:hit=7;train:slow:hit=7:seconds=1")
    began = time.monotonic()
    process.join(timeout=90)
    assert process.exitcode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 45  # with the start
    assert_none_lives_on(process)
    assert summary_of(patient_dir)["status"] == "stopped"
    found = [int(path.name.rpartition("-")[2])
             for path in (patient_dir / "checkpoints").glob("[0-9]*-iteration-*")]
    assert sorted(found) == saved
    succeeded(workplace.torchrun(2, "tiny"))


def when_it_is_slow(process: multiprocessing.process.BaseProcess, run_dir: Path) -> list[int]:
    """Wait until the first checkpoint is there; give the processes by rank, a step or two later."""
    wait_for(run_dir / "checkpoints" / "latest")
    time.sleep(1.5)
    pid = json.loads((run_dir / "heartbeat.json").read_text())["pid"]
    workers = children_of(process.pid)
    assert pid == workers[0]
    return workers


SLOW = ";".join(f"{place}:slow:hit={{0}}:seconds=2"
                for place in ("save.weights", "save.trainer", "save.meta", "save.manifest"))


@pytest.mark.parametrize("hit", [1, 3])  # in between, and the last one
def test_a_save_that_goes_forward_may_take_longer_than_a_hang(
    workplace: Workplace, run_dir: Path, hit: int
) -> None:
    succeeded(with_fault(workplace, SLOW.format(hit)))
    assert summary_of(run_dir)["checkpoints"]["longest_write_seconds"] > 8  # and a hang is 4


def test_a_last_save_tried_again_may_take_longer_than_a_hang(
    workplace: Workplace, run_dir: Path
) -> None:
    succeeded(with_fault(workplace, "save.meta:full:hit=3;" + SLOW.format(4)))
    assert summary_of(run_dir)["status"] == "finished"


def test_processes_of_machines_with_one_name_are_not_taken_for_siblings() -> None:
    store = dist.HashStore()
    board = PeerStore(store)
    host, *rest = this_machine().split("/")
    dead = subprocess.Popen(["true"])
    dead.wait()
    neighbours = Peers(0, 4, board)
    board.tell("process/1", f"{'/'.join([host, 'another-boot', *rest[1:]])} {dead.pid}")
    board.tell("process/2", f"{'/'.join([host, *rest[:1], 'pid:[1]'])} {dead.pid}")
    board.tell("process/3", f"{this_machine()} {dead.pid}")
    assert neighbours.gone() == [3]
    assert neighbours.gone() == []
    board.close()


def test_another_container_is_another_machine() -> None:
    command = [sys.executable, "-c", "from neighbours import this_machine; print(this_machine())"]
    unshared = subprocess.run(["unshare", "--pid", "--fork", *command], capture_output=True,
                              text=True, cwd=PROJECT_DIR)
    if unshared.returncode:
        pytest.skip(f"no namespaces here: {unshared.stderr.strip()}")
    assert unshared.stdout.strip() != this_machine()
    assert unshared.stdout.split("/")[0] == this_machine().split("/")[0]
