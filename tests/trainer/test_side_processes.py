"""Commands of the user, and how long all that runs beside training is waited for at the end."""

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from basics.checkpoint_files import Identity, write_identity
from basics.errors import UserError
from processes.signals import Deadlines
from reporting.clock import PhaseClock
from run_config import TrainConfig, load_run
from tests.support.models import ONE_PROCESS, save
from tests.support.runs import last_line_of_ours, run_in_process, summary_of, wait_for
from tests.support.workplace import (
    TINY_TRAIN,
    read_lines,
    start_forked,
    succeeded,
)
from trainer import side_processes
from trainer.reports import Reports
from trainer.side_processes import (
    SideProcesses,
    after_checkpoint,
    run_command,
    run_facts,
    run_when_done,
)

ENDED = {"status": "finished", "reason": None, "global_step": 9, "num_steps": 10, "tokens": 640,
         "train_loss": 2.5, "validation_loss": 2.25, "seconds": {"training": 2.0, "chart": 1.0},
         "usd": {"training": 0.5, "total": 0.75}}
SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 320}


def run_after(workplace, summary, command, *, stop_signal=0, process=ONE_PROCESS, has_trained=True,
              after_checkpoint=None):
    """Run a command as after a launch that has left this summary."""
    if not (workplace.runs_dir / "tiny").exists():
        workplace.add_run()
    run = load_run(workplace.runs_dir, "tiny")
    run.summary_path.write_text(json.dumps(summary))
    options = SimpleNamespace(when_done=command, after_checkpoint=after_checkpoint)
    prepared = SimpleNamespace(run=run, options=options, is_finished=not has_trained)
    run_when_done(prepared, process, stop_signal=stop_signal)
    return run


BEFORE = {"has_trained": False}  # the run was finished before this launch


@pytest.mark.parametrize(("changes", "launch", "why_not"), [
    ({}, {}, ""),
    ({"status": "stopped", "reason": "max_hours 2 is spent", "stopped_by": "budget"}, {}, ""),
    ({"status": "stopped", "reason": "--max-steps", "stopped_by": "--max-steps"}, {},
     "--max-steps ended the launch"),
    ({}, {"stop_signal": signal.SIGINT}, "SIGINT ended the launch"),
    ({"status": "running"}, {}, "the run has not ended"),
    ({"status": "failed", "reason": "rank 1 has ended"}, {}, "rank 1 has ended ended the launch"),
    ({"when_done": {"status": 1}}, BEFORE, ""),
    ({"when_done": {"status": None}}, BEFORE, ""),  # killed, or the machine was
    ({}, BEFORE, ""),  # the same, before the command began
    ({"when_done": "damaged"}, BEFORE, ""),
    ({"when_done": {"status": 0}}, BEFORE, "it has succeeded after an earlier launch"),
])
def test_it_runs_after_the_end_of_the_run_or_its_budget_until_it_succeeds_on_rank_0_only(workplace,
                                                                                         capfd,
                                                                                         changes,
                                                                                         launch,
                                                                                         why_not):
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


def test_a_command_that_prints_succeeds_where_the_disk_of_the_log_is_full(workplace, monkeypatch):
    before, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    try:
        run = run_after(workplace, ENDED, "echo hello")
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(full)
    assert summary_of(run.run_dir)["when_done"] == {"status": 0}


def test_it_is_told_the_facts_of_the_run(workplace):
    run_dir = workplace.add_run()
    best, newest = (save(run_dir / "checkpoints", step, loss) for step, loss in ((4, 1.0), (9, 2)))
    run = load_run(workplace.runs_dir, "tiny")
    assert run_facts(run, ENDED) == {
        "DDP_TRAIN_RUN": "tiny", "DDP_TRAIN_RUN_DIR": str(run_dir), "DDP_TRAIN_IDENTITY": "",
        "DDP_TRAIN_STATUS": "finished", "DDP_TRAIN_REASON": "", "DDP_TRAIN_STEP": "10",
        "DDP_TRAIN_NUM_STEPS": "10", "DDP_TRAIN_TOKENS": "640", "DDP_TRAIN_LOSS": "2.25",
        "DDP_TRAIN_CHECKPOINT": str(newest.path), "DDP_TRAIN_BEST": str(best.path),
        "DDP_TRAIN_SECONDS": "3.0", "DDP_TRAIN_USD": "0.75"}
    unknown = run_facts(run, ENDED | {"validation_loss": None, "usd": None})
    assert unknown["DDP_TRAIN_LOSS"] == "2.5" and unknown["DDP_TRAIN_USD"] == ""


