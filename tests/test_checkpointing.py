from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support import TINY_MODEL, TINY_TRAIN, Workplace
from torch.amp import GradScaler

from checkpoint_loading import load_checkpoint
from checkpointing import (
    Checkpoint,
    CheckpointMeta,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    prune,
    remove_partial_checkpoints,
    save_checkpoint,
    set_aside,
)
from gpt import GPTModel
from manifest import MANIFEST, find_damage
from optimization import build_optimizer
from resuming import check_identity, check_weights_fit
from run_config import ModelConfig, TrainConfig, load_run
from training_step import SnapshotBuffers, TrainingState
from user_error import UserError

MODEL = ModelConfig(**TINY_MODEL)


def state(seed: int, model: ModelConfig = MODEL) -> TrainingState:
    torch.manual_seed(seed)
    network = GPTModel(model)
    optimizer = build_optimizer(network, TrainConfig(**TINY_TRAIN))
    network(torch.arange(16)[None], torch.arange(16)[None]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return TrainingState(network, optimizer, GradScaler("cpu", init_scale=2.0**seed))


def save(checkpoints_dir: Path, global_step: int, loss: float | None = 1.0) -> Checkpoint:
    meta = CheckpointMeta(global_step=global_step, tokens=0, loss=loss, train_loss=loss,
                          seconds={}, tokenizer=None, model=MODEL, random_seed=42,
                          data={"train": "100 tokens, abc"})
    return save_checkpoint(checkpoints_dir, SnapshotBuffers().take(state(global_step)), meta)


def test_everything_comes_back(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 7)
    saved, loaded = state(7), state(8)
    load_checkpoint(checkpoint, loaded)
    for name, value in saved.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name]), name
    wanted = saved.optimizer.state_dict()["state"]
    found = loaded.optimizer.state_dict()["state"]
    assert wanted.keys() == found.keys()
    for index, moments in wanted.items():
        for key, value in moments.items():
            assert torch.equal(value, found[index][key]), (index, key)
    assert loaded.scaler.get_scale() == 2.0**7


def test_latest_is_the_highest_step_and_best_the_lowest_loss(tmp_path: Path) -> None:
    for step, loss in ((30, 2.0), (10, 1.5), (20, None), (25, 1.5)):
        save(tmp_path, step, loss)
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [10, 20, 25, 30]
    for name, step in (("latest", 30), ("best", 25)):
        assert find_checkpoint(tmp_path, name).meta.global_step == step
        link = tmp_path / name
        assert not os.path.isabs(os.readlink(link))
        assert json.loads((link / "meta.json").read_text())["global_step"] == step


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "a", 3)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "latest" / "model.safetensors").is_file()


def test_two_in_the_same_second_do_not_collide(tmp_path: Path) -> None:
    names = {save(tmp_path, 3).name for _ in range(3)}
    assert len(names) == 3 == len(list_checkpoints(tmp_path))


def test_what_a_kill_leaves_behind_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    (tmp_path / ".partial-20260101Z000000-iteration-9").mkdir()
    (tmp_path / ".partial-latest").symlink_to(checkpoint.name)
    assert find_checkpoint(tmp_path, "latest") == checkpoint
    remove_partial_checkpoints(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.name, "best", "latest"]
    assert (checkpoint.path / "model.safetensors").exists()


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(b"rubbish")


@pytest.mark.parametrize("how", ["deleted", "cut short", "a bit", "rubbish"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "meta.json", MANIFEST])
def test_damage_is_named_and_the_newest_whole_one_used(
    tmp_path: Path, file: str, how: str
) -> None:
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


def test_the_order_is_that_of_steps_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, year in ((5, 2031), (50, 2026), (500, 2019)):
        monkeypatch.setattr("checkpointing.time.strftime",
                            lambda *_, year=year: f"{year}0101Z000000")
        save(tmp_path, step)
    monkeypatch.undo()
    assert newest_whole(tmp_path)[0].meta.global_step == 500
    assert os.readlink(tmp_path / "latest") == "20190101Z000000-iteration-500"


def test_pruning_keeps_the_newest_the_best_and_the_protected(tmp_path: Path) -> None:
    names = [save(tmp_path, step, loss).name
             for step, loss in enumerate([5.0, 4.0, 1.0, 3.0, 2.0, 2.5])]
    prune(tmp_path, keep=2, protected=[names[1]])
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [1, 2, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(names[step] for step in (1, 2, 4, 5)), "latest", "best"}


def test_nothing_is_pruned_where_the_newest_is_damaged(tmp_path: Path) -> None:
    for step in range(3):
        newest = save(tmp_path, step)
    damage(newest.path / "model.safetensors", "a bit")
    prune(tmp_path, keep=1, protected=[])
    assert len(list_checkpoints(tmp_path)) == 3


