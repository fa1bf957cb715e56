"""Checkpoints: format, order, damage, best, pruning; whose they are; written beside training."""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
import torch

import checkpointing
from basics.checkpoint_files import (
    IDENTITY,
    MANIFEST,
    Identity,
    directory_of,
    find_damage,
    named_as_checkpoints,
    read_identity,
    write_identity,
)
from basics.errors import NON_FINITE, UserError
from basics.failpoints import VARIABLE
from checkpointing import (
    LossScale,
    SnapshotBuffers,
    Validation,
    add_validation,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_whole,
    open_checkpoint,
    prune,
    remove_checkpoint,
    renew_links,
    save_checkpoint,
)
from ops.schedule import learning_rate_at, schedule_warning
from processes.command_line import Options, command_line
from processes.distributed import Process
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from run_config import load_run
from tests.support.models import MODEL, damage, describe, save, state
from tests.support.optional import given, settings, st
from tests.support.stand_ins import odd_file_system
from tests.support.workplace import Workplace, small_disk
from tokens.batches import open_run_data
from trainer.background_saver import BackgroundSaver
from trainer.resuming import ResumePoint, check_same_run, choose_checkpoint, identity_of_launch
from trainer.startup import prepare_run

NORM = "final_norm.bias"
A = Identity(name="aa")
FULL = "could not be written (No space left on device; make room)"
DATA = {"train": "100 tokens, abc", "start_train_token": "0", "validation_sequences": "6"}


@pytest.fixture
def run(workplace):
    workplace.add_run()
    return load_run(workplace.runs_dir, "tiny")


def test_a_checkpoint_restores_the_loss_scaler_and_no_option_of_the_optimizer(tmp_path):
    loaded = state(8)
    loaded.optimizer.param_groups[0]["weight_decay"] = 0.7
    load_checkpoint(save(tmp_path, 7), loaded)
    assert loaded.optimizer.param_groups[0]["weight_decay"] == 0.7
    assert loaded.loss_scale() == LossScale(scale=2.0**7, growth_tracker=3)


def test_latest_is_the_highest_step_and_best_the_lowest_loss(tmp_path, monkeypatch):
    """Whatever their times are."""
    assert find_checkpoint(tmp_path, "latest") is None
    for step, loss, year in ((30, 2.0, 2019), (10, 1.5, 2031), (20, None, 2026), (25, 1.5, 2026)):
        monkeypatch.setattr(
            "checkpointing.time.strftime", lambda *_, year=year: f"{year}0101Z000000"
        )
        save(tmp_path, step, loss)
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [10, 20, 25, 30]
    assert newest_whole(tmp_path)[0].meta.global_step == 30
    for name, step in (("latest", 30), ("best", 25)):
        assert find_checkpoint(tmp_path, name).meta.global_step == step
        link = os.readlink(tmp_path / name)
        assert link.endswith(f"-iteration-{step}") and not os.path.isabs(link)
        assert find_checkpoint(tmp_path, link).name == link


@pytest.mark.parametrize(
    "place", ["save.meta", "save.weights", "save.optimizer", "save.manifest", "save.remove"]
)
def test_what_a_kill_leaves_is_ignored_and_removed(tmp_path, monkeypatch, place):
    checkpoints_dir, snapshot = tmp_path / "checkpoints", SnapshotBuffers().take(state(5))
    before, newest = save(checkpoints_dir, 3), save(checkpoints_dir, 4)
    monkeypatch.setenv(VARIABLE, f"{place}:kill")
    child = os.fork()
    if not child:
        try:
            if place == "save.remove":
                remove_checkpoint(newest.path)
            save_checkpoint(checkpoints_dir, snapshot, describe(5))
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    monkeypatch.delenv(VARIABLE)
    kept = before if place == "save.remove" else newest
    (partial,) = named_as_checkpoints(checkpoints_dir, partial=True)
    assert partial == newest.path or partial.name.endswith("-iteration-5")
    assert newest_whole(checkpoints_dir) == (kept, [])
    assert clean_up(tmp_path, from_step=kept.meta.global_step + 1) is None
    assert not partial.exists() and kept.path.exists()
    assert os.readlink(checkpoints_dir / "latest") == kept.name


