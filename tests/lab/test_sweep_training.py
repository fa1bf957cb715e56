"""A sweep with the real trainer, stopped in the middle and continued."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from basics.failpoints import VARIABLE
from lab.sweep import execution
from tests.support.lab_cli import run_lab, succeeded
from tests.support.runs import summary_of, wait_for
from tests.support.workplace import read_lines, start_forked

SLOW = "learning_rate-0.03-seed-42"  # so that it is stopped after its first checkpoint


class Forked:
    """A launch of the trainer, forked from a process that has torch loaded, like a Popen."""

    def __init__(self, command):
        _, script, name, *arguments = command
        fault = {VARIABLE: "train:slow:hit=25:seconds=1"} if name == SLOW else {}
        self._process, _ = start_forked(Path(script).name, [name, *arguments], environment=fault)

    def send_signal(self, number):
        os.kill(self._process.pid, number)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("ddp_train.py", timeout)
        return self._process.exitcode


@pytest.mark.thorough
def test_a_sweep_stopped_in_the_middle_of_a_run_is_continued(workplace, monkeypatch):
    monkeypatch.setattr(execution, "start", Forked)
    workplace.add_dataset()
    workplace.add_run(train={"gradient_accumulation_steps": 1, "min_train_tokens": 60 * 32,
                             "validation_interval": 20, "keep_checkpoints": 1})
    sweep_dir = workplace.root / "sweeps/tiny"
    arguments: list[Any] = ["sweep", "tiny", "--change", "learning_rate=0.03", "--seeds", "2",
                            "--nproc-per-node", "1", "--sweeps-dir", str(sweep_dir.parent)]
    second = sweep_dir / SLOW

    def stop_in_the_second_run():
        wait_for(second / "checkpoints/latest")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop_in_the_second_run)
    thread.start()
    result = run_lab(*workplace.arguments(*arguments))
    thread.join()
    assert result.exit_code == 128 + signal.SIGTERM, result.output
    stopped = summary_of(second)
    assert stopped["status"] == "stopped" and stopped["global_step"] < 59
    assert "1 of 2 stopped" in result.stdout
    finished = sweep_dir / "baseline-seed-42"
    before = (finished / "metrics.jsonl").read_bytes()

    result = succeeded(run_lab(*workplace.arguments(*arguments)))
    runs = sorted(path.parent.name for path in sweep_dir.glob("*/summary.json"))
    assert runs == [f"{name}-seed-{seed}" for name in ("baseline", "learning_rate-0.03")
                    for seed in (42, 43)]
    assert {summary_of(sweep_dir / run)["status"] for run in runs} == {"finished"}
    assert (finished / "metrics.jsonl").read_bytes() == before
    reports = [record["global_step"] for record in read_lines(second / "metrics.jsonl")
               if "validation_loss" in record]
    assert reports == list(range(19, 60, 20)), "each validation stands once in metrics.jsonl"
    losses = {run: summary_of(sweep_dir / run)["validation_loss"] for run in runs}
    assert len(set(losses.values())) == 4
    plan = json.loads((sweep_dir / "sweep.json").read_text())
    assert plan["num_seeds"] == 2 and len(plan["variants"]) == 2
    mean = sum(losses[f"baseline-seed-{seed}"] for seed in (42, 43)) / 2
    assert f"{mean:.4f}" in result.stdout
