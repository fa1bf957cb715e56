"""A run on machines that are taken away: nothing but a copy of it goes on to the next one."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from basics.failpoints import VARIABLE
from checkpointing import list_checkpoints
from tests.support.runs import (
    SETTINGS,
    metrics_of,
    summary_of,
    train_undisturbed,
    validations_of,
    weights_of,
    with_deadlines,
)
from tests.support.workplace import Workplace, children_of, start_forked, succeeded

# A checkpoint after every second of 12 steps, which are slow enough for a copy to be made between.
OFTEN = SETTINGS | {"validation_interval": 2, "keep_checkpoints": 2}
SLOW = "train:slow:seconds=0.5"


RSYNC = "rsync -a --exclude '.*' {run_dir}/ %s/{run}/ || [ $? = 24 ]"  # 24: pruned meanwhile
needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@needs_rsync
@pytest.mark.parametrize("num_moves", [2, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_run_that_is_moved_again_and_again_ends_with_the_same_weights(tmp_path, num_moves):
    undisturbed = train_undisturbed(tmp_path / "undisturbed", OFTEN)
    copies, reached = tmp_path / "copies", -1
    copies.mkdir()
    for number in range(num_moves):
        machine = new_machine(tmp_path / f"machine-{number}", copies)
        output = train_until_copied(machine, copies, after=reached)
        assert ("resuming from" in output) == (number > 0)
        reached = newest_in(copies)
        shutil.rmtree(machine.root)
    machine = new_machine(tmp_path / "last", copies)
    result = succeeded(machine.torchrun(2, "tiny", "--after-checkpoint", RSYNC % copies))
    assert "resuming from" in result.stdout and "warning: --after" not in result.stdout
    for run_dir in (machine.runs_dir / "tiny", copies / "tiny"):
        assert weights_of(run_dir) == weights_of(undisturbed)
        assert validations_of(run_dir) == validations_of(undisturbed)
        assert summary_of(run_dir)["status"] == "finished"
        assert summary_of(run_dir)["best"]["loss"] == summary_of(undisturbed)["best"]["loss"]
    assert metrics_of(machine.runs_dir / "tiny") == metrics_of(copies / "tiny")
    latest = machine.runs_dir / "tiny/checkpoints/latest"
    latest.unlink()  # as a copy in an object store lacks it
    result = succeeded(machine.ddp_train("tiny", "--nproc-per-node", "2"))
    assert "tiny is complete" in result.stdout and latest.exists()


@needs_rsync
def test_the_checkpoint_of_a_stop_signal_is_copied(workplace):
    workplace.add_dataset()
    run_dir, copies = workplace.add_run(train=SETTINGS), workplace.root / "copies"
    copies.mkdir()
    result = succeeded(workplace.torchrun(
        2, "tiny", "--after-checkpoint", RSYNC % copies, **with_deadlines(last_write=60, stop=90),
        **{VARIABLE: "train:signal:number=15:rank=0:hit=7"}))
    assert "warning: --after" not in result.stdout
    assert newest_in(copies) == 6 and weights_of(copies / "tiny") == weights_of(run_dir)
    assert summary_of(copies / "tiny")["status"] == "stopped"


def new_machine(root, copies):
    """Return an empty machine, with what the copy has of the run, or else a new run."""
    machine = Workplace(root)
    machine.add_dataset()
    if (copies / "tiny/train.json").exists():
        machine.runs_dir.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", copies / "tiny", machine.runs_dir], check=True)
    else:
        machine.add_run(train=OFTEN)
    return machine


def train_until_copied(machine, copies, *, after):
    """Train until the copy has a newer checkpoint; kill everything. Return what was printed."""
    process, (stdout, _) = start_forked(
        "ddp_train.py", machine.arguments("tiny", "--after-checkpoint", RSYNC % copies),
        num_processes=2, environment={VARIABLE: SLOW}, folder=machine.root)
    until = time.monotonic() + 200
    while newest_in(copies) <= after:
        assert process.is_alive() and time.monotonic() < until, stdout.read_text()
        time.sleep(0.05)
    family = [process.pid, *(pid for pid in children_of(process.pid))]
    family += [pid for worker in family[1:] for pid in children_of(worker)]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join(timeout=60)
    while any(Path(f"/proc/{pid}/exe").exists() for pid in family):  # not those that have ended
        assert time.monotonic() < until
        time.sleep(0.02)
    return stdout.read_text()


def newest_in(copies):
    found = list_checkpoints(copies / "tiny/checkpoints")
    return found[-1].meta.global_step if found else -1