def test_what_lacks_a_manifest_and_is_no_part_of_a_checkpoint_stays(tmp_path):
    path = save(tmp_path / "checkpoints", 3).path
    for name in (MANIFEST, "meta.json"):
        (path / name).unlink()
    (mine := tmp_path / "checkpoints/mine-iteration-3").mkdir()
    assert not list_checkpoints(tmp_path / "checkpoints")
    clean_up(tmp_path, from_step=0)
    assert (path / "model.safetensors").exists() and mine.exists()


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("model.safetensors", "deleted"),
        ("model.safetensors", "cut short"),
        ("optimizer.safetensors", "a bit"),
        ("meta.json", "rubbish"),
        ("meta.json", "deleted"),
        (MANIFEST, "cut short"),
        (MANIFEST, "a bit"),
        (MANIFEST, "rubbish"),
    ],
)
def test_damage_is_named_and_the_newest_whole_one_used(tmp_path, file, how):
    before, newest = save(tmp_path, 3), save(tmp_path, 4)
    damage(newest.path / file, how)
    found, warnings = newest_whole(tmp_path)
    assert found == before
    # A bit of the manifest may be one of another file's size or digest.
    named = "" if (file, how) == (MANIFEST, "a bit") else file
    assert len(warnings) == 1 and f"{newest.path}: damaged: {named}" in warnings[0]
    with pytest.raises(UserError, match=rf"damaged: {named}.*name another checkpoint"):
        find_checkpoint(tmp_path, newest.name)
    damage(before.path / file, how)
    with pytest.raises(UserError, match="no other checkpoint is whole: restore one"):
        newest_whole(tmp_path)


def test_pruning_keeps_the_newest_the_best_and_the_protected(tmp_path):
    names = [
        save(tmp_path, step, loss).name for step, loss in enumerate([5.0, 4.0, 1.0, 3.0, 2.0, 2.5])
    ]
    prune(tmp_path, keep=2, protected=[names[1]])
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [1, 2, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(names[step] for step in (1, 2, 4, 5)),
        "latest",
        "best",
    }
    damage(list_checkpoints(tmp_path)[-1].path / "model.safetensors", "a bit")
    prune(tmp_path, keep=1, protected=[])
    assert len(list_checkpoints(tmp_path)) == 4  # none is removed where the newest is damaged


