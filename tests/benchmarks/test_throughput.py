"""The systems of the speed benchmark do equal work, and each measurement is kept."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from benchmarks import systems, throughput
from benchmarks.systems import Task, measure, time_steps
from benchmarks.throughput import (
    ORIGINAL,
    REFERENCE,
    WHOLE_RUN,
    RowFailed,
    differences,
    measure_row,
    read,
    run,
    tasks_of,
    write_tokens,
)
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL

SHAPE = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0}).model_dump()
NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, decay, rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=rate)

    def forward(self, ids, targets):
        logits = self.embed(ids) @ self.embed.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def task_of(name, system, num_steps=80, **changes):
    return Task(name, system, changes, SHAPE, "cpu", 2, 4, num_steps)


TASKS = [task_of(REFERENCE, "ours", precision="fp32"), task_of("ours", "ours"),
         task_of(ORIGINAL, "original"),
         task_of("Hugging Face", "hugging face", precision="fp32", compile=False)]


@pytest.fixture(scope="module")
def tokens_path(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("dataset") / "zipf", TASKS[0])


@pytest.fixture(scope="module")
def lines(tokens_path):
    """Measurements in this process."""
    return [{"row": task.name, "status": "ok"} | measure(task, tokens_path) for task in TASKS]


def test_all_systems_have_the_same_curve_and_its_speed_is_that_of_the_median_block(lines):
    assert differences(lines) == []
    for line in lines:
        assert len(line["losses"]) == 80 and line["microbatch_size"] == 2
        assert sorted(line["blocks"])[1] == line["tokens_per_second"]


def test_a_model_with_an_error_and_curves_that_prove_nothing_are_reported(lines, tokens_path,
                                                                          monkeypatch):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, k, v, **_: attention(q, k, v))  # without the mask
    line = {"row": "sees the future"} | measure(TASKS[0], tokens_path)
    (difference,) = differences([*lines, line])
    assert difference.startswith("sees the future: its losses differ")
    for losses in ([3.0] * 80, [float("nan")] * 80):
        assert "too level" in differences([lines[0] | {"losses": losses}])[-1]


def test_steps_are_timed_in_three_blocks_after_a_warm_up(monkeypatch):
    clock, taken = [0.0], []

    def step():
        taken.append(0)
        clock[0] += 9.0 if len(taken) <= 4 else 0.5 if len(taken) <= 14 else 0.1
        return len(taken)

    monkeypatch.setattr(systems.time, "perf_counter", lambda: clock[0])
    results, speed = time_steps(step, 34, 100, torch.device("cpu"))
    assert results == list(range(1, 35)) and speed["first_step_seconds"] == 9
    assert speed["blocks"] == pytest.approx([200, 1000, 1000])
    assert speed["tokens_per_second"] == pytest.approx(1000)


def test_ids_follow_zipfs_law_over_the_whole_vocabulary(tmp_path):
    path = write_tokens(tmp_path / "zipf", replace(TASKS[0], num_steps=2000))
    counts = np.bincount(systems.TokenFile(path).read(0, 128_000))
    assert len(counts) > 0.9 * SHAPE["vocab_size"]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)


def test_a_row_is_measured_in_a_process_of_its_own(tokens_path, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    nanogpt = task_of("nanoGPT", "nanogpt", 7, folder=str(tmp_path), precision="bf16")
    result = measure_row(nanogpt, tokens_path, tmp_path / "a", 200)
    assert len(result["blocks"]) == 3 and result["losses"] == []


def test_a_process_that_fails_or_takes_too_long_has_a_reason_and_leaves_no_child(tmp_path):
    with pytest.raises(RowFailed, match="^ValueError: wrong$"):
        run(["-c", "raise ValueError('wrong')"], tmp_path, 60)
    with pytest.raises(RowFailed, match="ran out of time after 3 s"):
        run(["-c", "import subprocess, time\n"
             "child = subprocess.Popen(['sleep', '600'], start_new_session=1)\n"
             "print(child.pid, flush=True)\ntime.sleep(600)"], tmp_path, 3)
    status = Path(f"/proc/{(tmp_path / 'stdout').read_text().strip()}/status")
    assert not status.exists() or "zombie" in status.read_text()


@pytest.mark.thorough  # the tests of runs train in CI
def test_a_whole_run_is_measured(tokens_path, tmp_path):
    result = measure_row(task_of(WHOLE_RUN, "whole run"), tokens_path, tmp_path / "run", 200)
    assert len(result["blocks"]) == 3 and result["seconds_by_phase"]["training"] > 0


def test_a_second_call_measures_what_is_missing_or_has_failed(monkeypatch, tmp_path):
    asked: list[str] = []
    fails = {ORIGINAL}

    def fake(task, *_):
        asked.append(task.name)
        if task.name in fails:
            raise RowFailed("not compiled: no compiler")
        return {"tokens_per_second": 1000.0 * len(asked), "precision": "fp32", "peak_mib": 9.0,
                "losses": [5 - 0.1 * step for step in range(10)], "microbatch_size": 2,
                "compile_seconds": 0.0, "machine": {"device": "a test"}}

    def call(*arguments):
        return CliRunner().invoke(throughput.main, [
            "--device", "cpu", "--output", str(tmp_path / "out.jsonl"), *arguments])

    tasks = TASKS[:3]
    monkeypatch.setattr(throughput, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(throughput, "measure_row", fake)
    first = call()
    assert first.exit_code == 1 and asked == [REFERENCE, "ours", ORIGINAL, REFERENCE]
    assert "| failed: not compiled: no compiler " in first.stdout
    assert [line["status"] for line in read(tmp_path / "out.jsonl")] == ["ok", "ok", "failed", "ok"]
    fails.clear()
    second = call()
    assert second.exit_code == 0 and asked[4:] == [ORIGINAL]
    (cells,) = [line.split("|") for line in second.stdout.splitlines() if "| ours " in line]
    assert cells[5].strip() == "2,000" and cells[10].strip() == "0.40"
    wrong = call("--only", "none")
    assert wrong.exit_code == 2 and "--only none: wanted one of" in wrong.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_divides_the_global_batch_and_has_a_name_of_its_own(device):
    tasks = tasks_of(device, Path("nanogpt"))
    assert len({(task.name, task.model) for task in tasks}) == len(tasks)
    for task in tasks:
        assert task.global_batch_size % task.microbatch_size == 0
        assert Task(**json.loads(json.dumps(asdict(task)))) == task
    assert {ORIGINAL, REFERENCE, WHOLE_RUN, "nanoGPT, bf16, compiled"} <= {
        task.name for task in tasks}
