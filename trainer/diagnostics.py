"""Diagnostics of every so many global steps, measured on rank 0 without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from basics.device_time import Moment
from gpt import GPTModel
from processes.launch import Process
from run_config import Precision, TrainConfig
from tokens.batches import Microbatch
from trainer.layer_statistics import Statistics, forward_statistics
from trainer.precision import autocast

Numbers = dict[str, float | list[float]]

DIGITS = 5  # significant ones in the records


class Probe:
    """What a global step shows for measuring; this one measures nothing."""

    def see(self, microbatch: Microbatch) -> None:
        """Keep a microbatch of the step."""

    def before_update(self, model: GPTModel) -> None:
        """Measure the averaged gradients before they are clipped, and the weights."""

    def after_update(self, model: GPTModel) -> None:
        """Measure how the weights have changed."""


NO_PROBE = Probe()


class StepProbe(Probe):
    """Measures one global step. It changes no number of the training."""

    def __init__(self, global_step: int, precision: Precision) -> None:
        self.global_step, self._precision = global_step, precision
        self._statistics: Statistics = {}
        self._moments: tuple[Moment, ...] = ()  # start and end of each part of the measuring

    def see(self, microbatch: Microbatch) -> None:
        self._microbatch = microbatch

    def before_update(self, model: GPTModel) -> None:
        _, token_ids, targets = self._microbatch
        del self._microbatch
        self._device = token_ids.device
        began = Moment(self._device)
        with autocast(self._precision, token_ids.device):
            self._statistics = forward_statistics(model, token_ids[:1], targets[:1])
        self._add_by_layer("grad_norm", [get_total_norm([weight.grad for weight in part])
                                         for part in parts_of(model)])
        self._before = [[weight.detach().clone() for weight in part] for part in parts_of(model)]
        self._moments = began, Moment(self._device)

    @torch.no_grad()
    def after_update(self, model: GPTModel) -> None:
        ratios, began = [], Moment(self._device)
        for before, after in zip(self._before, parts_of(model), strict=True):
            changes = [new - old for new, old in zip(after, before, strict=True)]
            ratios.append(get_total_norm(changes) / get_total_norm(before))
        del self._before
        self._add_by_layer("update_ratio", ratios)
        # Into pinned memory, while training goes on.
        self._statistics = {name: value.to("cpu", non_blocking=True)
                            for name, value in self._statistics.items()}
        self._moments += began, Moment(self._device)

    def _add_by_layer(self, name: str, values: list[Tensor]) -> None:
        """Add one () value of each part."""
        *layers, embedding, head = values
        self._statistics |= {f"layer_{name}": torch.stack(layers), f"embedding_{name}": embedding,
                             f"head_{name}": head}

    def seconds(self) -> float:
        """Return what measuring took on the device. It waits only for the step itself."""
        began, ended = self._moments[::2], self._moments[1::2]
        return sum(map(Moment.seconds_since, ended, began))

    def read(self) -> Numbers:
        """Return the statistics as numbers. It waits only for the step itself."""
        self._moments[-1].wait()
        return {name: _rounded(value.tolist()) for name, value in self._statistics.items()}


class Diagnostics:
    """Measures every `diagnostics_interval`-th step on rank 0, and no step on other ranks.

    Rank 0 has the averaged gradients and the weights of all ranks; its own data is enough for the
    rest, so that nothing is a collective.
    """

    def __init__(self, train: TrainConfig, process: Process) -> None:
        self._interval = train.diagnostics_interval if process.is_main else None
        self._precision = train.precision
        self._unread: list[StepProbe] = []

    def probe(self, global_step: int) -> Probe:
        """Return what measures this step, if one is due."""
        if self._interval is None or (global_step + 1) % self._interval:
            return NO_PROBE
        self._unread.append(StepProbe(global_step, self._precision))
        return self._unread[-1]

    def measured(self, up_to: int) -> Iterator[StepProbe]:
        """Yield what has measured steps since the last call, up to `up_to`."""
        while self._unread and self._unread[0].global_step <= up_to:
            yield self._unread.pop(0)


def parts_of(model: GPTModel) -> list[list[Tensor]]:
    """Return the parameters by layer, then those before the layers, then those after them."""
    embedding = [*model.token_embedding.parameters(), *model.position_embedding.parameters()]
    head = [*model.final_norm.parameters()]
    if not model.config.tie_weights:
        head += model.head.parameters()
    return [*([*block.parameters()] for block in model.blocks), embedding, head]


def _rounded(value: float | list[float]) -> float | list[float]:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}")