def test_a_manifest_names_every_other_file_and_no_other_place(tmp_path):
    checkpoint = save(tmp_path / "checkpoints", 3)
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["global_step"] == 3 and manifest["files"].keys() == {
        "model.safetensors",
        "optimizer.safetensors",
        "meta.json",
    }
    assert {path.name for path in checkpoint.path.iterdir()} == {MANIFEST, *manifest["files"]}
    for change, message in (
        ({"global_step": 4}, "meta.json does not agree with the manifest"),
        ({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}, f"{MANIFEST} cannot be read"),
    ):
        (checkpoint.path / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(UserError, match=f"damaged: {message}"):
            open_checkpoint(checkpoint.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 4}, "model.json: n_heads is 4, .* was trained with 2; set it back"),
        ({"optimizer": "muon"}, "train.json: optimizer is muon, .* was trained with adamw"),
        ({"random_seed": 7}, "train.json: random_seed is 7, .* was trained with 42"),
        ({"train": "100 tokens, xyz"}, "train.json: the train file of tiny is 100 tokens, xyz, "),
        ({"start_train_token": "16"}, "train.json: start_train_token is 16, .* was trained with 0"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(workplace, changes, message):
    model = {k: v for k, v in changes.items() if k == "n_heads"}
    train = {k: v for k, v in changes.items() if k in ("random_seed", "optimizer")}
    workplace.add_run(model=model | {"drop_rate": 0.3}, train=train)
    checkpoint = with_data(save(workplace.root, 3))
    run = load_run(workplace.runs_dir, "tiny")
    data = {key: changes.get(key, value) for key, value in DATA.items()}
    with pytest.raises(UserError, match=message) as caught:
        check_same_run(checkpoint, run, data)
    assert "--fresh" in str(caught.value)


def with_data(checkpoint):
    return replace(checkpoint, meta=checkpoint.meta.model_copy(update={"data": DATA}))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ({}, lambda moments: moments.pop(f"step/{NORM}"), f"step/{NORM} is absent"),
        ({}, lambda moments: moments.update(more=torch.zeros(1)), "more is"),
        (
            {},
            lambda moments: moments.update({f"exp_avg/{NORM}": torch.zeros(3)}),
            r"\[3\]\), wanted",
        ),
        ({"emb_dim": 32}, None, r"attention.output.bias is .*\[16\]\), wanted .*\[32\]\)"),
        ({"n_layers": 3}, None, "blocks.2.* is absent, wanted .*"),
        ({"tie_weights": True}, None, r"head.weight is .*\[257, 16\]\), wanted absent"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(tmp_path, model, change, message):
    checkpoint, path = save(tmp_path, 3), tmp_path / "latest/optimizer.safetensors"
    if change:
        moments = {key: value.clone() for key, value in safetensors.torch.load_file(path).items()}
        change(moments)
        safetensors.torch.save_file(moments, path)
    with pytest.raises(UserError, match=rf"cannot be loaded: .*{message}.*; restore model.json"):
        load_checkpoint(checkpoint, state(0, MODEL.model_copy(update=model)))


def test_a_validation_joins_its_checkpoint_and_decides_which_is_best(tmp_path, monkeypatch):
    first, second = save(tmp_path, 3, None), save(tmp_path, 4, None)
    assert os.readlink(tmp_path / "best") == second.name  # no loss is known
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "save.validation:raise")
        with pytest.raises(RuntimeError):
            add_validation(second, Validation(loss=1.0))
    assert newest_whole(tmp_path) == (second, [])  # whole, and not validated
    assert add_validation(first, Validation(loss=1.25)).loss == 1.25
    renew_links(tmp_path)
    assert os.readlink(tmp_path / "best") == first.name
    add_validation(second, Validation(loss=None))  # not finite: validated, but never the best
    renew_links(tmp_path)
    found = {checkpoint.name: checkpoint for checkpoint in list_checkpoints(tmp_path)}
    assert found[first.name].validation == Validation(loss=1.25)
    assert found[second.name].validation == Validation(loss=None)
    assert os.readlink(tmp_path / "best") == first.name
    assert not find_damage(first.path, thoroughly=True)


@pytest.mark.parametrize("fault", ["save.links:full", "save.prune:full"])
def test_a_failure_after_the_manifest_costs_no_checkpoint(tmp_path, monkeypatch, fault):
    writer = BackgroundSaver(tmp_path, keep=1)
    monkeypatch.setenv(VARIABLE, fault)
    for step in range(2):
        writer.save(state(step), describe(step))
        writer.wait()
    steps = [found.meta.global_step for found in list_checkpoints(tmp_path)]
    assert steps == ([1] if fault == "save.links:full" else [0, 1])
    assert "could not be re" in writer.pop_failure()
    monkeypatch.delenv(VARIABLE)
    writer.save(state(2), describe(2))  # repairs it
    writer.wait()
    (kept,) = list_checkpoints(tmp_path)
    assert os.readlink(tmp_path / "latest") == kept.name and not writer.pop_failure()


def test_a_full_disk_is_reported_as_enospc(tmp_path):
    """On a real full disk: safetensors has an error of its own for it."""
    place = tmp_path / "small"
    place.mkdir()
    for size in ("8k", "48k", "64k", "96k"):
        with small_disk(place, size), pytest.raises(OSError) as caught:  # noqa: PT011
            save(place / "checkpoints", 3)
        assert (caught.value.errno, caught.value.strerror) == (28, "No space left on device"), size


def test_each_machine_checks_its_own_copy(workplace, monkeypatch):
    workplace.add_run()
    run, dataset_dir = load_run(workplace.runs_dir, "tiny"), workplace.add_dataset()
    data = open_run_data(run, dataset_dir, world_size=4)
    checkpoint = save_checkpoint(
        run.checkpoints_dir,
        SnapshotBuffers().take(state(2)),
        describe(2).model_copy(
            update={"data": data.fingerprints, "tokens": 3 * data.plan.tokens_per_step}
        ),
    )
    options = command_line.main(workplace.arguments("tiny"), standalone_mode=False)
    damage(checkpoint.path / "optimizer.safetensors", "a bit")  # on the second machine only
    agreement = Agreement.in_one_process()
    monkeypatch.setattr(
        agreement,
        "from_rank_0",
        lambda step, _: {"checkpoint": json.dumps([checkpoint.name, []]), "status": ""}[step],
    )
    monkeypatch.setattr(agreement, "require_same", lambda *_: None)  # there is one process here

    def prepared(*, rank, local_rank):
        place = Process(rank, local_rank, world_size=4, device=torch.device("cpu"))
        return prepare_run(options, place, PhaseClock(), agreement)

    with pytest.raises(UserError, match="damaged: optimizer.s.* has changed .*, on .*; copy"):
        prepared(rank=2, local_rank=0)
    for rank in (0, 1, 3):  # rank 0 has looked before, for all of its machine
        assert prepared(rank=rank, local_rank=rank % 2).resume.checkpoint == checkpoint


LONGER = "because the run has another length: the schedule ({}) now has 80 steps; with"


@pytest.mark.parametrize(
    ("train", "was", "num_steps", "changed", "raised"),
    [
        ({"schedule": "linear"}, 0.0, 80, ["min_train_tokens"], LONGER.format("linear")),
        ({"learning_rate": 0.02}, 0.01, 80, ["learning_rate"], "because learning_rate changed"),
        ({"learning_rate": 0.02}, 0.01, 80, None, "the learning rate rises from 0.01 to 0.02"),
        ({"schedule": "wsd"}, 0.01, 80, [], ""),  # before its decay
        ({"schedule": "linear"}, 0.0, 40, [], ""),  # it is finished
        ({"schedule": "linear"}, 0.01 * 40 / 79, 80, [], ""),  # in its middle
        ({"schedule": "linear", "learning_rate": 0.005}, 0.01 * 40 / 79, 80, ["learning_rate"], ""),
    ],
)
def test_a_rate_that_rises_is_one_warning_with_its_cause(
    workplace, train, was, num_steps, changed, raised
):
    workplace.add_run(train=train)
    config = load_run(workplace.runs_dir, "tiny").config
    found = schedule_warning(config, 39, was, num_steps=num_steps, changed=changed)
    assert raised in found and bool(raised) == bool(found)


def test_before_its_decay_wsd_has_the_rates_of_a_run_of_any_length(workplace):
    """So the longer run from such a checkpoint is the one that was long from the start."""
    workplace.add_run(train={"schedule": "wsd", "decay_period_percent": 20})
    config = load_run(workplace.runs_dir, "tiny").config
    short, long = (
        [learning_rate_at(config, step, num_steps=num_steps) for step in range(100)]
        for num_steps in (100, 200)
    )
    assert short[:81] == long[:81] and short[81:] != long[81:]


def test_without_links_latest_and_best_are_files_that_name_checkpoints(tmp_path, monkeypatch):
    for patch in odd_file_system(tmp_path):
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


@cache
def snapshot():
    return SnapshotBuffers().take(state(0))


def save_as(run, identity, *steps):
    for step in steps:
        meta = describe(step).model_copy(update={"identity": identity.name})
        save_checkpoint(run.checkpoints_dir, snapshot(), meta)


def launch(run, *, checkpoint=None, fresh=False):
    """Choose as a launch does, and record what it trains; return the step, and the warnings."""
    options = Options("tiny", checkpoint=checkpoint, fresh=fresh)
    name, warnings = choose_checkpoint(run, options)
    checkpoint = open_checkpoint(run.checkpoints_dir / name) if name else None
    write_identity(run.run_dir, identity_of_launch(run, checkpoint, options))
    first_step = ResumePoint(checkpoint).first_step
    clean_up(run.run_dir, from_step=first_step)
    return first_step - 1, warnings


def steps(run):
    return [found.meta.global_step for found in list_checkpoints(run.checkpoints_dir)]


def name_at(run, step):
    return next(
        found.name
        for found in list_checkpoints(run.checkpoints_dir)
        if found.meta.global_step == step
    )


def bring_back(run):
    """Put everything that was set aside back, as a copy that never deletes does."""
    for path in run.run_dir.glob("set-aside/*/checkpoints/*"):
        if not (run.checkpoints_dir / path.name).exists():
            shutil.copytree(path, run.checkpoints_dir / path.name)


OPERATIONS = st.sampled_from(["save", "go on", "fresh", "bring back"]) | st.integers(0, 9)


@settings(max_examples=15, deadline=None)
@given(st.lists(OPERATIONS, max_size=8))
def test_a_run_goes_on_with_its_own_checkpoints_alone(operations):
    """Also after steps back (numbers), whatever was set aside and comes back."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # which takes most of the time
        Workplace(Path(place)).add_run()
        run, line, newest = load_run(Path(place, "runs"), "tiny"), [], 0
        launch(run)
        for operation in ("save", "save", *operations, "bring back", "go on"):
            identity = read_identity(run.run_dir)
            if operation == "save":
                newest += 1
                line.append(newest)
                save_as(run, identity, newest)
            elif operation == "bring back":
                bring_back(run)
            elif isinstance(operation, int) and line:
                line = line[: operation % len(line) + 1]
                named = name_at(run, line[-1])
                assert launch(run, checkpoint=named) == (line[-1], [])
                assert read_identity(run.run_dir).name != identity.name
            elif operation == "fresh":
                line = []
                assert launch(run, fresh=True) == (-1, [])
                assert read_identity(run.run_dir).name != identity.name
            else:
                assert launch(run) == (line[-1] if line else -1, [])
                assert read_identity(run.run_dir) == identity
            assert steps(run) == line


def test_a_damaged_partial_or_linked_newest_checkpoint_is_no_step_back(run, tmp_path):
    write_identity(run.run_dir, A)
    save_as(run, A, 9, 19, 29)
    damaged, partial = (run.checkpoints_dir / name_at(run, step) for step in (19, 29))
    damage(damaged / "model.safetensors", "a bit")
    (partial / "manifest.json").unlink()
    moved = save(tmp_path / "elsewhere", 39)
    (run.checkpoints_dir / moved.name).symlink_to(moved.path)
    step, warnings = launch(run, checkpoint="latest")
    assert step == 9 and read_identity(run.run_dir) == A and not partial.exists()
    for wanted in ("is used instead", f"{partial}: has no manifest, ", f"{moved.name}: is a link"):
        assert any(wanted in warning for warning in warnings), wanted


def test_checkpoints_without_an_identity_are_the_runs(run):
    save_as(run, A, 9, 19)
    assert launch(run) == (19, []) and read_identity(run.run_dir) == A


def test_a_damaged_identity_is_refused(run):
    save_as(run, A, 9)
    for content in ("", "{}}", '{"name": "../up"}', '{"name": 3}', "[" * 10**5):
        (run.run_dir / IDENTITY).write_text(content)
        with pytest.raises(UserError, match="identity.json: cannot be read .damaged.; restore it"):
            launch(run)


def full(*_):
    raise OSError(28, "No space left on device")


def save_and_wait(saver, global_step):
    saver.save(state(0), describe(global_step))
    saver.wait()


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


class Gate:
    """Writes only while it is open."""

    def __init__(self, monkeypatch):
        self.opened, self.entered = threading.Event(), threading.Event()
        self.inside = self.most = 0
        self.save = checkpointing.save_checkpoint
        monkeypatch.setattr(checkpointing, "save_checkpoint", self)

    def __call__(self, *arguments):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.opened.wait(timeout=30)
        saved = self.save(*arguments)
        self.inside -= 1
        return saved


@pytest.mark.parametrize("place", ["weights", "moments"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, place):
    saver, built = BackgroundSaver(tmp_path, keep=1), state(0)
    save_and_wait(saver, 0)
    parameter = next(built.model.parameters())
    broken = parameter if place == "weights" else built.optimizer.state[parameter]["exp_avg"]
    broken.detach().view(-1)[0] = torch.nan
    saver.save(built, describe(1))
    with pytest.raises(
        UserError, match="the checkpoint of step 2 was not saved: .*not finite"
    ) as caught:
        saver.wait()
    assert caught.value.status == NON_FINITE
    (kept,) = list_checkpoints(tmp_path)
    assert kept.meta.global_step == 0 and find_checkpoint(tmp_path, "latest") == kept


def test_training_continues_while_the_snapshot_is_written(tmp_path, gate):
    saver, trained = BackgroundSaver(tmp_path), state(0)
    as_it_was = {name: value.clone() for name, value in trained.model.state_dict().items()}
    saver.save(trained, describe(0))
    assert gate.entered.wait(timeout=30)
    trained.model(torch.arange(16)[None], torch.arange(16)[None]).backward()
    trained.optimizer.step()  # `save` returned, and nothing is written yet
    assert not list_checkpoints(tmp_path)
    gate.opened.set()
    saver.wait()
    loaded = state(1)
    load_checkpoint(find_checkpoint(tmp_path, "latest"), loaded)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, as_it_was[name]), name
    assert loaded.optimizer.state_dict()["state"][0]["step"] == 1
    assert saver.num_checkpoints == 1 and saver.longest_write_seconds > 0


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    saver = BackgroundSaver(tmp_path)
    saver.save(state(0), describe(0))
    second = threading.Thread(target=saver.save, args=(state(0), describe(1)))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive()  # its snapshot would spoil what is being written
    gate.opened.set()
    second.join(timeout=30)
    saver.wait()
    assert gate.most == 1
    assert [found.meta.global_step for found in list_checkpoints(tmp_path)] == [0, 1]


@pytest.mark.parametrize("part", ["checkpoint", "validation loss"])
def test_a_write_error_is_reported_and_earlier_checkpoints_stay_whole(tmp_path, monkeypatch, part):
    saver = BackgroundSaver(tmp_path)
    save_and_wait(saver, 0)
    if part == "checkpoint":
        monkeypatch.setattr(safetensors.torch, "save_file", full)
        save_and_wait(saver, 1)
    else:
        save_and_wait(saver, 1)
        monkeypatch.setattr(checkpointing, "add_validation", full)
        saver.add_validation(Validation(loss=None))
        saver.wait()
    assert saver.is_behind
    assert saver.pop_failure() == f"the {part} of step 2 {FULL}" and not saver.pop_failure()
    load_checkpoint(find_checkpoint(tmp_path, "latest"), state(0))
    assert not named_as_checkpoints(tmp_path, partial=True)
    saver.retry()
    assert saver.is_behind and saver.pop_failure()
    monkeypatch.undo()
    saver.retry()
    assert not saver.is_behind and not saver.pop_failure()
    first, second = list_checkpoints(tmp_path)
    assert second.meta.global_step == 1 == saver.num_checkpoints - 1
    assert first.validation is None and bool(second.validation) == (part != "checkpoint")


def test_a_validation_is_added_once_its_checkpoint_is_whole(tmp_path, gate):
    saver = BackgroundSaver(tmp_path, keep=1)
    saver.save(state(0), describe(0))
    assert gate.entered.wait(timeout=30)
    saver.add_validation(Validation(loss=0.5))  # the validation is quicker than the write
    assert not list_checkpoints(tmp_path)
    gate.opened.set()
    saver.wait()
    assert find_checkpoint(tmp_path, "best").loss == 0.5
    save_and_wait(saver, 1)
    assert saver.validation is None
    saver.add_validation(Validation(loss=0.25))
    saver.wait()
    assert not saver.is_behind and not saver.pop_failure()
    (kept,) = list_checkpoints(tmp_path)  # the earlier one is neither the newest nor the best
    assert (kept.meta.global_step, kept.loss) == (1, 0.25)


def test_snapshots_take_few_blocks_of_memory_and_use_them_again(monkeypatch):
    monkeypatch.setattr(checkpointing, "SNAPSHOT_BLOCK_BYTES", 2**15)
    buffers = SnapshotBuffers()
    snapshot = buffers.take(state(1))
    tensors = [*snapshot.weights.values(), *snapshot.moments.values()]
    blocks = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors
    }
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert set(blocks.values()) == {2**15}
    assert num_bytes < sum(blocks.values()) < 1.2 * num_bytes + 2**15
    again = buffers.take(state(2))
    assert again.weights[NORM].data_ptr() == snapshot.weights[NORM].data_ptr()
