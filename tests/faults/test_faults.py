"""Faults of a run: how it ends, and that the same command resumes it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from basics.checkpoint_files import named_as_checkpoints
from basics.errors import UserError
from basics.failpoints import MARKS, VARIABLE
from checkpointing import newest_whole, open_checkpoint
from reporting.clock import PhaseClock
from reporting.metrics_file import METRICS
from reporting.tracker import TrackedRun
from run_config import load_run
from tests.support.models import ONE_PROCESS
from tests.support.runs import (
    SETTINGS,
    SLOW_AT_THE_END,
    last_line_of_ours,
    metrics_of,
    summary_of,
    thorough_but,
    validations_of,
    wait_for,
    wait_until_gone,
    weights_of,
    with_deadlines,
    with_fault,
)
from tests.support.trackers import in_tensorboard
from tests.support.workplace import PROJECT_DIR, ended, read_lines, start_forked, succeeded
from trainer import startup


@pytest.fixture
def run_dir(workplace):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS)


def assert_resumes_to_the_same_result(workplace, run_dir, undisturbed, *, stopped_between=False):
    """Resume; a run stopped between two reports has one more report line."""
    succeeded(workplace.torchrun(2, "tiny"))
    assert weights_of(run_dir) == weights_of(undisturbed)
    found, wanted = metrics_of(run_dir), metrics_of(undisturbed)
    if stopped_between:
        found, wanted = validations_of(run_dir), validations_of(undisturbed)
    assert found == wanted
    assert summary_of(run_dir)["status"] == "finished"
    assert not named_as_checkpoints(run_dir / "checkpoints", partial=True)


# Step 7, on either rank; the second batch of the validation after step 10, which is rank 0's.
PLACES = [("train", 0, 7), ("train", 1, 7), ("validate", 0, 5)]


# After step 10, and after the last one, where the run is trained to its end but has not got there.
@pytest.mark.parametrize(
    ("place", "hit"),
    thorough_but(
        [
            ("save.optimizer", 2),
            ("save.manifest", 2),
            ("save.links", 2),
            ("validate", 2),
            ("save.validation", 2),
            ("chart", 2),
            ("save.validation", 3),
        ],
        [
            *(
                (place, 2)
                for place in (
                    "save.snapshot",
                    "save.meta",
                    "save.weights",
                    "save.optimizer",
                    "save.manifest",
                    "save.links",
                    "validate",
                    "save.validation",
                    "chart",
                )
            ),
            ("save.manifest", 3),
            ("save.validation", 3),
            ("chart", 3),
        ],
    ),
)
def test_killed_anywhere_between_two_steps(workplace, run_dir, undisturbed, place, hit):
    assert with_fault(workplace, f"{place}:kill:rank=0:hit={hit}").returncode != 0
    assert_resumes_to_the_same_result(workplace, run_dir, undisturbed)
    assert summary_of(run_dir)["best"]["loss"] == summary_of(undisturbed)["best"]["loss"]
    charts = [path / "loss-chart.png" for path in (run_dir, undisturbed)]
    assert charts[0].read_bytes() == charts[1].read_bytes()


def test_a_kill_during_a_validation_costs_no_step(workplace, undisturbed):
    workplace.add_dataset()
    run_dir = workplace.add_run()
    # In the last validation, as soon as the checkpoint before it is whole: links are renewed at the
    # start and after each write of a checkpoint or of a validation.
    fault = "validate:slow:rank=0:hit=8:seconds=60;save.links:kill:hit=6"
    assert with_fault(workplace, fault).returncode != 0
    newest = newest_whole(run_dir / "checkpoints")[0]
    assert newest.meta.global_step == 11 and newest.validation is None
    result = succeeded(workplace.torchrun(2, "tiny"))
    assert f"resuming from {newest.path}" in result.stdout
    validated = open_checkpoint(newest.path, thoroughly=True)
    assert validated.loss == validations_of(undisturbed)[-1]["validation_loss"]
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)


@pytest.mark.parametrize(
    "place",
    thorough_but(
        ["save.weights", "save.manifest"],
        ["save.meta", "save.weights", "save.optimizer", "save.manifest"],
    ),
)
def test_a_full_disk_costs_one_checkpoint(workplace, run_dir, undisturbed, place):
    # The validation that follows tries again.
    result = succeeded(with_fault(workplace, f"{place}:full:hit=2;{place}:full:rank=0:hit=2"))
    assert (
        "warning: the checkpoint of step 10 could not be written (No space left on device;"
        " make room) in "
    ) in result.stdout
    steps = {path.name.split("-")[-1] for path in (run_dir / "checkpoints").iterdir()}
    assert {step for step in steps if step.isdigit()} == {"4", "11"}
    assert weights_of(run_dir) == weights_of(undisturbed)


def test_a_disk_that_stays_full_is_status_4_and_nothing_whole_is_lost(
    workplace, run_dir, undisturbed
):
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "5"))
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: "save.meta:full"})
    assert result.returncode == 4
    assert result.stdout.count("could not be written (No space left on device; make room)") >= 1
    line = last_line_of_ours(result)
    assert "the checkpoint of step 12 could not be written" in line and "make room" in line
    assert_resumes_to_the_same_result(workplace, run_dir, undisturbed)


@pytest.mark.parametrize(
    ("number", "name", "place", "rank", "hit"),
    thorough_but(
        [
            (15, "SIGTERM", "train", 0, 7),
            (2, "SIGINT", "validate", 0, 5),
            (10, "SIGUSR1", "train", 1, 7),
        ],
        [
            (*asked, *place)
            for asked in ((15, "SIGTERM"), (2, "SIGINT"), (10, "SIGUSR1"), (1, "SIGHUP"))
            for place in PLACES
        ],
    ),
)
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(
    workplace, run_dir, undisturbed, number, name, rank, place, hit
):
    fault = f"{place}:signal:rank={rank}:hit={hit}:number={number};{SLOW_AT_THE_END.format(0.05)}"
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: fault})
    assert result.returncode == 128 + number, result.stderr
    summary = summary_of(run_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", name)
    assert "sample:" not in result.stdout  # the time until the machine is gone is short
    stopped_after = summary["global_step"]  # slowed down, for the time until all have heard of it
    assert {"train": 6, "validate": 9}[place] <= stopped_after < 11
    assert_resumes_to_the_same_result(
        workplace, run_dir, undisturbed, stopped_between=stopped_after != 9
    )
    steps = [r["global_step"] for r in read_lines(run_dir / "metrics.jsonl") if "train_loss" in r]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("place", "trains"), [("worker", False), ("compile", False), ("train", True)]
)
def test_a_signal_to_one_process_ends_a_torchrun_that_restarts_failed_ones(
    workplace, run_dir, undisturbed, tmp_path, place, trains
):
    """Before the watchdog, before the first step, and in a step."""
    process, _ = start_forked(
        "ddp_train.py",
        workplace.arguments("tiny"),
        num_processes=2,
        folder=tmp_path,
        max_restarts=2,
        environment={
            MARKS: str(tmp_path / "marks"),
            VARIABLE: f"{place}:signal:number=15:rank=1:hit=1;{SLOW_AT_THE_END.format(0.05)}",
        },
    )
    process.join(timeout=200)
    assert process.exitcode == 1
    signals = [line for line in (tmp_path / "marks").read_text().splitlines() if "signal" in line]
    assert len(signals) == 1  # nothing was restarted
    if trains:
        assert summary_of(run_dir)["reason"] == "SIGTERM"
        assert_resumes_to_the_same_result(workplace, run_dir, undisturbed, stopped_between=True)
    else:
        assert not (run_dir / "checkpoints/latest").exists()


@pytest.mark.parametrize(
    "num_processes",
    thorough_but(  # it starts torchrun itself, or under one
        [None], [None, 2]
    ),
)
def test_a_closed_terminal_stops_a_run_with_a_checkpoint(
    workplace, run_dir, undisturbed, tmp_path, num_processes
):
    terminal, its_end = os.openpty()
    termios.tcsetwinsize(its_end, (24, 80))  # so that there is a panel
    for name in ("stdout", "stderr"):
        (tmp_path / name).symlink_to(os.ttyname(its_end))
    arguments = workplace.arguments("tiny", *([] if num_processes else ["--nproc-per-node", "2"]))
    process, _ = start_forked(
        "ddp_train.py",
        arguments,
        num_processes=num_processes,
        environment={VARIABLE: SLOW_AT_THE_END.format(0.2)},
        folder=tmp_path,
    )
    shown = b""
    while b"running in training" not in shown:
        shown += os.read(terminal, 2**16)
    wait_for(run_dir / "checkpoints/latest")
    for descriptor in (its_end, terminal):
        os.close(descriptor)  # SIGHUP; what is written from now on fails
    process.join(timeout=200)
    assert process.exitcode == (1 if num_processes else 129)
    summary = summary_of(run_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "SIGHUP")
    assert summary["global_step"] < 11
    assert_resumes_to_the_same_result(workplace, run_dir, undisturbed, stopped_between=True)


@pytest.mark.parametrize("fault", ["signal:number=15", "kill"])
def test_a_stop_during_data_preparation_leaves_no_files(workplace, fault):
    run_dir = workplace.add_run(train={"dataset": "python-stdlib"})
    result = workplace.ddp_train("tiny", **{VARIABLE: f"provide:{fault}"})
    assert result.returncode == (-15 if "signal" in fault else -9)
    assert not (run_dir / "metrics.jsonl").exists()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "2"))
    assert os.listdir(workplace.datasets_dir) == ["python-stdlib"]


def test_a_stop_during_compilation_exits_and_can_be_resumed(workplace, run_dir, undisturbed):
    fault = "compile:signal:rank=1:number=15"
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: fault})
    assert result.returncode == 128 + 15
    assert summary_of(run_dir)["status"] == "stopped"
    assert_resumes_to_the_same_result(workplace, run_dir, undisturbed, stopped_between=True)


def test_a_validation_on_one_rank_may_take_longer_than_a_collective(workplace, undisturbed):
    workplace.add_dataset()
    run_dir = workplace.add_run(train={"collective_timeout_seconds": 6.0})
    succeeded(with_fault(workplace, "validate:slow:rank=0:hit=1:seconds=8"))
    assert weights_of(run_dir) == weights_of(undisturbed)


@pytest.mark.parametrize("rank", thorough_but([1], [0, 1]))
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(workplace, run_dir, rank):
    result = succeeded(with_fault(workplace, f"gradient:nan:rank={rank}:hit=3"))  # in step 2
    assert "steps skipped because of a non-finite gradient: 1" in result.stdout
    records = [r for r in read_lines(run_dir / "metrics.jsonl") if "train_loss" in r]
    assert [record["skipped_steps"] for record in records] == [1, 0, 0]
    assert all(record["train_loss"] is not None for record in records)
    assert summary_of(run_dir)["skipped_steps"] == 1


def test_too_many_skipped_steps_in_a_row_end_the_run(workplace):
    workplace.add_dataset()
    train = {"min_train_tokens": 30 * 128, "weight_decay": 0.5}
    run_dir = workplace.add_run(train=SETTINGS | train)
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "5"))
    best = (run_dir / "checkpoints/best/model.safetensors").read_bytes()
    result = workplace.ddp_train("tiny", "--nproc-per-node", "2", **{VARIABLE: "gradient:nan"})
    assert result.returncode == 3
    line = last_line_of_ours(result)
    assert "the gradients of 20 steps in a row, up to step 25, were not finite; resume from" in line
    assert result.stderr.count("Error: ") == 1 and "Traceback" not in result.stderr
    assert (run_dir / "checkpoints/best/model.safetensors").read_bytes() == best
    assert (
        summary_of(run_dir)["status"] == "failed"
        and "Infinity"
        not in (run_dir / "metrics.jsonl").read_text() + (run_dir / "summary.json").read_text()
    )


def test_a_run_that_ends_with_a_validation_that_is_not_finite_has_failed(workplace):
    """Its weights are finite, and fewer steps were skipped than may be."""
    workplace.add_dataset()
    run_dir = workplace.add_run(train={"learning_rate": 1e30, "min_train_tokens": 10 * 64})
    result = workplace.ddp_train("tiny", "--nproc-per-node", "1")
    assert result.returncode == 3
    assert "the last validation loss is not finite; resume" in last_line_of_ours(result)
    assert "training loss not finite or not recorded (nats" in result.stdout
    assert "sample:" not in result.stdout and "no sample" not in result.stdout
    assert "(step 10; none has a validation loss, so none is the best)\n" in result.stdout
    summary = summary_of(run_dir)
    assert (summary["status"], summary["skipped_steps"]) == ("failed", 9)
    assert summary["reason"] == "the last validation loss is not finite"


def test_a_second_launch_is_refused_and_names_the_first(workplace, run_dir):
    """While it is slow, but not to be taken for hung; what only reads takes no lock."""
    train_path = run_dir / "train.json"
    patient = {"hang_timeout_seconds": 600.0, "collective_timeout_seconds": 600.0}
    train_path.write_text(json.dumps(json.loads(train_path.read_text()) | patient))
    first, _ = start_forked(
        "ddp_train.py",
        workplace.arguments("tiny"),
        num_processes=2,
        environment={VARIABLE: "train:hang:rank=0:hit=4"},
    )
    wait_for(run_dir / "heartbeat.json")
    pid = json.loads((run_dir / "heartbeat.json").read_text())["pid"]
    second = subprocess.run(
        [sys.executable, str(PROJECT_DIR / "ddp_train.py"), *workplace.arguments("tiny")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert f"another launch is training this run: process {pid} on " in second.stderr
    first.kill()  # torchrun: its processes must not live on
    first.join()
    wait_until_gone([pid])
    succeeded(workplace.torchrun(2, "tiny"))


def test_too_little_disk_space_is_an_error_before_training(workplace, run_dir, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000, total=1))
    run = load_run(workplace.runs_dir, "tiny")
    with pytest.raises(UserError, match="a checkpoint takes 180 kB, and the disk has 50.0 kB free"):
        startup.check_room(run, PhaseClock(), ONE_PROCESS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0, total=0))
    startup.check_room(run, PhaseClock(), ONE_PROCESS)  # a mount that tells no size


@pytest.mark.parametrize("rank", thorough_but([0], [0, 1]))
def test_torchrun_restarts_a_killed_rank(workplace, undisturbed, rank, num_restarts):
    workplace.add_dataset()
    for number in range(num_restarts):
        run_dir = workplace.add_run(f"run-{number}", train=SETTINGS)
        # The save after step 10 has waited until the one before is whole.
        result = restarted(workplace, f"train:kill:rank={rank}:hit=11:attempt=0", run_dir.name)
        assert f"Error: rank {rank} is gone in training at step 11" in result.stderr
        assert "resuming from " in result.stdout
        assert weights_of(run_dir) == weights_of(undisturbed)
        assert metrics_of(run_dir) == metrics_of(undisturbed)
    print(f"\n{num_restarts} of {num_restarts} restarts recovered")


def restarted(workplace, fault, *arguments):
    """Train a run whose processes torchrun starts again after a fault."""
    with tempfile.TemporaryDirectory() as folder:
        return succeeded(
            ended(
                *start_forked(
                    "ddp_train.py",
                    workplace.arguments(*arguments),
                    num_processes=2,
                    folder=Path(folder),
                    max_restarts=2,
                    environment={VARIABLE: fault},
                )
            )
        )


@pytest.mark.parametrize("beginning", ["--fresh", "a named checkpoint"])
def test_a_restart_resumes_even_if_the_launch_had_fresh_or_a_checkpoint(
    workplace, run_dir, undisturbed, beginning
):
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "5"))
    first = (run_dir / "checkpoints/latest").readlink().name
    succeeded(workplace.torchrun(2, "tiny"))
    argument = beginning if beginning == "--fresh" else first
    # As soon as the first checkpoint of this launch is whole, and again before its first step.
    result = restarted(
        workplace, "save.links:kill:hit=2:attempt=0;compile:kill:attempt=1", "tiny", argument
    )
    resumed_from = re.findall("resuming from .*-([0-9]+)", result.stdout)
    assert resumed_from == {"--fresh": ["4", "4"], first: ["4", "9", "9"]}[argument]
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert len(list((run_dir / "set-aside").iterdir())) == 1


def test_torchrun_restarts_a_rank_that_is_killed_before_the_watchdog_begins(
    workplace, run_dir, undisturbed
):
    """Torchrun ends the other with SIGTERM, which is no request to stop."""
    restarted(workplace, "worker:kill:rank=0:attempt=0", "tiny")
    assert weights_of(run_dir) == weights_of(undisturbed)


def test_max_steps_counts_over_a_restart(workplace, run_dir, undisturbed):
    """When the fifth of eight steps is saved, a process is killed."""
    result = restarted(workplace, "save.links:kill:hit=2:attempt=0", "tiny", "--max-steps", "8")
    assert "resuming from " in result.stdout
    assert newest_whole(run_dir / "checkpoints")[0].meta.global_step == 7
    summary = summary_of(run_dir)
    assert (summary["status"], summary["reason"]) == ("stopped", "--max-steps")
    assert_resumes_to_the_same_result(workplace, run_dir, undisturbed, stopped_between=True)


def test_a_crash_has_the_status_of_its_signal(workplace, run_dir):
    result = workplace.ddp_train(
        "tiny", "--nproc-per-node", "2", **{VARIABLE: "train:signal:number=4:rank=1:hit=7"}
    )
    assert result.returncode == 128 + 4  # SIGILL; 4 alone is a full disk
    assert last_line_of_ours(result).startswith("Error: rank 1 crashed in native code: SIGILL;")


def add(workplace, tracker):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS | {"diagnostics_interval": 4, "tracker": tracker})


def test_a_tracker_that_hangs_changes_nothing(workplace, undisturbed):
    run_dir = add(workplace, "trackio")
    package = workplace.root / "stand-in" / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time; time.sleep(3600)")
    result = succeeded(
        workplace.torchrun(2, "tiny", PYTHONPATH=str(package.parent), **with_deadlines(tracker=1))
    )
    (said,) = re.findall("warning: tracker trackio: (.*)", result.stdout)
    assert re.match(r"not done after \d+ s; `lab export-metrics tiny --to trackio`", said)
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    assert not TrackedRun.load(run_dir).sent.get("trackio")


def test_a_run_that_is_killed_goes_on_in_the_same_tracked_run(workplace, undisturbed):
    run_dir = add(workplace, "tensorboard")
    assert workplace.torchrun(2, "tiny", **{VARIABLE: "validate:kill:rank=0:hit=2"}).returncode
    tracked = TrackedRun.load(run_dir)
    result = succeeded(workplace.torchrun(2, "tiny", **with_deadlines(tracker=150)))
    assert "warning: tracker" not in result.stdout
    assert weights_of(run_dir) == weights_of(undisturbed)
    records = read_lines(run_dir / "metrics.jsonl")
    assert TrackedRun.load(run_dir) == tracked.model_copy(
        update={"sent": {"tensorboard": len(records)}}
    )
    values = in_tensorboard(run_dir / "tensorboard" / tracked.id)
    for key in ("train_loss", "validation_loss", "head_grad_norm", "tokens_per_second"):
        assert [step for step, _ in values[METRICS[key]]] == [
            record["global_step"] + 1 for record in records if record.get(key) is not None
        ], key
    assert values["final/steps"][-1] == (12, 12.0)
    keys = {key for record in records for key in record} - {"global_step"}
    assert keys <= METRICS.keys()  # all that a run records is shown