def test_a_manifest_names_every_other_file_and_no_other_place(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoints", 3)
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["global_step"] == 3 and manifest["files"].keys() == {
        "model.safetensors", "optimizer.pt", "meta.json"}
    (tmp_path / "secret").write_text("x")
    manifest["files"] = {"../../secret": {"bytes": 1, "sha256": "0" * 64}}
    (checkpoint.path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    assert find_damage(checkpoint.path) == f"{MANIFEST} cannot be read"


@pytest.mark.parametrize(("changes", "message"), [
    ({"n_heads": 4}, "model.json: n_heads is 4, .* was trained with 2; set it back"),
    ({"tie_weights": True}, "model.json: tie_weights is True"),
    ({"random_seed": 7}, "train.json: random_seed is 7, .* was trained with 42"),
    ({"data": {"train": "100 tokens, xyz"}}, "train.json: the train tokens of tiny are not those"),
])
def test_another_run_is_no_resume(workplace: Workplace, changes: dict, message: str) -> None:
    model = {k: v for k, v in changes.items() if k in ("n_heads", "tie_weights")}
    train = {k: v for k, v in changes.items() if k == "random_seed"}
    workplace.add_run(model=model | {"drop_rate": 0.3}, train=train)
    checkpoint = save(workplace.root, 3)
    run = load_run(workplace.runs_dir, "tiny")
    with pytest.raises(UserError, match=message) as caught:
        check_identity(checkpoint, run, changes.get("data", checkpoint.meta.data))
    assert "--fresh" in str(caught.value)


def test_another_dropout_is_a_lever(workplace: Workplace) -> None:
    workplace.add_run(model={"drop_rate": 0.3})
    checkpoint = save(workplace.root, 3)
    check_identity(checkpoint, load_run(workplace.runs_dir, "tiny"), checkpoint.meta.data)


def test_the_configs_weight_decay_counts_after_loading(tmp_path: Path) -> None:
    loaded = state(0)
    loaded.optimizer.param_groups[0]["weight_decay"] = 0.7
    load_checkpoint(save(tmp_path, 3), loaded)
    assert loaded.optimizer.param_groups[0]["weight_decay"] == 0.7


def test_a_failed_write_leaves_no_checkpoint_and_the_last_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 4)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".partial*"))
    assert [c.meta.global_step for c in list_checkpoints(tmp_path)] == [3]
    load_checkpoint(find_checkpoint(tmp_path, "latest"), state(0))


def test_no_such_checkpoint_names_those_there_are(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "latest") is None
    name = save(tmp_path, 3).name
    assert find_checkpoint(tmp_path, name).name == name
    with pytest.raises(UserError, match=f"no checkpoint 'nix'; it has {name}"):
        find_checkpoint(tmp_path, "nix")


@pytest.mark.parametrize(("changes", "message"), [
    ({"emb_dim": 32}, r"attention.output.bias is \(16,\), but model.json makes it \(32,\)"),
    ({"n_layers": 3}, r"blocks.2.* is absent, but model.json makes it"),
    ({"tie_weights": True}, r"head.weight is \(257, 16\), but model.json makes it absent"),
])
def test_a_model_of_another_shape_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    checkpoint = save(tmp_path, 3)
    check_weights_fit(checkpoint, MODEL)
    with pytest.raises(UserError, match=message):
        check_weights_fit(checkpoint, MODEL.model_copy(update=changes))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("content", [b"", b"rubbish" * 99])
def test_damaged_files_are_one_line(tmp_path: Path, file: str, content: bytes) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint.path / file).write_bytes(content)
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_checkpoint(checkpoint, state(0))
    assert "\n" not in str(caught.value)


def test_setting_aside_moves_checkpoints_and_copies_records(tmp_path: Path) -> None:
    checkpoints_dir = tmp_path / "checkpoints"
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(checkpoints_dir, step, loss)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    damage(find_checkpoint(checkpoints_dir, "latest").path / "meta.json", "rubbish")
    aside = set_aside(tmp_path, from_step=2)
    assert [c.meta.global_step for c in list_checkpoints(checkpoints_dir)] == [1]
    assert len(list((aside / "checkpoints").iterdir())) == 2  # the damaged one too
    assert [c.meta.global_step for c in list_checkpoints(aside / "checkpoints")] == [2]
    assert (aside / "metrics.jsonl").read_text() == "{}\n"
    for link in ("latest", "best"):
        assert json.loads((checkpoints_dir / link / "meta.json").read_text())["global_step"] == 1
    assert set_aside(tmp_path, from_step=9) is None
