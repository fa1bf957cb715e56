from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from checkpointing import SnapshotBuffers, load_checkpoint, load_weights, save_checkpoint
from run_config import TrainConfig
from tests.support import checkpoints
from tests.support.workplace import TINY_TRAIN
from trainer.weight_average import HORIZONS, averaged_weights, update_average

NUM_STEPS, HORIZON = 40, 4
TRAIN = TrainConfig(**TINY_TRAIN, weight_average=HORIZON)


def averaged_state(num_steps: int = NUM_STEPS):
    """Return a state whose weights have changed in each step, and the weights after each."""
    state, weights = checkpoints.state(1), []
    for step in range(num_steps):
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        update_average(state, TRAIN, step, num_steps=NUM_STEPS)
        weights.append(copy.deepcopy(state.model.state_dict()))
    return state, weights


def test_the_average_is_exponential_over_the_last_steps() -> None:
    state, weights = averaged_state()
    first = NUM_STEPS - HORIZONS * HORIZON
    for name, average in state.average.items():
        wanted = weights[first][name]
        for number, later in enumerate(weights[first + 1 :], 2):
            wanted = wanted + (later[name] - wanted) / min(number, HORIZON)
        torch.testing.assert_close(average, wanted)
    assert state.average.keys() == weights[0].keys()


def test_a_horizon_longer_than_the_run_gives_the_mean_of_all_steps() -> None:
    state, train = checkpoints.state(1), TrainConfig(**TINY_TRAIN, weight_average=1000)
    for step in range(4):
        with torch.no_grad():
            state.model.final_norm.bias.fill_(step)
        update_average(state, train, step, num_steps=4)
    torch.testing.assert_close(state.average["final_norm.bias"], torch.full((16,), 1.5))


def test_in_a_run_that_became_longer_the_average_begins_again() -> None:
    state, _ = averaged_state()
    update_average(state, TRAIN, NUM_STEPS, num_steps=2 * NUM_STEPS)
    assert not state.average
    first = 2 * NUM_STEPS - HORIZONS * HORIZON
    for step, value in ((first, 1.0), (first + 1, 4.0)):
        with torch.no_grad():
            state.model.final_norm.bias.fill_(value)
        update_average(state, TRAIN, step, num_steps=2 * NUM_STEPS)
    torch.testing.assert_close(state.average["final_norm.bias"], torch.full((16,), 2.5))


def test_it_begins_late_and_only_where_asked() -> None:
    assert not averaged_state(NUM_STEPS - HORIZONS * HORIZON)[0].average
    state = checkpoints.state(1)
    update_average(state, TrainConfig(**TINY_TRAIN), NUM_STEPS - 1, num_steps=NUM_STEPS)
    assert not state.average


def test_the_block_sees_the_average_and_training_goes_on_with_the_weights() -> None:
    state, weights = averaged_state()
    average = copy.deepcopy(state.average)
    tensor = state.model.token_embedding.weight
    with averaged_weights(state):
        torch.testing.assert_close(dict(state.model.state_dict()), average, rtol=0, atol=0)
        assert state.model.token_embedding.weight is tensor  # compiled code holds it
    torch.testing.assert_close(dict(state.model.state_dict()), dict(weights[-1]), rtol=0, atol=0)
    torch.testing.assert_close(state.average, average, rtol=0, atol=0)


@pytest.mark.parametrize("has_average", [True, False])
def test_a_checkpoint_keeps_both_and_the_average_is_what_is_read_out(
    tmp_path: Path, has_average: bool
) -> None:
    state, weights = averaged_state(NUM_STEPS if has_average else 1)
    saved = save_checkpoint(tmp_path, SnapshotBuffers().take(state), checkpoints.describe(1))
    assert saved.has_average == has_average
    loaded = checkpoints.state(2)
    load_checkpoint(saved, loaded)
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(weights[-1]), rtol=0, atol=0)
    torch.testing.assert_close(loaded.average, state.average, rtol=0, atol=0)
    read_out = checkpoints.state(3).model
    load_weights(saved, read_out)
    wanted = state.average if has_average else weights[-1]
    torch.testing.assert_close(dict(read_out.state_dict()), dict(wanted), rtol=0, atol=0)


def test_a_resumed_average_goes_on_in_the_right_order(tmp_path: Path) -> None:
    state, _ = averaged_state(NUM_STEPS - 1)
    saved = save_checkpoint(tmp_path, SnapshotBuffers().take(state), checkpoints.describe(1))
    loaded = checkpoints.state(2)
    load_checkpoint(saved, loaded)
    for each in (state, loaded):
        update_average(each, TRAIN, NUM_STEPS - 1, num_steps=NUM_STEPS)
    torch.testing.assert_close(loaded.average, state.average, rtol=0, atol=0)


def test_a_damaged_average_is_refused(tmp_path: Path) -> None:
    state, _ = averaged_state()
    state.average["head.weight"][0, 0] = torch.nan
    saved = save_checkpoint(tmp_path, SnapshotBuffers().take(state), checkpoints.describe(1))
    with pytest.raises(Exception, match="average.safetensors: head.weight holds numbers"):
        load_checkpoint(saved, checkpoints.state(2))
