from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from basics.errors import UserError
from processes import launch
from processes.launch import Process, end_torchrun, share_cpu_cores, this_process
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN, Workplace, forked, succeeded

CPU = torch.device("cpu")


def run_worker(name: str, root: Path, num_processes: int = 2):
    return forked("tests/support/torchrun_workers.py", [name, str(root)],
                  num_processes=num_processes)


@pytest.mark.parametrize(("num_local_processes", "omp_num_threads", "expected"), [
    (2, "1", 4), (16, "1", 1), (2, None, 4), (2, "3", None),  # None: left as it is
])
def test_cpu_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, num_local_processes: int, omp_num_threads: str | None,
    expected: int | None
) -> None:
    monkeypatch.setattr("processes.launch.num_cpu_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local_processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp_num_threads:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    changed: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    share_cpu_cores(Process(0, 0, num_local_processes, CPU))
    assert changed == ([expected] if expected else [])


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for key, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="local rank 2 has no GPU of its own; this machine has 2"):
        this_process()


def test_reports_are_averaged_over_processes(tmp_path: Path) -> None:
    found = json.loads(succeeded(run_worker("average-losses", tmp_path)).stdout)
    assert found.pop("slowest_step") in range(5) and found.pop("slowest_step_seconds") > 0
    # rank 0 saw losses 0, 1, 2, 3 and rank 1 saw 10, 11, 12, 13; a fifth step was not finite
    assert found == {"train_loss": 6.5, "train_loss_min": 5.0, "train_loss_max": 8.0,
                     "grad_norm": 3.0, "grad_norm_max": 6.0, "skipped_steps": 1,
                     "since_checkpoint": 6.5}


def test_gradients_are_reduced_only_with_the_last_microbatch(workplace: Workplace) -> None:
    workplace.add_run(train={"gradient_accumulation_steps": 4, "min_train_tokens": 256})
    workplace.add_dataset()
    found = json.loads(succeeded(run_worker("count-all-reduces", workplace.root)).stdout)
    assert found["all_reduces"][:3] == [0, 0, 0]
    assert found["all_reduces"][3] > 0
    assert found["keeps_gradients"] == [True, False]  # with two microbatches, with one


@pytest.mark.parametrize(("nodes", "local_rank", "parent_is_torchrun", "ends"), [
    (2, 0, True, True), (1, 0, True, False), (2, 1, True, False), (2, 0, False, False)])
def test_only_a_torchrun_that_is_one_of_several_is_ended(
    monkeypatch: pytest.MonkeyPatch, nodes: int, local_rank: int, parent_is_torchrun: bool,
    ends: bool
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setattr(psutil.Process, "exe", lambda self: "/usr/bin/python3.12")
    ended: list[int] = []
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: ended.append(self.pid))
    parent = os.getppid()
    end_torchrun(Process(2, local_rank, 4, CPU, torchrun_pid=parent if parent_is_torchrun else 1))
    assert ended == ([parent] if ends else [])


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 60), ("cuda:0", 600 + 120)])
def test_nccl_waits_longer_than_the_watchdog(
    monkeypatch: pytest.MonkeyPatch, device: str, seconds: int
) -> None:
    """Its own timeout would end the process without a line that says which rank hung."""
    found: list[timedelta] = []
    monkeypatch.setattr(launch, "join_process_group",
                        lambda *_, timeout: found.append(timeout))
    monkeypatch.setattr(launch.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    train = TrainConfig(**TINY_TRAIN, collective_timeout_seconds=60)
    with launch.process_group(Process(0, 0, 1, torch.device(device)), None, train):
        pass
    assert found == [timedelta(seconds=seconds)]
