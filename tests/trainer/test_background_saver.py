import threading

import pytest
import safetensors.torch
import torch

from basics.checkpoint_files import named_as_checkpoints
from basics.errors import NON_FINITE, UserError
from checkpointing import (
    Validation,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from tests.support.models import describe, state
from trainer import background_saver
from trainer.background_saver import BackgroundSaver

FULL = "could not be written (No space left on device; make room)"


def full(*_):
    raise OSError(28, "No space left on device")


def save_and_wait(saver, global_step):
    saver.save(state(0), describe(global_step))
    saver.wait()


class Gate:
    """Writes only while it is open."""

    def __init__(self, monkeypatch):
        self.opened, self.entered = threading.Event(), threading.Event()
        self.inside = self.most = 0
        self.save = background_saver.save_checkpoint
        monkeypatch.setattr(background_saver, "save_checkpoint", self)

    def __call__(self, *arguments):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self.opened.wait(timeout=30)
        saved = self.save(*arguments)
        self.inside -= 1
        return saved


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.mark.parametrize("place", ["weights", "moments"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, place):
    saver, built = BackgroundSaver(tmp_path, keep=1), state(0)
    save_and_wait(saver, 0)
    parameter = next(built.model.parameters())
    broken = parameter if place == "weights" else built.optimizer.state[parameter]["exp_avg"]
    broken.detach().view(-1)[0] = torch.nan
    saver.save(built, describe(1))
    with pytest.raises(UserError, match="the checkpoint of step 2 was not saved: .*not finite"
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


def test_a_write_error_is_reported_and_earlier_checkpoints_stay_whole(tmp_path, monkeypatch):
    saver = BackgroundSaver(tmp_path)
    save_and_wait(saver, 0)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    save_and_wait(saver, 1)
    assert saver.is_behind
    assert saver.pop_failure() == f"the checkpoint of step 2 {FULL}" and not saver.pop_failure()
    load_checkpoint(find_checkpoint(tmp_path, "latest"), state(0))
    assert not named_as_checkpoints(tmp_path, partial=True)
    saver.retry()
    assert saver.is_behind and saver.pop_failure()
    monkeypatch.undo()
    saver.retry()
    assert not saver.is_behind and not saver.pop_failure()
    assert find_checkpoint(tmp_path, "latest").meta.global_step == 1 == saver.num_checkpoints - 1


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


def test_a_validation_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch):
    saver = BackgroundSaver(tmp_path)
    save_and_wait(saver, 0)
    monkeypatch.setattr(background_saver, "add_validation", full)
    saver.add_validation(Validation(loss=None))
    saver.wait()
    assert saver.is_behind and saver.pop_failure() == f"the validation loss of step 1 {FULL}"
    monkeypatch.undo()
    save_and_wait(saver, 1)
    first, second = list_checkpoints(tmp_path)
    assert first.validation is not None and first.loss is None and second.validation is None
