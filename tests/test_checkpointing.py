from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support import TINY_MODEL, TINY_TRAIN
from torch.amp import GradScaler

from checkpointing import (
    Checkpoint,
    CheckpointMeta,
    check_weights_fit,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    remove_partial_checkpoints,
    save_checkpoint,
    set_aside,
)
from gpt import GPTModel
from optimization import build_optimizer
from run_config import ModelConfig, TrainConfig, UserError
from training_step import SnapshotBuffers, TrainingState

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
                          seconds={}, tokenizer=None)
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


def test_a_damaged_checkpoint_is_not_passed_by(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    (checkpoint.path / "meta.json").write_text('{"global_step": 3}')
    with pytest.raises(UserError, match="its meta.json is missing or cannot be read"):
        find_checkpoint(tmp_path, "latest")


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
    aside = set_aside(tmp_path, lambda checkpoint: checkpoint.meta.global_step > 1)
    assert [c.meta.global_step for c in list_checkpoints(checkpoints_dir)] == [1]
    assert [c.meta.global_step for c in list_checkpoints(aside / "checkpoints")] == [2, 3]
    assert (aside / "metrics.jsonl").read_text() == "{}\n"
    for link in ("latest", "best"):
        assert json.loads((checkpoints_dir / link / "meta.json").read_text())["global_step"] == 1
    assert set_aside(tmp_path, lambda checkpoint: False) is None
