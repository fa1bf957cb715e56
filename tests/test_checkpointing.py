import json
import os
import signal
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import checkpointing
from basics.checkpoint_files import MANIFEST, find_damage, named_as_checkpoints
from basics.errors import UserError
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
    load_weights,
    newest_whole,
    open_checkpoint,
    prune,
    remove_checkpoint,
    renew_links,
    save_checkpoint,
)
from gpt import GPTModel
from processes.command_line import command_line
from processes.launch import Process
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from run_config import load_run
from tests.support.models import MODEL, damage, describe, save, state
from tests.support.workplace import small_disk
from tokens.batches import open_run_data
from trainer.background_saver import BackgroundSaver
from trainer.resuming import check_same_run, resume_warnings
from trainer.startup import prepare_run

NORM = "final_norm.bias"


def test_a_loaded_checkpoint_equals_the_saved_state(tmp_path):
    checkpoint = save(tmp_path, 7)
    saved, loaded = state(7), state(8)
    loaded.optimizer.param_groups[0]["weight_decay"] = 0.7
    load_checkpoint(checkpoint, loaded)
    assert loaded.optimizer.param_groups[0]["weight_decay"] == 0.7  # that of train.json counts
    for name, value in saved.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name
    wanted = saved.optimizer.state_dict()["state"]
    found = loaded.optimizer.state_dict()["state"]
    assert wanted.keys() == found.keys()
    for index, moments in wanted.items():
        for key, value in moments.items():
            assert torch.equal(value, found[index][key]), (index, key)
    assert loaded.scaler.get_scale() == 2.0**7
    assert loaded.loss_scale() == LossScale(scale=2.0**7, growth_tracker=3)


def test_snapshots_take_few_blocks_of_memory(monkeypatch):
    monkeypatch.setattr(checkpointing, "SNAPSHOT_BLOCK_BYTES", 2**15)
    snapshot = SnapshotBuffers().take(state(1))
    tensors = [*snapshot.weights.values(), *snapshot.moments.values()]
    blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
              for part in tensors}
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert set(blocks.values()) == {2**15}
    assert num_bytes < sum(blocks.values()) < 1.2 * num_bytes + 2**15


def test_latest_is_the_highest_step_and_best_the_lowest_loss(tmp_path, monkeypatch):
    """Whatever their times are."""
    assert find_checkpoint(tmp_path, "latest") is None
    for step, loss, year in ((30, 2.0, 2019), (10, 1.5, 2031), (20, None, 2026), (25, 1.5, 2026)):
        monkeypatch.setattr("checkpointing.time.strftime",
                            lambda *_, year=year: f"{year}0101Z000000")
        save(tmp_path, step, loss)
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [10, 20, 25, 30]
    assert newest_whole(tmp_path)[0].meta.global_step == 30
    for name, step in (("latest", 30), ("best", 25)):
        assert find_checkpoint(tmp_path, name).meta.global_step == step
        link = os.readlink(tmp_path / name)
        assert link.endswith(f"-iteration-{step}") and not os.path.isabs(link)
        assert find_checkpoint(tmp_path, link).name == link


@pytest.mark.parametrize("place", [
    "save.meta", "save.weights", "save.optimizer", "save.manifest", "save.remove"])
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
    clean_up(tmp_path, from_step=0)
    assert (path / "model.safetensors").exists()


@pytest.mark.parametrize(("file", "how"), [
    ("model.safetensors", "deleted"), ("model.safetensors", "cut short"),
    ("optimizer.safetensors", "a bit"), ("meta.json", "rubbish"), ("meta.json", "deleted"),
    (MANIFEST, "cut short"), (MANIFEST, "a bit"), (MANIFEST, "rubbish")])
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
    names = [save(tmp_path, step, loss).name
             for step, loss in enumerate([5.0, 4.0, 1.0, 3.0, 2.0, 2.5])]
    prune(tmp_path, keep=2, protected=[names[1]])
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [1, 2, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(names[step] for step in (1, 2, 4, 5)), "latest", "best"}


def test_nothing_is_pruned_where_the_newest_is_damaged(tmp_path):
    for step in range(3):
        newest = save(tmp_path, step)
    damage(newest.path / "model.safetensors", "a bit")
    prune(tmp_path, keep=1, protected=[])
    assert len(list_checkpoints(tmp_path)) == 3


def test_a_manifest_names_every_other_file_and_no_other_place(tmp_path):
    checkpoint = add_validation(save(tmp_path / "checkpoints", 3), Validation(loss=1.5))
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["global_step"] == 3 and manifest["files"].keys() == {
        "model.safetensors", "optimizer.safetensors", "meta.json", "validation.json"}
    assert {path.name for path in checkpoint.path.iterdir()} == {MANIFEST, *manifest["files"]}
    for change, message in (
        ({"global_step": 4}, "meta.json does not agree with the manifest"),
        ({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}, f"{MANIFEST} cannot be read"),
    ):
        (checkpoint.path / MANIFEST).write_text(json.dumps(manifest | change))
        with pytest.raises(UserError, match=f"damaged: {message}"):
            open_checkpoint(checkpoint.path)


DATA = {"train": "100 tokens, abc", "start_train_token": "0", "validation_sequences": "6"}


