"""--when-done and --after-checkpoint: commands of the user."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from basics.checkpoint_files import Identity, write_identity
from basics.errors import UserError
from processes.launch import Process
from run_config import Run, load_run
from tests.support.checkpoints import ONE_PROCESS, save
from tests.support.in_process import run_in_process
from tests.support.runs import last_line_of_ours, summary_of, wait_for
from tests.support.workplace import Workplace, read_lines, start_forked, succeeded
from trainer import user_commands
from trainer.user_commands import AfterCheckpoint, run_command, run_facts, run_when_done

ENDED = {"status": "finished", "reason": None, "global_step": 9, "num_steps": 10, "tokens": 640,
         "train_loss": 2.5, "validation_loss": 2.25, "seconds": {"training": 2.0, "chart": 1.0},
         "usd": {"training": 0.5, "total": 0.75}}
SHORT = {"gradient_accumulation_steps": 1, "min_train_tokens": 320}


def run_after(workplace: Workplace, summary: dict, command: str | None, *, stop_signal: int = 0,
              process: Process = ONE_PROCESS, has_trained: bool = True) -> Run:
    """Run a command as after a launch that has left this summary."""
    run_dir = workplace.add_run()
    (run_dir / "summary.json").write_text(json.dumps(summary))
    run = load_run(workplace.runs_dir, "tiny")
    prepared = SimpleNamespace(run=run, options=SimpleNamespace(when_done=command,
                                                                after_checkpoint=None),
                               is_finished=not has_trained)
    run_when_done(prepared, process, stop_signal=stop_signal)
    return run


@pytest.mark.parametrize(("status", "reason", "stopped_by", "stop_signal", "said"), [
    ("finished", None, None, 0, ""),
    ("stopped", "max_hours 2 is spent", "budget", 0, ""),
    ("stopped", "--max-steps", "--max-steps", 0, "not run: --max-steps ended the launch"),
    ("stopped", "SIGTERM", "signal", 0, "not run: SIGTERM ended the launch"),
    ("finished", None, None, signal.SIGINT, "not run: SIGINT ended the launch"),
    ("running", None, None, 0, "not run: the run has not ended"),
    ("failed", "rank 1 has ended", None, 0, "not run: rank 1 has ended ended the launch"),
])
def test_it_runs_after_the_end_of_the_run_or_its_budget_only(
    workplace: Workplace, capsys: pytest.CaptureFixture, status: str, reason: str | None,
    stopped_by: str | None, stop_signal: int, said: str,
) -> None:
    ended = {"status": status, "reason": reason, "stopped_by": stopped_by}
    run = run_after(workplace, ENDED | ended, "echo hello", stop_signal=stop_signal)
    lines = capsys.readouterr().out.splitlines()
    if said:
        assert lines == [f"when-done: {said}"] and "when_done" not in summary_of(run.run_dir)
        return
    assert lines[:2] == ["when-done: running echo hello", "when-done: hello"]
    assert lines[2].startswith("when-done: ended with status 0 after ")
    assert summary_of(run.run_dir) == ENDED | ended | {
        "when_done": {"status": 0}}


@pytest.mark.parametrize(("earlier", "runs"), [
    ({"when_done": {"status": 1}}, True),
    ({"when_done": {"status": 143}}, True),
    ({"when_done": {"status": None}}, True),  # killed, or the machine was
    ({}, True),  # the same, before the command began
    ({"when_done": "damaged"}, True),
    ({"when_done": {"status": 0}}, False),
])
def test_a_launch_of_a_finished_run_repeats_it_until_it_succeeds(
    workplace: Workplace, capsys: pytest.CaptureFixture, earlier: dict, runs: bool
) -> None:
    run = run_after(workplace, ENDED | earlier, "true", has_trained=False)
    said = capsys.readouterr().out
    if runs:
        assert said.startswith("when-done: running true\n")
        assert summary_of(run.run_dir)["when_done"] == {"status": 0}
    else:
        assert said == "when-done: not run: it has succeeded after an earlier launch\n"


def test_it_runs_on_rank_0_only(workplace: Workplace, capsys: pytest.CaptureFixture) -> None:
    run_after(workplace, ENDED, "echo hello", process=replace(ONE_PROCESS, rank=1))
    assert capsys.readouterr().out == ""


def test_a_command_that_fails_leaves_the_run_finished(workplace: Workplace) -> None:
    with pytest.raises(UserError, match="the run is finished, and --when-done ended with status 3"
                       ) as caught:
        run_after(workplace, ENDED, "exit 3")
    assert caught.value.status == 1
    summary = summary_of(workplace.runs_dir / "tiny")
    assert summary == ENDED | {"when_done": {"status": 3}}


def test_what_began_is_on_disk_before_the_machine_may_go(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shut_down(command: str, environment: dict[str, str]) -> tuple[int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(user_commands, "run_command", shut_down)
    with pytest.raises(KeyboardInterrupt):
        run_after(workplace, ENDED, "poweroff")
    summary = summary_of(workplace.runs_dir / "tiny")
    assert summary["when_done"] == {"status": None}


def test_it_is_told_the_facts_of_the_run(workplace: Workplace) -> None:
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


def test_it_is_not_taken_for_a_process_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID",
                 "DDP_TRAIN_SPENT_SECONDS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "of the user")
    assert run_command("env", {"DDP_TRAIN_RUN": "tiny"}) == (0, 0)
    lines = capsys.readouterr().out.replace("when-done: ", "").splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    own = set(found) & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
                        "DDP_TRAIN_SPENT_SECONDS", "TORCHELASTIC_RUN_ID"}
    assert not own and found["DDP_TRAIN_RUN"] == "tiny" and found["HF_TOKEN"] == "of the user"


def test_what_it_prints_is_shown_by_lines_and_obeyed_by_no_terminal(
    capsys: pytest.CaptureFixture
) -> None:
    command = r"printf 'a\033[2J\rb\n'; echo error >&2; printf 'no end'; exit 7"
    assert run_command(command, {}) == (7, 0)
    assert capsys.readouterr().out.splitlines() == [
        "when-done: a\\x1b[2J", "when-done: b", "when-done: error", "when-done: no end"]


def test_what_it_leaves_in_the_background_is_not_waited_for() -> None:
    assert run_command("sleep 60 & echo $! > /dev/null; kill -9 $$", {}) == (137, 0)


def test_a_stop_signal_ends_it(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(user_commands, "GRACE_SECONDS", 0.5)
    ignoring = "trap '' TERM; kill -TERM $PPID; sleep 60; sleep 60"  # its parent is this process
    with pytest.raises(UserError, match="the run is finished, and --when-done was ended by SIGTERM"
                       ) as caught:
        run_after(workplace, ENDED, ignoring)
    assert caught.value.status == 128 + signal.SIGTERM
    assert summary_of(workplace.runs_dir / "tiny")["when_done"]["status"] == 128 + signal.SIGKILL
    assert run_command("kill -INT $PPID; sleep 60", {}) == (143, signal.SIGINT)


@pytest.fixture
def saved(workplace: Workplace) -> Run:
    """A run that has a checkpoint."""
    workplace.add_run()
    run = load_run(workplace.runs_dir, "tiny")
    save(run.checkpoints_dir, 4)
    return run


def finish(command: AfterCheckpoint) -> str:
    command.start()
    return command.finish(lambda: math.inf)


def test_after_checkpoint_knows_the_run_by_name_also_where_a_shell_would_take_it_apart(
    workplace: Workplace
) -> None:
    run_dir = workplace.add_run("tiny")
    spaced = workplace.runs_dir.with_name("my runs")
    workplace.runs_dir.rename(spaced)
    run = load_run(spaced, "tiny")
    path = save(run.checkpoints_dir, 4).path
    said = workplace.root / "said"
    command = f"printf '%s\\n' {{run}} {{run_dir}} {{checkpoint}} ${{run}}- {{other}} > {said}"
    assert finish(AfterCheckpoint(command, run)) == "" and not run_dir.exists()
    assert said.read_text().splitlines() == [
        "tiny", str(spaced / "tiny"), str(path), "-", "{other}"]


def test_after_checkpoint_is_never_run_twice_at_once_and_the_newest_wins(
    saved: Run, tmp_path: Path
) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    command = AfterCheckpoint(f"echo begin {{checkpoint}} >> {log}; while [ ! -e {gate} ];"
                              f" do sleep 0.05; done; echo end >> {log}", saved)
    command.start()
    wait_for(log)
    for step in (5, 6, 7):  # meanwhile
        save(saved.checkpoints_dir, step)
        command.start()
        assert command.take_failure() == ""
    gate.touch()
    assert finish(command) == ""
    lines = log.read_text().splitlines()
    assert [line[:5] for line in lines] == ["begin", "end"] * (len(lines) // 2)
    assert 4 <= len(lines) <= 6  # of those that came meanwhile, and the end, not each one
    assert [line[-1] for line in lines[::2]] == ["4", *"7" * (len(lines) // 2 - 1)]


def test_an_after_checkpoint_that_fails_is_a_warning_and_tried_again(
    saved: Run, tmp_path: Path
) -> None:
    command = AfterCheckpoint(f"echo no space; test -e {tmp_path}/room", saved)
    assert finish(command) == (
        f"ended with status 1; {saved.run_dir / 'after-checkpoint.log'} has its output")
    assert (saved.run_dir / "after-checkpoint.log").read_text() == "no space\n"
    (tmp_path / "room").touch()
    assert finish(command) == "" and command.take_failure() == ""


def test_after_checkpoint_knows_how_far_a_run_is_that_trains(
    saved: Run, tmp_path: Path
) -> None:
    write_identity(saved.run_dir, Identity(name="abc"))
    (saved.run_dir / "summary.json").write_text('{"status": "running", "num_steps": 10}')
    save(saved.checkpoints_dir, 6, loss=2.5)
    write_identity(saved.run_dir, Identity(name="abc", earlier={"": 6}))
    facts = run_facts(saved, json.loads((saved.run_dir / "summary.json").read_text()))
    assert (facts["DDP_TRAIN_STEP"], facts["DDP_TRAIN_LOSS"], facts["DDP_TRAIN_IDENTITY"]) == (
        "7", "2.5", "abc")
    said = tmp_path / "said"
    assert finish(AfterCheckpoint(f"echo {{run}}-{{identity}} > {said}", saved)) == ""
    assert said.read_text() == "tiny-abc\n"


def test_a_finished_run_repeats_after_checkpoint_before_when_done(
    workplace: Workplace, tmp_path: Path
) -> None:
    workplace.add_run()
    (workplace.runs_dir / "tiny/summary.json").write_text(json.dumps(ENDED))
    run = load_run(workplace.runs_dir, "tiny")
    options = SimpleNamespace(when_done=f"touch {tmp_path}/done",
                              after_checkpoint="exit 1")
    prepared = SimpleNamespace(run=run, options=options, is_finished=True)
    with pytest.raises(UserError, match="--after-checkpoint: ended with status 1") as caught:
        run_when_done(prepared, ONE_PROCESS, stop_signal=0)
    assert caught.value.status == 1 and not (tmp_path / "done").exists()
    options.after_checkpoint = "kill -TERM $PPID; sleep 60"  # of the process that trains
    with pytest.raises(UserError, match="SIGTERM ended --after-checkpoint") as caught:
        run_when_done(prepared, ONE_PROCESS, stop_signal=0)
    assert caught.value.status == 143 and not (tmp_path / "done").exists()
    options.after_checkpoint = "true"
    run_when_done(prepared, ONE_PROCESS, stop_signal=0)
    assert (tmp_path / "done").exists()


def test_under_nohup_a_closed_terminal_does_not_end_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_command("kill -HUP $PPID; exit 3", {}) == (3, 0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_a_run_without_torchrun_and_again_until_it_succeeds(workplace: Workplace) -> None:
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
    assert json.loads(Path(f"{said}.json").read_text())["status"] == "finished"
    assert summary_of(run_dir)["when_done"] == {"status": 3}
    again = run_in_process(*workplace.arguments("tiny", *two_processes, "--when-done", "exit 4"))
    assert again.returncode == 1 and "--when-done ended with status 4" in again.stderr
    assert "tiny is complete" in again.stdout
    under_torchrun = succeeded(workplace.torchrun(2, "tiny", "--when-done", "exit 0"))
    assert under_torchrun.stdout.count("when-done: ended with status 0") == 1
    third = succeeded(run_in_process(
        *workplace.arguments("tiny", *two_processes, "--when-done", "exit 4")))
    assert "when-done: not run: it has succeeded after an earlier launch" in third.stdout


@pytest.mark.thorough
def test_torchrun_waits_for_it_and_a_signal_to_torchrun_ends_it(workplace: Workplace) -> None:
    run_dir = workplace.add_run(train=SHORT)
    workplace.add_dataset()
    began = workplace.root / "began"
    process, _ = start_forked("ddp_train.py", workplace.arguments(
        "tiny", "--when-done", f"echo $$ > {began}; sleep 100"), num_processes=2)
    wait_for(began)
    time.sleep(3)
    assert process.is_alive() and summary_of(run_dir)["when_done"]["status"] is None
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert not process.is_alive()
    assert summary_of(run_dir)["when_done"]["status"] == 128 + signal.SIGTERM
    assert not Path(f"/proc/{began.read_text().strip()}").exists()
    assert read_lines(run_dir / "metrics.jsonl")
