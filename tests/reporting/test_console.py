"""The console and the records on a full disk, and with a closed pipe."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from basics.errors import UserError
from basics.failpoints import VARIABLE
from processes.command_line import Options
from processes.startup_agreement import AgreedError, Agreement
from reporting.clock import PhaseClock
from tests.support.runs import SETTINGS, last_line_of_ours, summary_of, weights_of, with_fault
from tests.support.workplace import Workplace, start_forked, succeeded
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
    assert "summary.json could not be written (No space left on device); free disk" in line
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
        _sampler=lambda: SimpleNamespace(text=draw), _inference=nullcontext)

    def draw(*_: object) -> str:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    Reports._print_sample(trained)
    assert len(said) == 1 and said[0].startswith("warning: no sample: RuntimeError: probability")


@pytest.mark.parametrize("summary", [
    {"run": "tiny", "status": "running", "reason": None},
    {"run": "tiny", "status": "stopped", "reason": "SIGTERM"},
])
def test_a_search_does_not_change_the_summary_of_a_run(
    workplace: Workplace, run_dir: Path, monkeypatch: pytest.MonkeyPatch, summary: dict
) -> None:
    (run_dir / "summary.json").write_text(json.dumps(summary))
    options = Options("tiny", runs_dir=workplace.runs_dir, datasets_dir=workplace.datasets_dir,
                      find_max_microbatch=True)
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
