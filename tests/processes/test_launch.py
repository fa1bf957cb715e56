from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basics.errors import UserError
from processes.launch import this_process, throttling
from tests.support.workplace import Workplace, forked, succeeded

CPU = torch.device("cpu")


def run_worker(name: str, root: Path, num_processes: int = 2):
    return forked("tests/support/torchrun_workers.py", [name, str(root)],
                  num_processes=num_processes)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for key, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="local rank 2 has no GPU of its own; this machine has 2"):
        this_process()


@pytest.mark.parametrize(("said", "reason"), [
    ("Not Active, Not Active, Not Active", None),
    ("Not Active, Active, Not Active", "sw thermal slowdown"),
    ("[N/A], [N/A], [N/A]", None),
    (None, None),
])
def test_a_throttled_gpu_is_told_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7"))
    monkeypatch.setenv("PATH", str(tmp_path))
    if said is not None:
        (tmp_path / "nvidia-smi").write_text(
            f'#!/bin/sh\n[ "$1" = --id=GPU-7 ] && echo "{said}"\n')
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert throttling(torch.device("cuda", 0)) == reason
    assert throttling(CPU) is None


@pytest.mark.parametrize(("kind", "message"), [
    ("mistake", "Error: rank 1 lacks its file"),
    ("difference", "Error: rank 1 reads another run than rank 0"),
])
def test_what_one_rank_alone_finds_stops_all_and_is_told_once(
    tmp_path: Path, kind: str, message: str
) -> None:
    result = run_worker(kind, tmp_path)
    assert result.returncode != 0
    assert result.stderr.count(message) == 1
    assert 'torchrun_workers.py", line' not in result.stderr, "a traceback of ours"


def test_a_crash_of_one_rank_leaves_none_waiting(tmp_path: Path) -> None:
    result = run_worker("crash", tmp_path)
    assert result.returncode not in (0, None)
    assert "MemoryError: no room" in result.stderr


def test_reports_are_averaged_over_processes(tmp_path: Path) -> None:
    found = json.loads(succeeded(run_worker("average-losses", tmp_path)).stdout)
    # rank 0 saw losses 0, 1, 2, 3 and rank 1 saw 10, 11, 12, 13; a fifth step was not finite
    assert found == {"train_loss": 6.5, "train_loss_min": 5.0, "train_loss_max": 8.0,
                     "grad_norm": 3.0, "grad_norm_max": 6.0, "skipped_steps": 1,
                     "since_checkpoint": 6.5}


def test_gradients_travel_only_with_the_last_microbatch(workplace: Workplace) -> None:
    workplace.add_run(train={"gradient_accumulation_steps": 4, "min_train_tokens": 256})
    workplace.add_dataset()
    counts = json.loads(succeeded(run_worker("count-all-reduces", workplace.root)).stdout)
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0
