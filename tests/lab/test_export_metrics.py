import importlib.util
import sys

import pytest

from processes.run_lock import lock_run, release_run
from processes.signals import DEADLINES
from reporting import tracker
from reporting.tracker import TrackedRun
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.stand_ins import refused_network
from tests.support.trackers import add_records, add_summary, in_tensorboard, tracked_run
from tests.support.workplace import run_command
from tests.support.workplace import succeeded as process_succeeded


@pytest.fixture
def run(workplace):
    run = tracked_run(workplace, "none")
    add_records(run, 0, 1)
    return run


def export(run, *arguments):
    return succeeded(run_lab("export-metrics", "tiny", "--to", "tensorboard", *arguments,
                             "--runs-dir", str(run.run_dir.parent))).output


def test_only_what_is_new_is_sent(run, tmp_path):
    with refused_network(tmp_path / "log"):
        assert export(run) == "tensorboard: 2 records added\n"
        assert export(run) == "tensorboard: 0 records added\n"
        add_records(run, 2)
        add_summary(run, 2)
        assert export(run) == "tensorboard: 1 record added\n"
    assert not (tmp_path / "log").exists()
    values = in_tensorboard(run.run_dir / "tensorboard" / TrackedRun.load(run.run_dir).id)
    assert values["train/loss"] == [(1, 10.0), (2, 9.0), (3, 8.0)]
    assert values["final/train_loss"] == [(3, 1.5)]


def test_another_directory_and_fresh_get_everything(run, tmp_path):
    export(run)
    first = TrackedRun.load(run.run_dir)
    assert "2 records" in export(run, "--output", str(tmp_path / "out"))
    assert TrackedRun.load(run.run_dir) == first
    (place,) = (tmp_path / "out").iterdir()
    assert in_tensorboard(place)["train/loss"] == [(1, 10.0), (2, 9.0)]
    assert "2 records" in export(run, "--fresh")
    assert TrackedRun.load(run.run_dir).id != first.id
    assert len(list((run.run_dir / "tensorboard").iterdir())) == 2


def test_trackio_prints_nothing_itself(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    result = process_succeeded(run_command(
        sys.executable, "-m", "lab", "export-metrics", "tiny", "--to", "trackio", "--runs-dir",
        str(run.run_dir.parent)))  # a process: the package would print when Python exits
    assert (result.stdout, result.stderr) == ("trackio: 2 records added\n", "")


def test_what_cannot_be_exported_is_one_line(run, monkeypatch):
    def refused(status=2):
        return error_line(run_lab("export-metrics", "tiny", "--to", "tensorboard",
                                  "--runs-dir", str(run.run_dir.parent)), status=status)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "--to tensorboard needs the package tensorboard: run `uv sync" in refused()
    with monkeypatch.context() as patch:
        def fail(*_, **__):
            raise OSError("full")

        patch.setattr(tracker, "open_tracker", fail)
        assert "tensorboard has failed: OSError: full; the same command" in refused(1)
    lock_run(run.run_dir)
    monkeypatch.setenv(DEADLINES, '{"orphans": 0}')
    try:
        with monkeypatch.context() as patch:
            patch.setattr("lab.export_metrics.release_run", lambda: None)
            assert "another launch is training this run" in refused()
    finally:
        release_run()
    run.metrics_path.unlink()
    assert "metrics.jsonl: no such file; train the run first" in refused()
