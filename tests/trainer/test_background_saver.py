from __future__ import annotations

import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from basics.checkpoint_names import named_as_checkpoints
from basics.errors import NON_FINITE, UserError
from checkpointing import (
    Checkpoint,
    CheckpointMeta,
    TrainingState,
    Validation,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from run_config import ModelConfig, TrainConfig
from tests.support.checkpoints import ONE_PROCESS
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from trainer import background_saver
from trainer.background_saver import BackgroundSaver
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device


def state() -> TrainingState:
    train = resolve_for_device(TrainConfig(**TINY_TRAIN), ONE_PROCESS.device)
    built = build_training_state(ModelConfig(**TINY_MODEL), train, ONE_PROCESS)
    take_step(built)
    return built


def take_step(built: TrainingState) -> None:
    built.model(torch.arange(16)[None], torch.arange(16)[None]).backward()
    built.optimizer.step()
    built.optimizer.zero_grad()


def meta(global_step: int) -> CheckpointMeta:
    return CheckpointMeta(global_step=global_step, tokens=0, loss=1.0, train_loss=1.0, seconds={},
                          tokenizer=None, model=ModelConfig(**TINY_MODEL), random_seed=42, data={})


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["weights", "moments"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path, place: str) -> None:
    saver, built = BackgroundSaver(tmp_path, keep=1), state()
    saver.save(built, meta(0))
    saver.wait()
    parameter = next(built.model.parameters())
    broken = parameter if place == "weights" else built.optimizer.state[parameter]["exp_avg"]
    broken.detach().view(-1)[0] = torch.nan
    saver.save(built, meta(1))
    with pytest.raises(UserError, match="the checkpoint of step 2 was not saved: .*not finite"
                       ) as caught:
        saver.wait()
    assert caught.value.status == NON_FINITE
    (kept,) = list_checkpoints(tmp_path)
    assert kept.meta.global_step == 0 and find_checkpoint(tmp_path, "latest") == kept


class Gate:
    """Writes only while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, self.inside, self.most = (
            threading.Event(), threading.Event(), 0, 0)
        self.save = background_saver.save_checkpoint
        monkeypatch.setattr(background_saver, "save_checkpoint", self)

    def __call__(self, *arguments: object) -> Checkpoint:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.opened.wait(timeout=30)
        saved = self.save(*arguments)
        self.inside -= 1
        return saved


def test_training_continues_while_the_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writer, trained = Gate(monkeypatch), BackgroundSaver(tmp_path), state()
    as_it_was = {name: value.clone() for name, value in trained.model.state_dict().items()}
    writer.save(trained, meta(0))
    assert gate.entered.wait(timeout=30)
    take_step(trained)  # it returned, and nothing is written yet
    assert not list_checkpoints(tmp_path)
    gate.opened.set()
    writer.wait()
    loaded = state()
    load_checkpoint(find_checkpoint(tmp_path, "latest"), loaded)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, as_it_was[name]), name
    assert loaded.optimizer.state_dict()["state"][0]["step"] == 1
    assert writer.num_checkpoints == 1 and writer.longest_write_seconds > 0


def test_a_second_save_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writer, trained = Gate(monkeypatch), BackgroundSaver(tmp_path), state()
    writer.save(trained, meta(0))
    second = threading.Thread(target=writer.save, args=(trained, meta(1)))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive()  # its snapshot would spoil what is being written
    gate.opened.set()
    second.join(timeout=30)
    writer.wait()
    assert gate.most == 1
    assert [found.meta.global_step for found in list_checkpoints(tmp_path)] == [0, 1]


def test_a_write_error_is_reported_and_earlier_checkpoints_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, trained = BackgroundSaver(tmp_path), state()
    writer.save(trained, meta(0))
    writer.wait()
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    writer.save(trained, meta(1))
    writer.wait()
    assert writer.is_behind
    assert writer.pop_failure() == (
        "the checkpoint of step 2 could not be written (No space left on device; make room)")
    assert writer.pop_failure() == ""
    load_checkpoint(find_checkpoint(tmp_path, "latest"), state())
    assert not named_as_checkpoints(tmp_path, partial=True)
    writer.retry()
    assert writer.is_behind and writer.pop_failure()
    monkeypatch.undo()
    writer.retry()
    assert not writer.is_behind and not writer.pop_failure()
    assert find_checkpoint(tmp_path, "latest").meta.global_step == 1 == writer.num_checkpoints - 1


def test_a_validation_is_added_once_its_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, saver = Gate(monkeypatch), BackgroundSaver(tmp_path, keep=1)
    saver.save(state(), meta(0))
    assert gate.entered.wait(timeout=30)
    assert not saver.is_validated
    saver.add_validation(Validation(loss=0.5))  # the validation is quicker than the write
    assert saver.is_validated and not list_checkpoints(tmp_path)
    gate.opened.set()
    saver.wait()
    assert find_checkpoint(tmp_path, "best").loss == 0.5
    saver.save(state(), meta(1))
    assert not saver.is_validated
    saver.add_validation(Validation(loss=0.25))
    saver.wait()
    assert not saver.is_behind and not saver.pop_failure()
    (kept,) = list_checkpoints(tmp_path)  # the earlier one is neither the newest nor the best
    assert (kept.meta.global_step, kept.loss) == (1, 0.25)


def test_a_validation_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = BackgroundSaver(tmp_path)
    saver.save(state(), meta(0))
    saver.wait()
    monkeypatch.setattr(background_saver, "add_validation", full)
    saver.add_validation(Validation(loss=None))
    saver.wait()
    assert saver.is_behind and saver.pop_failure() == (
        "the validation loss of step 1 could not be written (No space left on device; make room)")
    monkeypatch.undo()
    saver.save(state(), meta(1))
    saver.wait()
    first, second = list_checkpoints(tmp_path)
    assert first.validation is not None and first.loss is None and second.validation is None


def test_an_earlier_launchs_checkpoint_is_validated(tmp_path: Path) -> None:
    before = BackgroundSaver(tmp_path)
    before.save(state(), meta(4))
    before.wait()
    (newest,) = list_checkpoints(tmp_path)
    saver = BackgroundSaver(tmp_path, newest=newest)
    assert not saver.is_validated and saver.has_finite_loss
    saver.add_validation(Validation(loss=0.75))
    saver.wait()
    (validated,) = list_checkpoints(tmp_path)
    assert validated.loss == 0.75 and saver.num_checkpoints == 0


@pytest.mark.parametrize("loss", [0.75, None])
def test_a_loss_that_is_not_finite_is_known_in_a_later_launch(
    tmp_path: Path, loss: float | None
) -> None:
    newest = Checkpoint(tmp_path, meta(4), Validation(loss=loss))
    assert BackgroundSaver(tmp_path, newest=newest).has_finite_loss == (loss is not None)
