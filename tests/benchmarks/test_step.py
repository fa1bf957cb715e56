from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import step
from benchmarks.step import kernels_of_trace, main
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL


def test_only_what_runs_on_the_device_is_read_from_a_trace() -> None:
    assert kernels_of_trace({"traceEvents": [
        {"name": "nvjet_a", "cat": "kernel", "dur": 6000.0},
        {"name": "nvjet_a", "cat": "kernel", "dur": 3000.0},
        {"name": "Memset (Device)", "cat": "gpu_memset", "dur": 30},
        {"name": "Optimizer.step#AdamW.step", "cat": "gpu_user_annotation", "dur": 9000},
        {"name": "aten::mm", "cat": "cpu_op", "dur": 9000},
        {"name": "process_name", "ph": "M"}]}) == {"nvjet_a": 3.0, "Memset (Device)": 0.01}


def test_a_steps_kernels_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "SMALL", ModelConfig(**TINY_MODEL))
    result = CliRunner().invoke(main, ["kernels"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "| a step " in result.output and "| aten::mm " in result.output
