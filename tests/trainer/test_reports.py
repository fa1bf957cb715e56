"""Reports that are one window late, as on a GPU, in whole runs on a CPU."""

import gc
import weakref
from unittest.mock import MagicMock

import pytest

from tests.support.runs import last_line_of_ours, metrics_of, summary_of, weights_of
from tests.support.workplace import forked, read_lines, succeeded
from trainer import startup
from trainer.reports import Reports

SETTINGS = {"min_train_tokens": 31 * 128, "validation_interval": 25,
            "diagnostics_interval": 10}


def with_lag(workplace, *arguments, **environment):
    return forked("tests/support/torchrun_workers.py",
                  ["train-with-lag", str(workplace.root), *workplace.arguments(*arguments)],
                  num_processes=2, environment=environment)


def test_late_reports_say_the_same_also_after_a_stop(workplace):
    workplace.add_dataset()
    prompt, late = (workplace.add_run(name, train=SETTINGS) for name in ("prompt", "late"))
    succeeded(workplace.torchrun(2, "prompt"))
    succeeded(with_lag(workplace, "late", "--max-steps", "25"))
    succeeded(with_lag(workplace, "late"))
    assert metrics_of(late) == metrics_of(prompt) and weights_of(late) == weights_of(prompt)
    assert summary_of(late)["train_loss"] == summary_of(prompt)["train_loss"]
    steps = [record for record in read_lines(late / "metrics.jsonl") if "train_loss" in record]
    seconds = [record["seconds"] for record in steps]
    assert seconds == sorted(set(seconds))  # each of its own moment
    assert all(record["tokens_per_second"] > 0 for record in steps)


def test_skipped_steps_end_a_late_run_too(workplace):
    run_dir = workplace.add_run(train=SETTINGS | {"max_skipped_steps": 8})
    workplace.add_dataset()
    result = with_lag(workplace, "tiny", DDP_TRAIN_FAILPOINT="gradient:nan")
    assert result.returncode != 0
    assert "the gradients of 10 steps in a row, up to step 10," in last_line_of_ours(result)
    assert summary_of(run_dir)["status"] == "failed"


@pytest.fixture
def reports(monkeypatch):
    reports = Reports.__new__(Reports)
    for name in ("log", "window", "prepared", "beside", "clock", "saver", "process", "run",
                 "losses"):
        monkeypatch.setattr(reports, name, MagicMock(), raising=False)
    reports._reports_speed = False
    reports.prepared.first_step, reports.saver.pop_failure.return_value = 0, ""
    return reports


def test_a_kill_while_checkpoints_are_set_aside_leaves_no_records_of_another_run(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(startup, "write_identity", lambda *_: order.append("identity"))
    monkeypatch.setattr(startup, "remove_metrics_from", lambda *_, **__: order.append("records"))
    monkeypatch.setattr(startup, "clean_up", MagicMock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(startup, "write_status", lambda *_, **__: order.append("status"))
    with pytest.raises(KeyboardInterrupt):
        startup.open_run_dir(MagicMock(), MagicMock(is_main=True), MagicMock())
    assert order == ["identity", *3 * ["records"], "status"]


def test_every_report_collects_what_reference_counts_leave(reports):
    """On every rank: activation checkpointing leaves cycles, and collection is not automatic."""
    class Cycle:
        def __init__(self):
            self.itself = self

    gc.disable()
    try:
        left = weakref.ref(Cycle())
        assert left() is not None
        reports.write(10, 0.1, waits=False)
        assert left() is None
    finally:
        gc.enable()
