"""Checkpoints on file systems without links; which checkpoints are of the run."""

import shutil

import pytest

from basics.checkpoint_files import (
    IDENTITY,
    Identity,
    directory_of,
    find_damage,
    named_as_checkpoints,
    read_identity,
    write_identity,
)
from basics.errors import UserError
from checkpointing import (
    SnapshotBuffers,
    best_of,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    save_checkpoint,
)
from processes.command_line import Options
from run_config import load_run
from tests.support import stand_ins
from tests.support.models import describe, save, state
from trainer.resuming import choose_checkpoint
from trainer.startup import PreparedRun

NAME = "20260101Z000000-iteration-3"
A, B = Identity(name="aa"), Identity(name="bb")


def test_without_links_latest_and_best_are_files_that_name_checkpoints(tmp_path, monkeypatch):
    for patch in stand_ins.odd_file_system(tmp_path):
        monkeypatch.setattr(*patch)
    saved = [save(tmp_path / "checkpoints", step, loss) for step, loss in ((1, 1.0), (2, 2.0))]
    for link, wanted in (("latest", saved[1]), ("best", saved[0])):
        path = tmp_path / "checkpoints" / link
        assert not path.is_symlink() and path.read_text() == f"{wanted.name}\n"
        assert directory_of(path) == wanted.path
    aside_dir = clean_up(tmp_path, from_step=0)
    assert not list((tmp_path / "checkpoints").iterdir())
    assert not find_damage(aside_dir / "checkpoints" / saved[1].name, thoroughly=True)


def test_a_plain_file_that_names_no_checkpoint_is_replaced(tmp_path):
    link = tmp_path / "latest"
    for content in (b"", b"../../etc\n", b"\0" * 200):
        link.write_bytes(content)
        assert directory_of(link) == link
    assert save(tmp_path, 1).path == link.resolve()


def test_only_directories_with_a_manifest_are_checkpoints(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / f"{NAME}-1").symlink_to(NAME)
    (tmp_path / "mine-iteration-3").mkdir()
    assert not named_as_checkpoints(tmp_path)
    assert [path.name for path in named_as_checkpoints(tmp_path, partial=True)] == [NAME]
    (tmp_path / NAME / "manifest.json").touch()
    assert [path.name for path in named_as_checkpoints(tmp_path)] == [NAME]


@pytest.fixture
def run(workplace):
    workplace.add_run()
    return load_run(workplace.runs_dir, "tiny")


def save_as(run, identity, *steps, loss=1.0):
    for step in steps:
        meta = describe(step, loss).model_copy(update={"identity": identity.name})
        save_checkpoint(run.checkpoints_dir, SnapshotBuffers().take(state(step)), meta)


def launch(run, *, checkpoint=None, fresh=False):
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


def steps(run):
    return [found.meta.global_step for found in list_checkpoints(run.checkpoints_dir)]


def name_at(run, step, *, foreign=False):
    return next(found.name for found in list_checkpoints(run.checkpoints_dir, foreign=foreign)
                if found.meta.global_step == step)


def bring_back(run):
    """Put everything that was set aside back, as a copy that never deletes does."""
    for path in run.run_dir.glob("set-aside/*/checkpoints/*"):
        if not (run.checkpoints_dir / path.name).exists():
            shutil.copytree(path, run.checkpoints_dir / path.name)


def test_a_run_goes_on_as_what_it_is(run):
    assert launch(run) == (-1, [])
    identity = read_identity(run.run_dir)
    assert launch(run) == (-1, []) and read_identity(run.run_dir) == identity  # nothing saved yet
    save_as(run, identity, 9, 19)
    for named in (None, "latest"):
        assert launch(run, checkpoint=named) == (19, [])
        assert read_identity(run.run_dir) == identity
    assert launch(run, checkpoint="best") == (19, [])  # later ones may be elsewhere
    assert read_identity(run.run_dir).earlier == {identity.name: 19}


def test_a_run_that_starts_over_leaves_its_checkpoints_wherever_they_come_from(run):
    write_identity(run.run_dir, A)
    save_as(run, A, 9, 19, 39, loss=0.1)
    assert launch(run, fresh=True) == (-1, []) and steps(run) == []
    identity = read_identity(run.run_dir)
    assert identity.name != A.name
    save_as(run, identity, 4)
    bring_back(run)
    assert best_of(list_checkpoints(run.checkpoints_dir)).meta.global_step == 4
    assert find_checkpoint(run.checkpoints_dir, "latest").meta.global_step == 4
    step, (warning,) = launch(run)
    assert step == 4 and "-iteration-39 and 2 more are not of the present run" in warning
    assert steps(run) == [4] and len(list(run.checkpoints_dir.glob("*-iteration-*"))) == 1


def test_a_step_back_keeps_what_was_before_and_leaves_what_came_after(run):
    write_identity(run.run_dir, A)
    save_as(run, A, 9, 19, 29)
    assert launch(run, checkpoint=name_at(run, 19)) == (19, []) and steps(run) == [9, 19]
    identity = read_identity(run.run_dir)
    assert identity.name != A.name and identity.earlier == {A.name: 19}
    bring_back(run)
    save_as(run, A, 39)  # the rest comes later
    assert launch(run)[0] == 19 and read_identity(run.run_dir) == identity
    save_as(run, identity, 24, 29)
    assert launch(run) == (29, []) and steps(run) == [9, 19, 24, 29]
    assert launch(run, checkpoint=name_at(run, 9)) == (9, [])
    assert read_identity(run.run_dir).earlier == {A.name: 9}


def test_two_steps_back_keep_the_whole_line():
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


def test_another_runs_checkpoint_is_used_if_it_is_named(run):
    write_identity(run.run_dir, B)
    save_as(run, A, 9)
    save_as(run, B, 4)
    assert launch(run, checkpoint=name_at(run, 9, foreign=True)) == (9, []) and steps(run) == [9]


def test_a_damaged_or_partial_newest_checkpoint_is_no_step_back(run):
    write_identity(run.run_dir, A)
    save_as(run, A, 9, 19, 29)
    damaged, partial = (run.checkpoints_dir / name_at(run, step) for step in (19, 29))
    weights = damaged / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))
    (partial / "manifest.json").unlink()
    step, warnings = launch(run, checkpoint="latest")
    assert step == 9 and read_identity(run.run_dir) == A and not partial.exists()
    assert any("is used instead" in warning for warning in warnings)
    assert any(warning.startswith(f"{partial}: has no manifest, ") for warning in warnings)


def test_checkpoints_of_one_run_are_enough_and_those_of_several_are_refused(run):
    save_as(run, A, 9, 19)
    assert launch(run) == (19, []) and read_identity(run.run_dir) == A
    (run.run_dir / IDENTITY).unlink()
    save_as(run, B, 4)
    with pytest.raises(UserError, match="has checkpoints of 2 runs; restore identity.json"):
        launch(run)
    assert launch(run, checkpoint=name_at(run, 4)) == (4, []) and steps(run) == [4]


def test_a_damaged_identity_is_refused(run):
    save_as(run, A, 9)
    for content in ("", "{}}", '{"name": "../up"}', '{"name": 3}', "[" * 10**5):
        (run.run_dir / IDENTITY).write_text(content)
        with pytest.raises(UserError, match="identity.json: cannot be read .damaged.; restore it"):
            launch(run)