def test_what_it_leaves_behind_is_not_waited_for():
    assert run_command("sleep 60 & exit 7", {}) == (7, 0)
    assert run_command("sleep 60 & kill -9 $$", {}) == (137, 0)


def test_a_stop_signal_ends_it(workplace, monkeypatch):
    monkeypatch.setattr(side_processes, "GRACE_SECONDS", 0.5)
    ignoring = "trap '' TERM; kill -TERM $PPID; sleep 60; sleep 60"  # its parent is this process
    with pytest.raises(UserError, match="the run is finished, and --when-done was ended by SIGTERM"
                       ) as caught:
        run_after(workplace, ENDED, ignoring)
    assert caught.value.status == 128 + signal.SIGTERM
    assert summary_of(workplace.runs_dir / "tiny")["when_done"]["status"] == 128 + signal.SIGKILL
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
    try:
        assert run_command("kill -HUP $PPID; exit 3", {}) == (3, 0)
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


def finish(command):
    command.start()
    return command.finish(lambda: math.inf)


def test_after_checkpoint_knows_the_run_and_its_newest_checkpoint(saved, tmp_path):
    write_identity(saved.run_dir, Identity(name="abc", earlier={"": 6}))
    saved.summary_path.write_text('{"status": "running", "num_steps": 10}')
    said = tmp_path / "said"
    command = after_checkpoint(
        "printf '%s\\n' {run} {run_dir} {checkpoint} {identity} ${run}- {other} $DDP_TRAIN_STEP"
        f" $DDP_TRAIN_LOSS > {said}", saved)
    newest = save(saved.checkpoints_dir, 6, loss=2.5).path
    assert finish(command) == ""
    assert said.read_text().splitlines() == [
        "tiny", str(saved.run_dir), str(newest), "abc", "-", "{other}", "7", "2.5"]


def test_an_after_checkpoint_that_fails_is_a_warning_and_tried_again(saved, tmp_path):
    command = after_checkpoint(f"echo no space; test -e '{tmp_path}/room'", saved)
    log = saved.run_dir / "after-checkpoint.log"
    assert finish(command) == f"ended with status 1; {log} has its output"
    assert log.read_text() == "no space\n"
    (tmp_path / "room").touch()
    assert finish(command) == "" and command.pop_failure() == ""


def test_a_finished_run_repeats_after_checkpoint_before_when_done(workplace, tmp_path):
    def launch(after_checkpoint):
        run_after(workplace, ENDED, f"touch {tmp_path}/done", has_trained=False,
                  after_checkpoint=after_checkpoint)

    for command, status, message in (
        ("exit 1", 1, "--after-checkpoint: ended with status 1"),
        ("kill -TERM $PPID; sleep 60", 143, "SIGTERM ended --after-checkpoint"),
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
        "Error: the run is finished, and --when-done ended with status 3")
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


@pytest.mark.thorough
def test_torchrun_waits_for_it_and_a_signal_to_torchrun_ends_it(workplace):
    run_dir = workplace.add_run(train=SHORT)
    workplace.add_dataset()
    began = workplace.root / "began"
    process, _ = start_forked("ddp_train.py", workplace.arguments(
        "tiny", "--when-done", f"echo $$ > {began}; sleep 100"), num_processes=2)
    wait_for(began)
    assert process.is_alive() and summary_of(run_dir)["when_done"]["status"] is None
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert not process.is_alive()
    assert summary_of(run_dir)["when_done"]["status"] == 128 + signal.SIGTERM
    assert not Path(f"/proc/{began.read_text().strip()}").exists()
    assert read_lines(run_dir / "metrics.jsonl")