@pytest.mark.parametrize(("changes", "message"), [
    ({"n_heads": 4}, "model.json: n_heads is 4, .* was trained with 2; set it back"),
    ({"optimizer": "muon"}, 'train.json: optimizer is muon, .* was trained with adamw'),
    ({"random_seed": 7}, "train.json: random_seed is 7, .* was trained with 42"),
    ({"train": "100 tokens, xyz"}, "train.json: the train file of tiny is 100 tokens, xyz, "),
    ({"start_train_token": "16"}, "train.json: start_train_token is 16, .* was trained with 0"),
])
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


def test_another_length_of_a_validation_is_a_warning(workplace):
    workplace.add_run(model={"drop_rate": 0.3})
    checkpoint, run = with_data(save(workplace.root, 3)), load_run(workplace.runs_dir, "tiny")
    check_same_run(checkpoint, run, DATA)
    assert resume_warnings(checkpoint, run, recorded([3]), data=DATA, num_steps=9) == []
    data = DATA | {"validation_sequences": "4"}
    (warning,) = resume_warnings(checkpoint, run, recorded([3]), data=data, num_steps=9)
    assert "a validation has 4 sequences now, up to " in warning


@pytest.mark.parametrize(("change", "message"), [
    (lambda moments: moments.pop(f"step/{NORM}"), f"step/{NORM} is absent"),
    (lambda moments: moments.update(more=torch.zeros(1)), "more is"),
    (lambda moments: moments.update({f"exp_avg/{NORM}": torch.zeros(3)}), r"\[3\]\), wanted"),
])
def test_moments_that_do_not_fit_the_model_are_refused(tmp_path, change, message):
    checkpoint, path = save(tmp_path, 3), tmp_path / "latest/optimizer.safetensors"
    moments = {key: value.clone() for key, value in safetensors.torch.load_file(path).items()}
    change(moments)
    safetensors.torch.save_file(moments, path)
    with pytest.raises(UserError, match=rf"cannot be loaded: .*{message}"):
        load_checkpoint(checkpoint, state(0))


@pytest.mark.parametrize(("changes", "message"), [
    ({"emb_dim": 32}, r"attention.output.bias is .*\[16\]\), wanted .*\[32\]\)"),
    ({"n_layers": 3}, r"blocks.2.* is absent, wanted .*"),
    ({"tie_weights": True}, r"head.weight is .*\[257, 16\]\), wanted absent")])
def test_a_model_of_another_shape_is_refused(tmp_path, changes, message):
    checkpoint = save(tmp_path, 3)
    with pytest.raises(UserError, match=f"cannot be loaded: .*{message}; restore model.json"):
        load_weights(checkpoint, GPTModel(MODEL.model_copy(update=changes)))


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
    damage(first.path / "validation.json", "a bit")
    assert find_damage(first.path, thoroughly=True).startswith("validation.json has changed")


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
        run.checkpoints_dir, SnapshotBuffers().take(state(2)), describe(2).model_copy(update={
            "data": data.fingerprints, "tokens": 3 * data.plan.tokens_per_step}))
    options = command_line.main(workplace.arguments("tiny"), standalone_mode=False)
    damage(checkpoint.path / "optimizer.safetensors", "a bit")  # on the second machine only
    agreement = Agreement.in_one_process()
    monkeypatch.setattr(agreement, "from_rank_0", lambda *_: json.dumps([False, checkpoint.name]))

    def prepared(*, rank, local_rank):
        place = Process(rank, local_rank, world_size=4, device=torch.device("cpu"))
        return prepare_run(options, place, PhaseClock(), agreement)

    with pytest.raises(UserError, match="damaged: optimizer.s.* has changed .*, on .*; copy"):
        prepared(rank=2, local_rank=0)
    for rank in (0, 1, 3):  # rank 0 has looked before, for all of its machine
        assert prepared(rank=rank, local_rank=rank % 2).resume_from == checkpoint


def recorded(steps, learning_rate=0.01):
    return [{"global_step": step, "train_loss": None, "learning_rate": learning_rate}
            for step in steps]


@pytest.mark.parametrize(("train", "was", "num_steps", "raised"), [
    ({"schedule": "linear"}, 0.0, 80, "(linear, now 80 steps) raises the learning rate from 0 to"
                                      " 0.0049"),
    ({"schedule_learning_rate": True}, 0.001, 80, "(cosine, now 80 steps) raises"),
    ({"schedule": "wsd"}, 0.01, 80, ""),  # before its decay
    ({"schedule": "linear"}, 0.0, 40, ""),  # it is finished
    ({"schedule": "linear"}, 0.01 * 40 / 79, 80, ""),  # in its middle
    ({"schedule": "linear", "learning_rate": 0.005}, 0.01 * 40 / 79, 80, ""),
])
def test_a_schedule_that_begins_again_is_one_warning(workplace, train, was, num_steps, raised):
    workplace.add_run(train=train)
    found = resume_warnings(save(workplace.root, 39), load_run(workplace.runs_dir, "tiny"),
                            recorded([9, 19, 29, 39], was), data={}, num_steps=num_steps)
    assert len(found) == bool(raised) and (not raised or raised in found[0])
