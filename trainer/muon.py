"""Muon for the hidden matrices, AdamW for all other parameters, in one optimizer.

Shapes: a hidden matrix is (out, in). `qkv` holds three of them, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from ops.orthogonalise import orthogonalise


@dataclass(frozen=True)
class _Part:
    """One matrix that is orthogonalised by itself: some rows of a parameter."""

    parameter: Tensor
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns with the smaller number first, so that more matrices are alike."""
        num_rows = self.rows.stop - self.rows.start
        return min(num_rows, self.parameter.shape[1]), max(num_rows, self.parameter.shape[1])

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor of the parameter's shape, as a view of `shape`."""
        part = tensor[self.rows]
        return part.mT if part.shape[0] > part.shape[1] else part

    @property
    def scale(self) -> float:
        """Factor of the update: a matrix with more rows than columns may change more."""
        num_rows = self.rows.stop - self.rows.start
        return max(1.0, num_rows / self.parameter.shape[1]) ** 0.5


class AdamWWithCautiousDecay(AdamW):
    """AdamW whose decay of a group can be cautious: it never works against the update.

    A group's `cautious_decay` replaces its `weight_decay`. It shrinks a weight only in steps in
    which the update shrinks the weight as well; a weight without an update stays. The update's sign
    is that of the first moment, also where the update is too small to change the rounded weight.

    Attributes:
        found_inf: () float32, set before each step; if it is 1, the step changes nothing.

    Source: Chen et al. 2025, "Cautious Weight Decay", algorithm 1.
    """

    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        decayed = [group for group in self.param_groups if group["cautious_decay"]]
        before = [[parameter.clone() for parameter in group["params"]] for group in decayed]
        super().step(closure)
        for group, old in zip(decayed, before, strict=True):
            moments = [self.state[parameter]["exp_avg"] for parameter in group["params"]]
            shrinks = torch._foreach_mul(moments, old)
            torch._foreach_sign_(shrinks)
            torch._foreach_clamp_min_(shrinks, 0.0)  # 1 where the update shrinks, else 0
            torch._foreach_mul_(shrinks, 1 - self.found_inf)
            torch._foreach_addcmul_(group["params"], old, shrinks,
                                    value=-group["lr"] * group["cautious_decay"])


class Muon(AdamWWithCautiousDecay):
    """Muon for the groups with `is_orthogonalised`, AdamW for the others. `step`: every rank.

    All ranks hold the momentum of all matrices. Each one orthogonalises its share of them, a batch
    for each shape, and the results are gathered, so that this work is done once.

    Args:
        groups: parameter groups. Those with `is_orthogonalised` have a `momentum`.
        dtype: of the orthogonalisation.
        rank, world_size: of this process.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2, for its weight decay.
    """

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype, rank: int,
                 world_size: int) -> None:
        super().__init__(groups, fused=True)
        self._dtype, self._rank, self._world_size = dtype, rank, world_size
        parts = sorted((part for group in self._matrix_groups() for parameter in group["params"]
                        for part in _parts(parameter)), key=lambda part: part.shape)
        self._parts_by_shape = [list(same) for _, same in groupby(parts, lambda part: part.shape)]
        self._scales = {same[0].shape: torch.tensor(  # (n, 1, 1)
            [[[part.scale]] for part in same], device=same[0].parameter.device)
            for same in self._parts_by_shape}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self._matrix_groups():
            self._step_matrices(group)
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["is_orthogonalised"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _matrix_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["is_orthogonalised"]]

    def _step_matrices(self, group: dict[str, Any]) -> None:
        skips = self.found_inf.bool()
        gradients = self._update_momentum(group, skips)
        rate = torch.where(skips, 0.0, group["lr"])  # ()
        if group["weight_decay"]:
            torch._foreach_mul_(group["params"], 1 - rate * group["weight_decay"])
        for parts in self._parts_by_shape:
            updates = self._updates(parts, gradients, group["momentum"])
            weights = [part.of(part.parameter) for part in parts]
            _apply(weights, updates.float().mul_(self._scales[parts[0].shape]), rate,
                   cautious_decay=group["cautious_decay"])
            del updates  # before the next shape's are made

    def _update_momentum(self, group: dict[str, Any], skips: Tensor) -> dict[Tensor, Tensor]:
        """Add the gradients to their moving averages; return them, finite in a skipped step too."""
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in group["params"]]
        gradients = [torch.where(skips, momentum, parameter.grad)  # a skipped step adds nothing
                     for parameter, momentum in zip(group["params"], momenta, strict=True)]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return dict(zip(group["params"], gradients, strict=True))

    def _updates(self, parts: list[_Part], gradients: dict[Tensor, Tensor],
                 momentum: float) -> Tensor:
        """Return the orthogonalised updates of matrices of one shape, (n, r, c)."""
        share = -(-len(parts) // self._world_size)
        mine = parts[self._rank * share : (self._rank + 1) * share]
        device = parts[0].parameter.device
        updates = torch.zeros(share, *parts[0].shape, dtype=self._dtype, device=device)
        if mine:
            updates[: len(mine)] = self._nesterov(mine, gradients, momentum)
        updates = orthogonalise(updates)
        if self._world_size > 1:
            gathered = updates.new_empty(self._world_size * share, *parts[0].shape)
            dist.all_gather_into_tensor(gathered, updates)
            updates = gathered
        return updates[: len(parts)]

    def _nesterov(self, parts: list[_Part], gradients: dict[Tensor, Tensor],
                  momentum: float) -> Tensor:
        """Return the moving averages, a step further, of matrices of one shape, (n, r, c)."""
        gradient = torch.stack([part.of(gradients[part.parameter]) for part in parts])
        average = torch.stack([part.of(self.state[part.parameter]["momentum"]) for part in parts])
        return gradient.lerp_(average, momentum)


def _apply(weights: list[Tensor], updates: Tensor, rate: Tensor, *, cautious_decay: float) -> None:
    """Subtract updates (n, r, c), which this overwrites, from as many weights (r, c)."""
    if cautious_decay:
        stacked = torch.stack(weights)
        shrinks = updates * stacked > 0
        updates.add_(stacked.mul_(shrinks), alpha=cautious_decay)
    torch._foreach_sub_(weights, list(updates.mul_(rate)))


def _parts(parameter: Tensor) -> list[_Part]:
    """Split a parameter into the matrices that it holds: three for `qkv`, (3 C, C)."""
    num_rows, num_columns = parameter.shape
    num_parts = 3 if num_rows == 3 * num_columns else 1
    height = num_rows // num_parts
    return [_Part(parameter, slice(i * height, (i + 1) * height)) for i in range(num_parts)]
