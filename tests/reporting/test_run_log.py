"""The log and the records of a run on a full disk, and with a closed pipe."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from basics.failpoints import VARIABLE
from processes.command_line import Options
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from reporting.run_log import RunLog
from run_config import load_run
from tests.support.runs import SETTINGS, last_line_of_ours, summary_of, weights_of, with_fault
from tests.support.workplace import start_forked, succeeded
from tokens.batch_plan import BatchPlan
from trainer import launcher
from trainer.reports import Reports


@pytest.fixture
def run_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS)


def test_a_log_on_a_full_disk_ends_no_run(workplace, run_dir, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("stdout", "stderr"):
        (folder / name).symlink_to("/dev/full")
    process, _ = start_forked("ddp_train.py", workplace.arguments("tiny"), num_processes=2,
                              folder=folder)
    process.join(timeout=60)
    assert process.exitcode == 0
    summary = summary_of(run_dir)
    assert (summary["status"], summary["global_step"]) == ("finished", 11)


def test_a_log_that_nobody_reads_any_more_ends_no_run(workplace, run_dir, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", open(writer, "w"))
    log = RunLog(load_run(workplace.runs_dir, "tiny"), BatchPlan(1, 1, 2, 16, 1000),
                 clock=PhaseClock(), is_active=True)
    log.say("a line")
    log.report_validation(4, 3.5, 1.0)
    with pytest.raises(BrokenPipeError):
        sys.stdout.close()
    assert '"validation_loss": 3.5' in (run_dir / "metrics.jsonl").read_text()


def test_records_refused_by_a_full_disk_warn_once_and_are_written_later(workplace, run_dir):
    faults = ";".join(f"record:full:hit={hit}" for hit in (2, 3, 5))
    result = succeeded(with_fault(workplace, faults))
    assert result.stdout.count("warning: metrics.jsonl could not be written (No space left") == 2
    steps = [json.loads(line)["global_step"]
             for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, 4, 9, 9, 11, 11]


def test_unwritten_records_are_status_4_and_the_next_launch_finishes(workplace, run_dir):
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: "summary:full"})
    assert result.returncode == 4
    line = last_line_of_ours(result)
    assert "summary.json could not be written (No space left on device; make room) in" in line
    assert summary_of(run_dir)["status"] == "failed"
    weights = weights_of(run_dir)
    result = with_fault(workplace, "record:full")
    assert result.returncode == 0  # nothing was left to be recorded
    assert summary_of(run_dir)["status"] == "finished" and weights_of(run_dir) == weights


def test_a_sample_that_cannot_be_drawn_is_a_warning(monkeypatch):
    said: list[str] = []
    trained = SimpleNamespace(
        log=SimpleNamespace(say=said.append),
        prepared=SimpleNamespace(data=SimpleNamespace(tokenizer_name="gpt2")),
        _sampler=lambda: SimpleNamespace(text=draw),
        process=SimpleNamespace(device=torch.device("cpu")),
        losses=SimpleNamespace(train=SimpleNamespace(precision="fp32")))

    def draw(*_):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    Reports._print_sample(trained)
    assert len(said) == 1 and said[0].startswith("warning: no sample: RuntimeError: probability")


def test_a_config_changed_during_training_is_not_read_at_the_end(workplace, run_dir, monkeypatch):
    def start_torchrun(*_, **__):
        (run_dir / "train.json").write_text("{half")
        (run_dir / "summary.json").write_text('{"status": "running", "reason": null}')
        return 7

    monkeypatch.setattr(launcher, "start_torchrun", start_torchrun)
    options = Options("tiny", runs_dir=workplace.runs_dir, datasets_dir=workplace.datasets_dir)
    assert launcher.launch("ddp_train.py", replace(options, nproc_per_node=2), PhaseClock(),
                           Agreement.in_one_process()) == 7
    assert summary_of(run_dir)["status"] == "failed"
