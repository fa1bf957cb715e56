from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from basics.directory_lock import lock_directory
from basics.failpoints import MARKS, VARIABLE
from processes import helper_process
from reporting import chart_process
from reporting.chart_process import ChartProcess
from reporting.charts import draw_charts
from reporting.metrics_file import read_metrics
from tests.support.workplace import PROJECT_DIR

CHARTS = ("loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png")
LOSSES_AND_NORMS = ("train_loss", "train_loss_min", "train_loss_max", "grad_norm", "grad_norm_max")
HANGS = ["import time; time.sleep(3600)"]


def add_record(run_dir: Path, global_step: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"global_step": global_step, "learning_rate": 0.1,
                               **dict.fromkeys(LOSSES_AND_NORMS, 1.0 + global_step)}) + "\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "drawn" / "tiny"
    path.mkdir(parents=True)
    add_record(path, 0)
    add_record(path, 1)
    return path


@pytest.fixture
def drawing(run_dir: Path) -> Iterator[ChartProcess]:
    process = ChartProcess(run_dir)
    yield process
    process._end()


class StandIns:
    """Python code that runs instead of drawings, one after another; the last one repeatedly."""

    def __init__(self, *codes: str) -> None:
        self._codes, self.started, self.niceness = list(codes), [], []

    def __call__(self, run_dir: Path, niceness: int) -> subprocess.Popen[bytes]:
        assert all(process.poll() is not None for process in self.started), "two at a time"
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        self.niceness.append(niceness)
        self.started.append(subprocess.Popen(
            [sys.executable, "-S", "-c", code], cwd=run_dir, process_group=0, bufsize=0,
            stderr=subprocess.PIPE))
        return self.started[-1]


def stand_in(monkeypatch: pytest.MonkeyPatch, *codes: str) -> StandIns:
    instead = StandIns(*codes)
    monkeypatch.setattr(chart_process, "start_process", instead)
    return instead


def long() -> float:
    return 60.0


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"process {pid} lives on"
            time.sleep(0.02)


def struck_pid(marks: Path) -> int:
    """Wait until a drawing has come to its failpoint; return its process."""
    until = time.monotonic() + 60
    while not (marks.exists() and marks.read_text().endswith("\n")):
        assert time.monotonic() < until, "no drawing has begun"
        time.sleep(0.02)
    return int(marks.read_text().split()[3])


def test_the_last_drawing_shows_records_that_came_while_one_ran(
    drawing: ChartProcess, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "draw:hang")
    assert drawing.start() == ""
    monkeypatch.delenv(VARIABLE)
    add_record(run_dir, 2)
    assert drawing.start() == "" and drawing.finish(long) == ""
    directly = tmp_path / "directly" / run_dir.name  # their title is the run's name
    directly.mkdir(parents=True)
    draw_charts(directly, read_metrics(run_dir / "metrics.jsonl"))
    assert {path.name for path in run_dir.iterdir()} == {"metrics.jsonl", *CHARTS}
    for name in CHARTS:
        assert (run_dir / name).read_bytes() == (directly / name).read_bytes()


def test_a_drawing_is_alone_at_the_lowest_priority_without_lock_and_torchrun(
    drawing: ChartProcess, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "1",
                        "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0",
                        VARIABLE: "draw:hang", MARKS: str(tmp_path / "marks")}.items():
        monkeypatch.setenv(name, value)
    lock = lock_directory(run_dir)
    drawing.start()
    pid = struck_pid(tmp_path / "marks")
    os.close(lock)
    os.close(lock_directory(run_dir))  # nobody else has it
    process = psutil.Process(pid)
    assert process.nice() == 19
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    assert not process.net_connections() and process.cwd() == str(PROJECT_DIR)
    environment = process.environ()
    assert not [key for key in environment if key.startswith(("TORCHELASTIC", "MASTER"))
                or key.endswith(("RANK", "WORLD_SIZE"))]
    assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["OMP_NUM_THREADS"] == "1"
    os.kill(pid, signal.SIGTERM)
    drawing._process.wait(60)
    assert drawing.take_failure() == "the drawing process was ended by signal 15 (Terminated)"
    assert drawing.take_failure() == ""


