"""The identity of a run: which checkpoints belong to it, wherever they come from."""

from __future__ import annotations

import shutil

import pytest

from basics.errors import UserError
from basics.run_identity import IDENTITY, Identity, read_identity, write_identity
from checkpointing import SnapshotBuffers, best_of, clean_up, find_checkpoint, list_checkpoints
from checkpointing import save_checkpoint as save_snapshot
from processes.command_line import Options
from run_config import Run, load_run
from tests.support.checkpoints import describe, state
from tests.support.workplace import Workplace
from trainer.resuming import choose_checkpoint
from trainer.startup import PreparedRun

A, B = Identity(name="aa"), Identity(name="bb")


@pytest.fixture
def run(workplace: Workplace) -> Run:
    workplace.add_run()
    return load_run(workplace.runs_dir, "tiny")


def save(run: Run, identity: Identity, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        meta = describe(step, loss).model_copy(update={"identity": identity.name})
        save_snapshot(run.checkpoints_dir, SnapshotBuffers().take(state(step)), meta)


def launch(run: Run, *, checkpoint: str | None = None, fresh: bool = False) -> tuple[int, list]:
    """Choose as a launch does, and record what it trains; return the step, and the warnings."""
    options = Options("tiny", checkpoint=checkpoint, fresh=fresh)
    name, *warnings = choose_checkpoint(run, options)
    found = list_checkpoints(run.checkpoints_dir) + list_checkpoints(
        run.checkpoints_dir, foreign=True)
    resume_from = next((each for each in found if each.name == name), None)
    prepared = PreparedRun(run, run.train, None, resume_from, options, False)
    write_identity(run.run_dir, prepared.run_identity())
    clean_up(run.run_dir, from_step=prepared.first_step)
    return prepared.first_step - 1, warnings


def steps(run: Run) -> list[int]:
    return [found.meta.global_step for found in list_checkpoints(run.checkpoints_dir)]


def bring_back(run: Run) -> None:
    """Put everything that was set aside back, as a copy that never deletes does."""
    for path in run.run_dir.glob("set-aside/*/checkpoints/*"):
        if not (run.checkpoints_dir / path.name).exists():
            shutil.copytree(path, run.checkpoints_dir / path.name)


def test_a_run_goes_on_as_what_it_is(run: Run) -> None:
    assert launch(run) == (-1, [])
    identity = read_identity(run.run_dir)
    assert launch(run) == (-1, []) and read_identity(run.run_dir) == identity  # nothing saved yet
    save(run, identity, 9, 19)
    for named in (None, "latest"):
        assert launch(run, checkpoint=named) == (19, [])
        assert read_identity(run.run_dir) == identity
    assert launch(run, checkpoint="best") == (19, [])  # later ones may be elsewhere
    assert read_identity(run.run_dir).earlier == {identity.name: 19}


def test_a_run_that_starts_over_leaves_its_checkpoints_wherever_they_come_from(run: Run) -> None:
    write_identity(run.run_dir, A)
    save(run, A, 9, 19, 39, loss=0.1)
    assert launch(run, fresh=True) == (-1, []) and steps(run) == []
    identity = read_identity(run.run_dir)
    assert identity.name != A.name
    save(run, identity, 4)
    bring_back(run)
    assert best_of(list_checkpoints(run.checkpoints_dir)).meta.global_step == 4
    assert find_checkpoint(run.checkpoints_dir, "latest").meta.global_step == 4
    step, (warning,) = launch(run)
    assert step == 4 and "-iteration-39 and 2 more are not of the present run" in warning
    assert steps(run) == [4] and len(list(run.checkpoints_dir.glob("*-iteration-*"))) == 1


def test_a_kill_after_fresh_does_not_bring_the_old_checkpoints_back(run: Run) -> None:
    write_identity(run.run_dir, B)  # it came before they were set aside
    save(run, A, 9)
    step, (warning,) = launch(run)
    assert step == -1 and "-iteration-9 is not of the present run" in warning
    assert steps(run) == [] and len(list(run.run_dir.glob("set-aside/*/checkpoints/*"))) == 1


def test_a_step_back_keeps_what_was_before_and_leaves_what_came_after(run: Run) -> None:
    write_identity(run.run_dir, A)
    save(run, A, 9, 19, 29)
    nineteen = list_checkpoints(run.checkpoints_dir)[1].name
    assert launch(run, checkpoint=nineteen) == (19, []) and steps(run) == [9, 19]
    identity = read_identity(run.run_dir)
    assert identity.name != A.name and identity.earlier == {A.name: 19}
    bring_back(run)
    assert launch(run)[0] == 19 and read_identity(run.run_dir) == identity
    save(run, identity, 24, 29)
    assert launch(run) == (29, []) and steps(run) == [9, 19, 24, 29]
    nine = list_checkpoints(run.checkpoints_dir)[0].name
    assert launch(run, checkpoint=nine) == (9, [])
    assert read_identity(run.run_dir).earlier == {A.name: 9}


def test_two_steps_back_keep_the_whole_line(run: Run) -> None:
    line = A.after_step_back(A.name, 19)
    again = line.after_step_back(line.name, 39)
    assert again.earlier == {A.name: 19, line.name: 39}
    assert again.includes(A.name, 19) and not again.includes(A.name, 29)
    assert again.includes(line.name, 39) and not again.includes(line.name, 40)
    assert again.includes(again.name, 10**6) and not again.includes("another", 0)
    assert B.after_step_back(A.name, 5).earlier == {A.name: 5}  # from another run's
    # From a checkpoint that the first step back has left: what came of the other branch goes.
    aside = again.after_step_back(A.name, 25)
    assert aside.earlier == {A.name: 25} and not aside.includes(line.name, 21)


def test_a_step_back_with_nothing_later_here_leaves_what_is_elsewhere(run: Run) -> None:
    write_identity(run.run_dir, A)
    save(run, A, 9)  # all that was brought back
    nine = list_checkpoints(run.checkpoints_dir)[0].name
    assert launch(run, checkpoint=nine) == (9, [])
    save(run, read_identity(run.run_dir), 14)
    save(run, A, 39)  # the rest comes later
    assert launch(run)[0] == 14 and steps(run) == [9, 14]


def test_another_runs_checkpoint_is_used_if_it_is_named(run: Run) -> None:
    write_identity(run.run_dir, B)
    save(run, A, 9)
    save(run, B, 4)
    name = list_checkpoints(run.checkpoints_dir, foreign=True)[0].name
    assert launch(run, checkpoint=name) == (9, []) and steps(run) == [9]


def test_damage_of_the_newest_checkpoint_is_no_step_back(run: Run) -> None:
    write_identity(run.run_dir, A)
    save(run, A, 9, 19)
    weights = list_checkpoints(run.checkpoints_dir)[1].path / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    step, (warning,) = launch(run, checkpoint="latest")
    assert step == 9 and "is used instead" in warning and read_identity(run.run_dir) == A


def test_what_a_kill_left_is_ignored_in_one_line_and_removed(run: Run) -> None:
    write_identity(run.run_dir, A)
    save(run, A, 9, 19)
    partial = list_checkpoints(run.checkpoints_dir)[1].path
    (partial / "manifest.json").unlink()
    step, (warning,) = launch(run)
    assert step == 9 and warning.startswith(f"{partial}: has no manifest, ")
    assert not partial.exists()


def test_checkpoints_of_one_run_are_enough_and_those_of_several_are_refused(run: Run) -> None:
    save(run, A, 9, 19)
    assert launch(run) == (19, []) and read_identity(run.run_dir) == A
    (run.run_dir / IDENTITY).unlink()
    save(run, B, 4)
    with pytest.raises(UserError, match="has checkpoints of 2 runs; restore identity.json"):
        launch(run)
    four = list_checkpoints(run.checkpoints_dir)[0].name
    assert launch(run, checkpoint=four) == (4, []) and steps(run) == [4]


@pytest.mark.parametrize("content", ["", "{}}", '{"name": "../up"}', '{"name": 3}', "[" * 10**5])
def test_a_damaged_identity_is_refused(run: Run, content: str) -> None:
    save(run, A, 9)
    (run.run_dir / IDENTITY).write_text(content)
    with pytest.raises(UserError, match="identity.json: cannot be read .damaged.; restore it"):
        launch(run)
