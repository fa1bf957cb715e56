"""The console and the records on a full disk, and with a closed pipe."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from basics.errors import UserError
from basics.failpoints import VARIABLE
from processes.command_line import Options
from processes.startup_agreement import AgreedError, Agreement
from reporting.clock import PhaseClock
from reporting.console import Console
from run_config import load_run
from tests.support.fake_time import FakeTime
from tests.support.runs import SETTINGS, last_line_of_ours, summary_of, weights_of, with_fault
from tests.support.workplace import Workplace, start_forked, succeeded
from tokens.batch_plan import BatchPlan
from trainer import launcher
from trainer.reports import Reports


@pytest.fixture
def run_dir(workplace: Workplace) -> Path:
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS)


@pytest.mark.parametrize("log", ["on a full disk", "that nobody reads any more"])
def test_a_log_that_cannot_be_written_ends_no_run(
    workplace: Workplace, run_dir: Path, tmp_path: Path, log: str
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    reader = None
    if log == "on a full disk":
        for name in ("stdout", "stderr"):
            (folder / name).symlink_to("/dev/full")
    else:
        for name in ("stdout", "stderr"):
            os.mkfifo(folder / name)
        reader = [os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
                  for name in ("stdout", "stderr")]
    process, _ = start_forked("ddp_train.py", workplace.arguments("tiny"), num_processes=2,
                              folder=folder, environment={VARIABLE: "train:slow:seconds=0.2"})
    if reader is not None:
        until = time.monotonic() + 60
        while not (run_dir / "checkpoints" / "latest").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        for descriptor in reader:
            os.close(descriptor)
    process.join(timeout=60)
    assert process.exitcode == 0
    summary = summary_of(run_dir)
    assert (summary["status"], summary["global_step"]) == ("finished", 11)


def test_records_refused_by_a_full_disk_warn_once_and_are_written_later(
    workplace: Workplace, run_dir: Path
) -> None:
    faults = ";".join(f"record:full:hit={hit}" for hit in (2, 3, 5))
    result = succeeded(with_fault(workplace, faults))
    assert result.stdout.count("warning: metrics.jsonl could not be written (No space left") == 2
    steps = [json.loads(line)["global_step"]
             for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, 4, 9, 9, 11, 11]


def test_unwritten_records_are_status_4_and_the_next_launch_finishes(
    workplace: Workplace, run_dir: Path
) -> None:
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: "summary:full"})
    assert result.returncode == 4
    line = last_line_of_ours(result)
    assert "summary.json could not be written (No space left on device; make room) in" in line
    assert summary_of(run_dir)["status"] == "failed"
    weights = weights_of(run_dir)
    result = with_fault(workplace, "record:full")
    assert result.returncode == 0  # nothing was left to be recorded
    assert summary_of(run_dir)["status"] == "finished" and weights_of(run_dir) == weights


def test_a_sample_that_cannot_be_drawn_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    trained = SimpleNamespace(
        console=SimpleNamespace(say=said.append),
        prepared=SimpleNamespace(data=SimpleNamespace(tokenizer_name="gpt2")),
        _sampler=lambda: SimpleNamespace(text=draw),
        process=SimpleNamespace(device=torch.device("cpu")),
        losses=SimpleNamespace(train=SimpleNamespace(precision="fp32")))

    def draw(*_: object) -> str:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    Reports._print_sample(trained)
    assert len(said) == 1 and said[0].startswith("warning: no sample: RuntimeError: probability")


class Validating:
    """A console that reports validations, after steps of one second each."""

    def __init__(self, workplace: Workplace, now: FakeTime, *, world_size: int = 8,
                 **train: object) -> None:
        workplace.add_run(train={"validation_interval": 100, "validation_batches": None,
                                   "validation_sequences": 20} | train)
        run, plan = load_run(workplace.runs_dir, "tiny"), BatchPlan(1, 1, world_size, 16, 1000)
        self.now, self.clock, self.said = now, PhaseClock(), []
        self.console = Console(run, plan, clock=self.clock, is_active=True)
        self.console.say = self.said.append
        self.clock.enter("compile")
        self.global_step = 0

    def train_to(self, global_step: int) -> None:
        for phase, share in (("training", 0.75), ("waiting", 0.25)):
            self.clock.enter(phase)
            self.now.seconds += share * (global_step - self.global_step)
        self.global_step = global_step

    def validate(self, seconds: float) -> list[str]:
        """Return the lines after the validation's own."""
        self.said.clear()
        self.console.report_validation(self.global_step, 3.5, seconds)
        return self.said[1:]


