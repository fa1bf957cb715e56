"""The moving average of the weights over a run's last steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from checkpointing import TrainingState
from run_config import TrainConfig

HORIZONS = 5  # the average begins so many horizons before the end: older steps weigh under 1%


@torch.no_grad()
def update_average(state: TrainingState, train: TrainConfig, global_step: int, *,
                   num_steps: int) -> None:
    """Add the weights after a step to their average, if the run has one and it has begun.

    An exponential moving average over about `weight_average` steps; a plain mean at first, so that
    the weights with which it begins do not count more than others. Every rank keeps it.
    """
    if train.weight_average is None:
        return
    first_step = average_start(train, num_steps=num_steps)
    if global_step < first_step:  # the run may have been extended after its average had begun
        state.average.clear()
        return
    weights = dict(state.model.named_parameters())
    if not state.average:
        state.average.update({name: weight.detach().clone() for name, weight in weights.items()})
    else:
        averages = [state.average[name] for name in weights]  # a file has another order
        num_averaged = global_step - first_step
        share = max(1 / train.weight_average, 1 / (num_averaged + 1))
        torch._foreach_lerp_(averages, list(weights.values()), share)


def average_start(train: TrainConfig, *, num_steps: int) -> int:
    """Return the step with which the average of a run with `weight_average` begins."""
    return max(0, num_steps - HORIZONS * train.weight_average)


@contextmanager
def averaged_weights(state: TrainingState) -> Iterator[None]:
    """Put the averaged weights, if there are any, into the model for the length of the block."""
    _exchange(state)
    try:
        yield
    finally:
        _exchange(state)


@torch.no_grad()
def _exchange(state: TrainingState) -> None:
    """Exchange the values of weights and average in place: compiled code holds the tensors."""
    weights = dict(state.model.named_parameters())
    for name, average in state.average.items():
        weight = weights[name].clone()
        weights[name].copy_(average)
        average.copy_(weight)