def test_one_drawing_at_a_time_and_never_more_than_one_due(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = stand_in(monkeypatch, *HANGS, "pass")
    assert [drawing.start() for _ in range(4)] == [""] * 4
    assert len(instead.started) == 1
    assert drawing.finish(long) == ""
    assert [process.returncode for process in instead.started] == [-signal.SIGKILL, 0]
    assert instead.niceness == [19, 0]  # nothing is trained beside the last one
    assert drawing.finish(long) == "" and len(instead.started) == 2  # nothing is due


def test_a_drawing_that_was_due_while_another_ran_is_done_at_the_end(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = stand_in(monkeypatch, *HANGS, "pass")
    drawing.start()
    drawing.start()
    os.kill(instead.started[0].pid, signal.SIGTERM)
    instead.started[0].wait(60)
    assert "signal 15" in drawing.take_failure()
    assert drawing.finish(long) == "" and len(instead.started) == 2


@pytest.mark.parametrize(("fault", "failure"), [
    ("raise", "RuntimeError: failpoint draw"), ("full", "OSError: [Errno 28] No space left on"),
    ("kill", "the drawing process was ended by signal 9 (Killed)")])
def test_a_drawing_that_fails_is_told_once(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch, fault: str, failure: str
) -> None:
    monkeypatch.setenv(VARIABLE, f"draw:{fault}")
    assert drawing.start() == ""
    drawing._process.wait(60)
    assert drawing.take_failure().startswith(failure)
    assert drawing.take_failure() == drawing.finish(long) == ""


def test_a_drawing_that_fails_last_is_told_at_the_end(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "raise SystemExit('first\\nlast\\n')")
    drawing.start()
    assert drawing.finish(long) == "last"


def test_a_failure_of_one_drawing_is_told_when_the_next_begins(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = stand_in(monkeypatch, "raise SystemExit(3)", "pass")
    drawing.start()
    instead.started[0].wait(60)
    assert drawing.start() == "exit status 3"
    assert drawing.finish(long) == ""


def test_a_drawing_that_hangs_is_ended_and_heartbeats_are_sent_until_then(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeats = []
    drawing = ChartProcess(run_dir, heartbeat=lambda: heartbeats.append(1))
    instead = stand_in(monkeypatch, *HANGS)
    drawing.start()
    (run_dir / ".loss-chart.png.partial").write_bytes(b"half")
    limits = iter([60, 60, 0.5, 0.5])  # a stop signal shortens it
    assert drawing.finish(lambda: next(limits)) == "the drawing took longer than 0.5 s"
    assert not list(run_dir.glob("*.partial"))
    assert len(heartbeats) == 3
    assert [process.returncode for process in instead.started] == [-signal.SIGKILL] * 2


def test_what_a_drawing_has_started_does_not_hold_up_the_run(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its stderr stays open as long as one of them lives."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nsleep 3600 &\necho $! > pid; exit 7\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(helper_process, "PROJECT_DIR", tmp_path)
    drawing.start()
    process = drawing._process
    process.wait(60)
    assert drawing.take_failure() == "exit status 7"
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_process_that_cannot_be_started_is_a_failure_and_no_error(
    drawing: ChartProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert drawing.start().startswith("FileNotFoundError: ")
    assert drawing.finish(long) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_drawing_ends_with_a_process_that_is_killed(run_dir: Path, tmp_path: Path) -> None:
    code = ("import sys, time\nfrom pathlib import Path\n"
            "from reporting.chart_process import ChartProcess\n"
            "ChartProcess(Path(sys.argv[1])).start()\ntime.sleep(3600)")
    marks = tmp_path / "marks"
    trainer = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], cwd=PROJECT_DIR,
                               env=os.environ | {VARIABLE: "draw:hang", MARKS: str(marks)})
    pid = struck_pid(marks)
    assert psutil.pid_exists(pid)
    trainer.kill()
    trainer.wait(60)
    wait_until_gone(pid)


def test_a_drawing_whose_parent_has_ended_before_draws_nothing(run_dir: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    result = subprocess.run([sys.executable, "-m", "reporting.chart_process", str(run_dir), "0",
                             str(ended.pid)], cwd=PROJECT_DIR, capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert [path.name for path in run_dir.iterdir()] == ["metrics.jsonl"]