def test_validation_that_leaves_processes_idle_is_told_once(
    workplace: Workplace, now: FakeTime
) -> None:
    validating = Validating(workplace, now)
    now.seconds += 500  # compiling says nothing about the time of a step
    assert validating.validate(15) == []
    validating.train_to(99)
    assert validating.validate(15) == [  # 15 seconds beside 100 steps
        "validation takes 13% of the time, on rank 0 while the other 7 processes wait; with"
        ' "validate_on": "all" in train.json (also when resuming) all share it: about 2.2%, the'
        " same loss"]  # 3 of 20 microbatches are dealt to rank 0
    validating.train_to(199)
    assert validating.validate(15) == []


def test_a_validation_before_the_first_step_of_a_launch_goes_by_earlier_launches(
    workplace: Workplace, now: FakeTime
) -> None:
    validating = Validating(workplace, now)
    validating.clock.resume({"training": 80.0, "waiting": 19.0}, {})
    validating.global_step = 99
    assert "takes 13% of the time" in validating.validate(15)[0]


@pytest.mark.parametrize(("train", "world_size", "seconds"), [
    ({}, 8, 2.0),  # 2% of 102 seconds is more
    ({"validate_on": "all"}, 8, 15),
    ({}, 1, 15),
    ({"validation_sequences": 1}, 8, 15),  # one microbatch cannot be shared
])
def test_validation_that_leaves_no_process_idle_for_long_is_not_told(
    workplace: Workplace, now: FakeTime, train: dict, world_size: int, seconds: float
) -> None:
    validating = Validating(workplace, now, world_size=world_size, **train)
    validating.train_to(99)
    assert validating.validate(seconds) == []


def test_the_share_is_that_of_a_run_shorter_than_its_interval(
    workplace: Workplace, now: FakeTime
) -> None:
    validating = Validating(workplace, now, validation_interval=10_000)
    validating.train_to(999)
    assert "takes 2% of the time" in validating.validate(21)[0]


@pytest.mark.parametrize("summary", [
    {"run": "tiny", "status": "running", "reason": None},
    {"run": "tiny", "status": "stopped", "reason": "SIGTERM"},
])
def test_a_search_does_not_change_the_summary_of_a_run(
    workplace: Workplace, run_dir: Path, monkeypatch: pytest.MonkeyPatch, summary: dict
) -> None:
    (run_dir / "summary.json").write_text(json.dumps(summary))
    options = Options("tiny", runs_dir=workplace.runs_dir, datasets_dir=workplace.datasets_dir,
                      find_learning_rate=True)
    for status in (0, 1):
        monkeypatch.setattr(launcher, "start_torchrun", lambda *_, status=status, **__: status)
        assert launcher.launch("ddp_train.py", options, PhaseClock(),
                               Agreement.in_one_process()) == status
        assert summary_of(run_dir) == summary


def test_a_config_changed_during_training_is_not_read_at_the_end(
    workplace: Workplace, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_torchrun(*_: object, **__: object) -> int:
        (run_dir / "train.json").write_text("{half")
        (run_dir / "summary.json").write_text('{"status": "running", "reason": null}')
        return 7

    monkeypatch.setattr(launcher, "start_torchrun", start_torchrun)
    options = Options("tiny", runs_dir=workplace.runs_dir, datasets_dir=workplace.datasets_dir)
    assert launcher.launch("ddp_train.py", replace(options, nproc_per_node=2), PhaseClock(),
                           Agreement.in_one_process()) == 7
    assert summary_of(run_dir)["status"] == "failed"


def test_an_agreed_error_keeps_its_exit_status() -> None:
    agreement = Agreement.in_one_process()

    def fail() -> None:
        raise UserError("the disk is full", 4)

    with pytest.raises(AgreedError, match="^the disk is full$") as caught:
        agreement.run("step", fail)
    assert caught.value.status == 4
