"""The checks of `on_gpu.py` that start whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from benchmarks import on_gpu_checks
from benchmarks.on_gpu_checks import Work, read_search
from tests.support.lab_cli import run_lab
from tests.support.workplace import forked, succeeded


def forked_command(work: Work, *arguments: str, hides_gpu: bool = False) -> str:
    """Run a command as `Work.command` does, in less time."""
    if arguments[0] == "ddp_train.py":
        return succeeded(forked("ddp_train.py", list(arguments[1:]))).stdout
    result = run_lab(*arguments[2:])
    assert result.exit_code == 0, result.output
    return result.output


def check(name: str, output: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(Work, "command", forked_command)
    result = CliRunner().invoke(on_gpu_checks.cli, [
        "--device", "cpu", "--dry-run", "--output", str(output), name])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(output.read_text())


def test_a_search_is_read() -> None:
    found = read_search("""microbatch      allocated      reserved     tokens/s
         1       5.05 GiB      6.04 GiB          524
     1,020       70.2 GiB      71.2 GiB      400,051
     1,021                out of memory
largest microbatch: 1,020
fastest microbatch: 64 (400,051 tokens/s)
memory: 4.04 GiB + 576 MiB a sequence
""")
    assert found == {"trials": 3, "largest": 1020, "fastest": 64, "fixed_gib": 4.04,
                     "gib_a_sequence": 0.5625, "is_compiled": True}
    assert read_search("nothing") == {"trials": 0, "is_compiled": True}


@pytest.mark.thorough
def test_a_repeated_and_a_resumed_run_are_compared(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    found = check("repeat", tmp_path / "found.json", monkeypatch)
    assert found["again_is_equal"] and found["parts_is_equal"]
    assert found["first"] == found["again"] == found["parts"]
    assert found["parts_largest_difference"] == found["parts_loss_difference"] == 0


def test_weights_that_differ_are_a_result(tmp_path: Path) -> None:
    work = Work(tmp_path, tmp_path / "found.json", "cpu", is_dry=True)
    for name, value in (("first", 1.0), ("again", 1.5)):
        path = work.weights_path(name)
        path.parent.mkdir(parents=True)
        save_file({"weight": np.array([1.0, value], dtype=np.float32)}, path)
        (work.folder / "runs" / name / "metrics.jsonl").write_text(
            json.dumps({"global_step": 9, "train_loss": value}) + "\n")
    found = on_gpu_checks._compared(work, "again")
    assert not found["again_is_equal"]
    assert found["again_largest_difference"] == found["again_loss_difference"] == 0.5
    assert set(load_file(work.weights_path("first"))) == {"weight"}


@pytest.mark.thorough  # trains as the test of repeated runs does
def test_both_precisions_are_trained_on_the_same_tokens(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    found = check("precision", tmp_path / "found.json", monkeypatch)
    assert len(found["bf16"]) == len(found["fp32"]) == 2
    assert 0 < found["largest_difference"] < 0.01


def test_a_run_is_validated_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check("run", tmp_path / "found.json", monkeypatch)
    assert len(found["validation_seconds"]) == 2
    assert found["seconds"]["validation"] > 0 and found["checkpoints"]["saved"] == 2
    assert found["evaluate_cpu_loss"] == pytest.approx(found["validation_loss"], abs=0.1)