class End:
    """The end of a launch, at second 1000 of a clock that only waiting moves; all hang."""

    def __init__(self, monkeypatch, *, stop_at=math.inf, **train):
        self.now, self.stop_at = 1000.0, stop_at
        self.waited: dict[str, float] = {}
        self.log, self.watchdog = MagicMock(), MagicMock(
            stop_signal=0, stop_by=math.inf, deadlines=Deadlines())
        clock = PhaseClock()
        clock.usd_per_hour = 3600.0
        run = SimpleNamespace(train=TrainConfig(**TINY_TRAIN | train))
        self.beside = SideProcesses.__new__(SideProcesses)
        vars(self.beside).update(
            _watchdog=self.watchdog, _clock=clock, _prepared=SimpleNamespace(run=run),
            _log=self.log, _tracker_failed="tracker", charts=self.process("charts"),
            tracker=self.process("tracker"), after_checkpoint=self.process("command"))
        monkeypatch.setattr(side_processes.time, "monotonic", lambda: self.now)
        self.stop_if_due()

    def process(self, name):
        return MagicMock(finish=lambda until, heartbeat: self.hang(name, until))

    def hang(self, name, until):
        """Wait as long as it is allowed."""
        began = self.now
        while self.now < until():
            self.now += 0.25
            self.stop_if_due()
        self.waited[name] = self.now - began
        return "no time"

    def stop_if_due(self):
        if self.now == self.stop_at:
            self.watchdog.stop_signal, self.watchdog.stop_by = 15, self.now + Deadlines().stop


@pytest.mark.parametrize(("budget", "seconds"), [(1e6, 900), (300.0, 300), (1.0, 60)])
def test_a_last_command_that_fails_is_told_and_waited_for_within_the_budget(monkeypatch, budget,
                                                                            seconds):
    end = End(monkeypatch, usd_per_hour=3600.0, max_cost_usd=budget)
    assert end.beside.finish() == "no time"
    end.beside.after_checkpoint.start.assert_called_once()
    assert end.waited["command"] == pytest.approx(seconds, abs=5)


@pytest.mark.parametrize(("stop_at", "waited"), [
    (1000.0, {"command": 10.0, "charts": 2.0, "tracker": 0.0}),
    (1100.0, {"command": 110.0, "charts": 2.0, "tracker": 0.0})])  # while the command is waited for
def test_after_a_stop_signal_all_end_within_one_grace_and_a_failure_is_a_warning(monkeypatch,
                                                                                 stop_at, waited):
    end = End(monkeypatch, stop_at=stop_at)
    assert end.beside.finish() == ""
    assert end.waited == waited and end.now < end.watchdog.stop_by
    end.log.warn.assert_any_call("--after-checkpoint", "no time")


@pytest.mark.parametrize(("failure", "unwritten", "status", "message"), [
    ("", "", None, ""),
    ("no space", "", 1, "--after-checkpoint: no space; the check"),
    ("no space", "summary.json: full", 4, "summary.json: full"),
])
def test_a_launch_ends_with_its_worst_failure_and_a_whole_summary_stays(monkeypatch, failure,
                                                                        unwritten, status, message):
    reports, log = Reports.__new__(Reports), MagicMock()
    log.finish.return_value = unwritten
    vars(reports).update(
        prepared=MagicMock(data=SimpleNamespace(tokenizer_name=None)), run=MagicMock(), log=log,
        plan=SimpleNamespace(num_steps=6), process=MagicMock(), meter=MagicMock(), code="",
        clock=PhaseClock(), losses=MagicMock(), watchdog=MagicMock(stop_signal=0),
        saver=MagicMock(is_behind=False, pop_failure=lambda: ""), _has_ended=False,
        beside=SimpleNamespace(finish=lambda: failure, finish_charts=lambda: None))
    monkeypatch.setattr("trainer.reports.list_checkpoints", lambda _: [])
    monkeypatch.setattr("trainer.reports.machine_facts", lambda *_: {})
    try:
        reports.end(5, stop_reason=None, lacks_validation=False)
        assert status is None
    except UserError as error:
        assert error.status == status and message in str(error)
    reports._before_exit("failed", "so the watchdog says")
    assert log.write_status.called == bool(unwritten)
