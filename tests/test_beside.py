"""What works beside training: charts, trackers, --after-checkpoint; and after it: --when-done."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest

from basics.checkpoint_files import Identity, write_identity
from basics.errors import UserError
from basics.failpoints import MARKS, VARIABLE
from basics.files import lock_directory
from ddp_train import Trainer
from processes.background import BackgroundProcess, start_module
from processes.signals import Deadlines
from reporting.clock import PhaseClock
from run_config import TrainConfig, load_run
from tests.support.models import ONE_PROCESS, save
from tests.support.runs import (
    last_line_of_ours,
    run_in_process,
    struck_by,
    summary_of,
    wait_for,
    wait_until_gone,
)
from tests.support.workplace import PROJECT_DIR, TINY_TRAIN, succeeded
from trainer import user_commands
from trainer.after_checkpoint import AfterCheckpoint
from trainer.budget import Budget
from trainer.chart_drawing import ChartDrawing
from trainer.diagnostics import NO_DIAGNOSTICS, Diagnostics
from trainer.reference_check import ReferenceCheck
from trainer.samples import Samples
from trainer.tracking import Tracking
from trainer.user_commands import execute, execute_when_done, facts_of

pytestmark = pytest.mark.processes

HANGS = "sleep 3600"


class Scripts:
    """Shell scripts that run instead of a module, one after another; the last one repeatedly.

    Each begins when it is in `started`: a test may have seen its files before.
    """

    def __init__(self, folder, *codes):
        self._folder, self._codes = folder, list(codes)
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self):
        assert all(process.poll() is not None for process in self.started), "two at a time"
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        self.started.append(
            subprocess.Popen(
                ["sh", "-c", f"read begin; {code}"],
                cwd=self._folder,
                process_group=0,
                bufsize=0,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        self.started[-1].stdin.write(b"begin\n")
        return self.started[-1]


def drawing(run_dir):
    return BackgroundProcess("chart", lambda: start_module("reporting.charts", run_dir))


def finish(process):
    return process.finish(lambda: math.inf)


def started(process):
    process.start()
    return finish(process)


def test_one_process_at_a_time_and_another_one_only_if_it_was_asked_for_meanwhile(tmp_path):
    scripts = Scripts(tmp_path, "touch began; read word", "true")
    process = BackgroundProcess("chart", scripts)
    process.start()
    wait_for(tmp_path / "began")
    for _ in range(3):
        process.start()
    assert process.pop_failure() == "" and len(scripts.started) == 1
    scripts.started[0].stdin.write(b"go on\n")
    assert finish(process) == "" and len(scripts.started) == 2
    assert finish(process) == "" and len(scripts.started) == 2  # nothing is due


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("echo no good >&2; exit 1", "no good; advice"),
        ("exit 3", "ended with status 3; advice"),
        ("kill -9 $$", "its process was ended by signal 9 (Killed); advice"),
        ("echo a note >&2", "a note; advice"),
        ("true", ""),
    ],
)
def test_what_it_says_and_how_it_failed_is_told_once(tmp_path, code, failure):
    process = BackgroundProcess("chart", Scripts(tmp_path, code), advice="; advice")
    assert started(process) == failure
    assert process.pop_failure() == finish(process) == ""
    missing = BackgroundProcess("chart", lambda: subprocess.Popen([tmp_path / "missing"]))
    assert started(missing).startswith("FileNotFoundError: ")


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    beats, pid = [], tmp_path / "pid"
    process = BackgroundProcess(
        "chart", Scripts(tmp_path, f"trap '' TERM; {HANGS} & echo $! > pid; wait; {HANGS}")
    )
    process.start()
    process.start()  # the one that waits is not started any more
    failure = process.finish(
        lambda: 0.0 if beats and pid.exists() and pid.read_text() else math.inf,
        heartbeat=lambda: beats.append(1),
    )
    assert failure.startswith("not done after ")
    wait_until_gone([int(pid.read_text())])
    assert finish(process) == "its process was ended by signal 9 (Killed)"


def test_it_is_at_the_lowest_priority_without_lock_and_torchrun(monkeypatch, tmp_path):
    for name, value in {
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        VARIABLE: "draw:hang",
        MARKS: str(tmp_path / "marks"),
    }.items():
        monkeypatch.setenv(name, value)
    lock, process = lock_directory(tmp_path), drawing(tmp_path)
    process.start()
    pid = struck_by(tmp_path / "marks")
    os.close(lock)
    os.close(lock_directory(tmp_path))  # nobody else has it
    found = psutil.Process(pid)
    assert found.nice() == 19 and found.cwd() == str(PROJECT_DIR) and not found.net_connections()
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    variables = found.environ()
    assert not [
        key
        for key in variables
        if key.startswith(("TORCHELASTIC", "MASTER")) or key.endswith(("RANK", "WORLD_SIZE"))
    ]
    assert variables["CUDA_VISIBLE_DEVICES"] == "" and variables["OMP_NUM_THREADS"] == "1"
    os.kill(pid, signal.SIGTERM)
    assert finish(process) == "its process was ended by signal 15 (Terminated)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_it_ends_with_a_process_that_is_killed(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from processes.background import BackgroundProcess, start_module\n"
        "start = lambda: start_module('reporting.charts', Path(sys.argv[1]))\n"
        "BackgroundProcess('chart', start).start()\n"
        "time.sleep(3600)"
    )
    marks = tmp_path / "marks"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=PROJECT_DIR,
        env=os.environ | {VARIABLE: "draw:hang", MARKS: str(marks)},
    )
    pid = struck_by(marks)
    assert psutil.pid_exists(pid)
    trainer.kill()
    trainer.wait(60)
    wait_until_gone([pid])


ENDED = {
    "status": "finished",
    "reason": None,
    "global_step": 9,
    "num_steps": 10,
    "tokens": 640,
    "train_loss": 2.5,
    "validation_loss": 2.25,
    "seconds": {"training": 2.0, "chart": 1.0},
    "usd": {"training": 0.5, "total": 0.75},
}
SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 320}


def run_after(
    workplace,
    summary,
    command,
    *,
    stop_signal=0,
    process=ONE_PROCESS,
    has_trained=True,
    after_checkpoint=None,
):
    """Run a command as after a launch that has left this summary."""
    if not (workplace.runs_dir / "tiny").exists():
        workplace.add_run()
    run = load_run(workplace.runs_dir, "tiny")
    run.summary_path.write_text(json.dumps(summary))
    options = SimpleNamespace(when_done=command, after_checkpoint=after_checkpoint)
    execute_when_done(run, options, process, was_finished=not has_trained, stop_signal=stop_signal)
    return run


BEFORE = {"has_trained": False}  # the run was finished before this launch


@pytest.mark.parametrize(
    ("changes", "launch", "why_not"),
    [
        ({}, {}, ""),
        ({"status": "stopped", "reason": "max_hours 2 is spent", "stopped_by": "budget"}, {}, ""),
        (
            {"status": "stopped", "reason": "--max-steps", "stopped_by": "--max-steps"},
            {},
            "--max-steps ended the launch",
        ),
        ({}, {"stop_signal": signal.SIGINT}, "SIGINT ended the launch"),
        ({"status": "running"}, {}, "the run has not ended"),
        (
            {"status": "failed", "reason": "rank 1 has ended"},
            {},
            "rank 1 has ended ended the launch",
        ),
        ({"when_done": {"status": 1}}, BEFORE, ""),
        ({"when_done": {"status": None}}, BEFORE, ""),  # killed, or the machine was
        ({}, BEFORE, ""),  # the same, before the command began
        ({"when_done": "damaged"}, BEFORE, ""),
        ({"when_done": {"status": 0}}, BEFORE, "it has succeeded after an earlier launch"),
    ],
)
def test_it_runs_on_rank_0_after_the_end_of_the_run_or_its_budget_until_it_succeeds(
    workplace, capfd, changes, launch, why_not
):
    ended = ENDED | changes
    run_after(workplace, ended, "echo", process=replace(ONE_PROCESS, rank=1))
    assert capfd.readouterr().out == ""
    run = run_after(workplace, ended, "echo hello", **launch)
    lines = capfd.readouterr().out.splitlines()
    if why_not:
        assert lines == [f"when-done: not run: {why_not}"] and summary_of(run.run_dir) == ended
        return
    assert lines[:2] == ["when-done: running echo hello", "hello"]
    assert lines[2].startswith("when-done: ended with status 0 after ")
    assert summary_of(run.run_dir) == ended | {"when_done": {"status": 0}}


def test_it_is_told_the_facts_of_the_run(workplace):
    run_dir = workplace.add_run()
    best, newest = (save(run_dir / "checkpoints", step, loss) for step, loss in ((4, 1.0), (9, 2)))
    run = load_run(workplace.runs_dir, "tiny")
    run.summary_path.write_text(json.dumps(ENDED))
    assert facts_of(run) == {
        "DDP_TRAIN_RUN": "tiny",
        "DDP_TRAIN_RUN_DIR": str(run_dir),
        "DDP_TRAIN_IDENTITY": "",
        "DDP_TRAIN_STATUS": "finished",
        "DDP_TRAIN_REASON": "",
        "DDP_TRAIN_STEP": "10",
        "DDP_TRAIN_NUM_STEPS": "10",
        "DDP_TRAIN_TOKENS": "640",
        "DDP_TRAIN_LOSS": "2.25",
        "DDP_TRAIN_CHECKPOINT": str(newest.path),
        "DDP_TRAIN_BEST": str(best.path),
        "DDP_TRAIN_SECONDS": "3.0",
        "DDP_TRAIN_USD": "0.75",
    }
    run.summary_path.write_text(json.dumps(ENDED | {"validation_loss": None, "usd": None}))
    unknown = facts_of(run)
    assert unknown["DDP_TRAIN_LOSS"] == "2.5" and unknown["DDP_TRAIN_USD"] == ""


def test_what_it_leaves_behind_is_not_waited_for_nor_what_takes_too_long(saved):
    statuses = []
    for command, limit_seconds in (
        ("sleep 60 & exit 7", math.inf),
        ("sleep 60 & kill -9 $$", math.inf),
        ("sleep 60", 0.1),
    ):
        with pytest.raises(UserError, match="ended with status") as caught:
            execute("it", command, saved, record=statuses.append, limit_seconds=limit_seconds)
        assert caught.value.status == 1
    assert statuses == [7, 137, 128 + signal.SIGTERM]


def test_a_stop_signal_ends_it(workplace, monkeypatch):
    monkeypatch.setattr(user_commands, "GRACE_SECONDS", 0.5)
    ignoring = "trap '' TERM; kill -TERM $PPID; sleep 60; sleep 60"  # its parent is this process
    with pytest.raises(
        UserError, match="the launch is over, and --when-done was ended by SIGTERM"
    ) as caught:
        run_after(workplace, ENDED, ignoring)
    assert caught.value.status == 128 + signal.SIGTERM
    assert summary_of(workplace.runs_dir / "tiny")["when_done"]["status"] == 128 + signal.SIGKILL
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
    try:
        with pytest.raises(UserError, match="ended with status 3"):
            execute("it", "kill -HUP $PPID; exit 3", load_run(workplace.runs_dir, "tiny"))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def saved(workplace):
    """A run that has a checkpoint, in a directory whose name a shell would take apart."""
    spaced = workplace.runs_dir.with_name("my runs")
    workplace.add_run()
    workplace.runs_dir.rename(spaced)
    run = load_run(spaced, "tiny")
    save(run.checkpoints_dir, 4)
    return run


def after_checkpoint(command, run):
    return AfterCheckpoint(SimpleNamespace(run=run), MagicMock(), command).background


def test_after_checkpoint_knows_the_run_and_its_newest_checkpoint(saved, tmp_path):
    write_identity(saved.run_dir, Identity(name="abc", earlier={"": 6}))
    saved.summary_path.write_text('{"status": "running", "num_steps": 10}')
    said = tmp_path / "said"
    command = after_checkpoint(
        "printf '%s\\n' {run} {run_dir} {checkpoint} {identity} ${run}- {other} $DDP_TRAIN_STEP"
        f" $DDP_TRAIN_LOSS > {said}",
        saved,
    )
    newest = save(saved.checkpoints_dir, 6, loss=2.5).path
    assert started(command) == ""
    assert said.read_text().splitlines() == [
        "tiny",
        str(saved.run_dir),
        str(newest),
        "abc",
        "-",
        "{other}",
        "7",
        "2.5",
    ]


def test_an_after_checkpoint_that_fails_is_a_warning_and_tried_again(saved, tmp_path):
    command = after_checkpoint(f"echo no space; test -e '{tmp_path}/room'", saved)
    log = saved.run_dir / "after-checkpoint.log"
    assert started(command) == f"ended with status 1; {log} has its output"
    assert log.read_text() == "no space\n"
    (tmp_path / "room").touch()
    assert started(command) == "" and command.pop_failure() == ""


def test_a_finished_run_repeats_after_checkpoint_before_when_done(workplace, tmp_path):
    def launch(after_checkpoint):
        run_after(
            workplace,
            ENDED,
            f"touch {tmp_path}/done",
            has_trained=False,
            after_checkpoint=after_checkpoint,
        )

    for command, status, message in (
        ("exit 1", 1, "--after-checkpoint ended with status 1; run the same command again"),
        ("kill -TERM $PPID; sleep 60", 143, "--after-checkpoint was ended by SIGTERM"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            launch(command)
        assert caught.value.status == status and not (tmp_path / "done").exists()
    launch("true")
    assert (tmp_path / "done").exists()


def test_after_a_run_without_torchrun_and_again_until_it_succeeds(workplace):
    run_dir = workplace.add_run(train=SHORT)
    workplace.add_dataset()
    said = workplace.root / "said"
    command = f"env > {said}; cp $DDP_TRAIN_RUN_DIR/summary.json {said}.json; exit 3"
    two_processes = ("--nproc-per-node", "2")
    result = workplace.ddp_train("tiny", *two_processes, "--when-done", command)
    assert result.returncode == 1, result.stderr
    assert last_line_of_ours(result) == (
        "Error: the launch is over, and --when-done ended with status 3; run the same command again"
    )
    facts = dict(line.split("=", 1) for line in said.read_text().splitlines() if "=" in line)
    assert facts["DDP_TRAIN_STATUS"] == "finished" and facts["DDP_TRAIN_STEP"] == "5"
    assert Path(facts["DDP_TRAIN_CHECKPOINT"]).name.endswith("-iteration-4")
    assert not facts.keys() & {"RANK", "WORLD_SIZE"}
    summary = json.loads(Path(f"{said}.json").read_text())  # the machine may go now
    assert summary["status"] == "finished" and summary["when_done"] == {"status": None}
    assert summary_of(run_dir)["when_done"] == {"status": 3}
    again = run_in_process(*workplace.arguments("tiny", *two_processes, "--when-done", "exit 4"))
    assert again.returncode == 1 and "--when-done ended with status 4" in again.stderr
    assert "tiny is complete" in again.stdout
    under_torchrun = succeeded(workplace.torchrun(2, "tiny", "--when-done", "exit 0"))
    assert under_torchrun.stdout.count("when-done: ended with status 0") == 1


def test_a_last_copy_that_fails_is_status_1_and_the_run_is_finished(workplace):
    run_dir = workplace.add_run(train=SHORT)
    workplace.add_dataset()
    result = workplace.ddp_train(
        "tiny", "--nproc-per-node", "1", "--after-checkpoint", "exit 3", "--when-done", "exit 0"
    )
    assert result.returncode == 1, result.stderr
    assert "--after-checkpoint ended with status 3; " in last_line_of_ours(result)
    summary = summary_of(run_dir)
    assert summary["status"] == "finished" and "when_done" not in summary


@pytest.mark.parametrize(("budget", "seconds"), [(1e6, 900), (300.0, 300), (1.0, 60)])
def test_the_last_command_has_the_budgets_time_and_after_a_stop_signal_the_grace(budget, seconds):
    clock, log = PhaseClock(), MagicMock()
    watchdog = MagicMock(stop_signal=0, stop_by=math.inf, deadlines=Deadlines())
    train = TrainConfig(**TINY_TRAIN, usd_per_hour=3600.0, max_cost_usd=budget)
    clock.usd_per_hour = 3600.0
    launch = SimpleNamespace(
        clock=clock, config=train, run=SimpleNamespace(run_dir=Path("x")), watchdog=watchdog
    )
    command = AfterCheckpoint(launch, log, "true")
    charts = ChartDrawing(launch, log)
    tracking = Tracking(SimpleNamespace(**vars(launch) | {"run": MagicMock(config=train)}), log)
    parts = [MagicMock(**{"finish.return_value": "no time"}) for _ in range(3)]
    for observer, part in zip((command, charts, tracking), parts, strict=True):
        observer.background = part
    charts.end(), tracking.end()
    assert "--after-checkpoint no time" in str(command.finish())
    parts[0].start.assert_called_once()
    assert charts.finish() is None and parts[1].finish.call_count == 1  # at its `end` alone
    until = parts[0].finish.call_args.args[0]
    assert until() - time.monotonic() == pytest.approx(seconds, abs=5)
    watchdog.stop_signal, watchdog.stop_by = 15, time.monotonic() + Deadlines().stop
    assert until() == watchdog.stop_by - 3  # also while it is waited for
    assert charts.end() == {} and parts[1].finish.call_count == 1
    assert [each.finish() for each in (command, charts, tracking)] == [None] * 3
    log.warn.assert_any_call("--after-checkpoint", "no time")
    for part in parts:
        assert part.finish.call_args.args[0]() < watchdog.stop_by


def test_observers_are_called_in_an_order_that_serves_the_end(tmp_path):
    """After a stop signal the command is first; a run that is behind is so before it is spent."""
    train = TrainConfig(**TINY_TRAIN, max_hours=1.0, tracker="tensorboard")
    launch = MagicMock(
        config=train, process=ONE_PROCESS, options=MagicMock(after_checkpoint="true")
    )
    launch.run.run_dir, launch.run.config, launch.run.name = tmp_path, train, "tiny"
    trainer = MagicMock(launch=launch, diagnostics=NO_DIAGNOSTICS, attention_kernel="math")
    found = [type(each) for each in Trainer.features(trainer, 0.0)]
    order = [Diagnostics, ReferenceCheck, Budget, AfterCheckpoint, ChartDrawing, Tracking, Samples]
    assert [each for each in found if each in order] == order
    launch.config, launch.reference = TrainConfig(**TINY_TRAIN), None
    launch.options.after_checkpoint = None
    found = [type(each) for each in Trainer.features(trainer, 0.0)]
    assert [each for each in found if each in order] == [Diagnostics, ChartDrawing, Samples]
