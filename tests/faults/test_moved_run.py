"""A run on machines that are taken away: nothing but its second copy goes on to the next one."""

from __future__ import annotations

import os
import shutil
import signal
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


@pytest.mark.parametrize("num_moves", [2, pytest.param(5, marks=pytest.mark.thorough)])
def test_a_run_that_is_moved_again_and_again_ends_with_the_same_weights(
    tmp_path: Path, num_moves: int
) -> None:
    undisturbed = train_undisturbed(tmp_path / "undisturbed", OFTEN)
    copies, reached = tmp_path / "copies", -1
    copies.mkdir()
    for number in range(num_moves):
        machine = new_machine(tmp_path / f"machine-{number}", has_run=number == 0)
        output = train_until_copied(machine, copies, after=reached)
        assert ("and the records were fetched from" in output) == (number > 0)
        reached = newest_in(copies)
        shutil.rmtree(machine.root)
    machine = new_machine(tmp_path / "last", has_run=False)
    result = succeeded(machine.torchrun(2, "tiny", "--sync-to", str(copies)))
    assert f"and the records were fetched from {copies / 'tiny'}" in result.stdout
    assert "warning: the second copy" not in result.stdout
    for run_dir in (machine.runs_dir / "tiny", copies / "tiny"):
        assert weights_of(run_dir) == weights_of(undisturbed)
        assert validations_of(run_dir) == validations_of(undisturbed)
        assert summary_of(run_dir)["status"] == "finished"
        assert summary_of(run_dir)["best"]["loss"] == summary_of(undisturbed)["best"]["loss"]
    assert metrics_of(machine.runs_dir / "tiny") == metrics_of(copies / "tiny")
    result = succeeded(machine.ddp_train(
        "tiny", "--nproc-per-node", "2", "--sync-to", str(copies)))
    assert "tiny is complete" in result.stdout


def test_the_checkpoint_of_a_stop_signal_is_copied(workplace: Workplace) -> None:
    workplace.add_dataset()
    run_dir, copies = workplace.add_run(train=SETTINGS), workplace.root / "copies"
    copies.mkdir()
    result = succeeded(workplace.torchrun(
        2, "tiny", "--sync-to", str(copies), **with_deadlines(last_write=60, stop=90),
        **{VARIABLE: "train:signal:number=15:rank=0:hit=7"}))
    assert "the second copy" not in result.stdout
    assert newest_in(copies) == 6 and weights_of(copies / "tiny") == weights_of(run_dir)
    assert summary_of(copies / "tiny")["status"] == "stopped"


def new_machine(root: Path, *, has_run: bool) -> Workplace:
    machine = Workplace(root)
    machine.add_dataset()
    if has_run:
        machine.add_run(train=OFTEN)
    return machine


def train_until_copied(machine: Workplace, copies: Path, *, after: int) -> str:
    """Train until the copy has a newer checkpoint; then kill everything. Return what was printed.

    The process that copies ends with rank 0.
    """
    process, (stdout, _) = start_forked(
        "ddp_train.py", machine.arguments("tiny", "--sync-to", str(copies)), num_processes=2,
        environment={VARIABLE: SLOW}, folder=machine.root)
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


def newest_in(copies: Path) -> int:
    found = list_checkpoints(copies / "tiny/checkpoints")
    return found[-1].meta.global_step if found else -1
