"""Muon for the hidden matrices, AdamW for all other parameters, in one optimizer.

Shapes: a hidden matrix is (out, in). `qkv` holds three of them, one below the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from basics.device_time import Moment
from ops.orthogonalise import orthogonalise

MEASUREMENTS = 5  # of each kind; the fastest counts


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


class Muon(AdamW):
    """Muon for the groups with `is_orthogonalised`, AdamW for the others. `step`: every rank.

    All ranks hold the momentum of all matrices. Each one orthogonalises its share of them, a batch
    for each shape, and the results are gathered, so that this work is done once. Where gathering
    takes longer than that work (`choose_sharing`), each rank does all of it, in the same batches:
    the numbers are the same.

    Args:
        groups: parameter groups. Those with `is_orthogonalised` have a `momentum`.
        dtype: of the orthogonalisation.
        rank, world_size: of this process.

    Attributes:
        found_inf: () float32, set before each step; if it is 1, the step changes nothing.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2, for its weight decay.
    """

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype, rank: int,
                 world_size: int) -> None:
        super().__init__(groups, fused=True)
        self._dtype, self._rank, self._world_size = dtype, rank, world_size
        self._shares = world_size > 1
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
        self._update_momentum(group)
        skips = self.found_inf.bool()
        rate = torch.where(skips, 0.0, group["lr"])  # ()
        if group["weight_decay"]:
            torch._foreach_mul_(group["params"], 1 - rate * group["weight_decay"])
        # One shape's updates are gathered while those of the next are orthogonalised.
        started = [(parts, *self._start_updates(parts, skips, group["momentum"]))
                   for parts in self._parts_by_shape]
        for parts, updates, gathering in started:
            if gathering is not None:
                gathering.wait()
            scales = self._scales[parts[0].shape] * rate  # (n, 1, 1)
            torch._foreach_sub_(  # the product has the weights' type: one pass
                [part.of(part.parameter) for part in parts], list(updates[: len(parts)] * scales))

    def _update_momentum(self, group: dict[str, Any]) -> None:
        """Add the gradients to their moving averages, in one pass and not in a skipped step.

        SGD's fused kernel does both: average + (1 - momentum) (gradient - average) is its step with
        the average as the weight, a weight decay of 1 and the gradient's sign turned.
        """
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        torch._fused_sgd_(
            [self.state[parameter]["momentum"] for parameter in group["params"]],
            [parameter.grad for parameter in group["params"]], [], lr=1 - group["momentum"],
            weight_decay=1.0, maximize=True, momentum=0.0, dampening=0.0, nesterov=False,
            is_first_step=False, found_inf=self.found_inf)

    def _start_updates(self, parts: list[_Part], skips: Tensor, momentum: float
                       ) -> tuple[Tensor, dist.Work | None]:
        """Return the updates of matrices of one shape, (n or more, r, c), and what brings them."""
        size = self._share_of(parts)
        starts = [self._rank * size] if self._shares else range(0, len(parts), size)
        batches = []
        for start in starts:
            mine = parts[start : start + size]
            batch = torch.zeros(size, *parts[0].shape, dtype=self._dtype, device=skips.device)
            if mine:
                batch[: len(mine)] = self._nesterov(mine, skips, momentum)
            batches.append(orthogonalise(batch))
        if not self._shares:
            return torch.cat(batches) if len(batches) > 1 else batches[0], None
        gathered = batches[0].new_empty(self._world_size * size, *parts[0].shape)
        return gathered, dist.all_gather_into_tensor(gathered, batches[0], async_op=True)

    def _share_of(self, parts: list[_Part]) -> int:
        """Return how many matrices of one shape a rank orthogonalises at once."""
        return -(-len(parts) // self._world_size)

    def choose_sharing(self) -> str:
        """Share the orthogonalising only if that is faster here; return what was measured.

        Every rank, with the default process group. Measured with the matrices of one shape.
        """
        parts = max(self._parts_by_shape, key=lambda parts: len(parts) * math.prod(parts[0].shape))
        size, device = self._share_of(parts), parts[0].parameter.device
        batch = torch.ones(size, *parts[0].shape, dtype=self._dtype, device=device)
        gathered = batch.new_empty(self._world_size * size, *parts[0].shape)
        seconds = []
        for work in (lambda: orthogonalise(batch),
                     lambda: dist.all_gather_into_tensor(gathered, batch)):
            moments = [Moment(device)]
            for _ in range(MEASUREMENTS):
                work()
                moments.append(Moment(device))
            seconds.append(min(end.seconds_since(start) for start, end in pairwise(moments)))
        slowest = torch.tensor(seconds, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must choose the same
        alone, gathering = slowest.tolist()
        self._shares = gathering < (self._world_size - 1) * alone
        return (f"muon: each process orthogonalises {'its share of' if self._shares else 'all'}"
                f" matrices ({size} take {alone * 1e3:.3g} ms, gathering {gathering * 1e3:.3g} ms)")

    def _nesterov(self, parts: list[_Part], skips: Tensor, momentum: float) -> Tensor:
        """Return the moving averages, a step further, of matrices of one shape, (n, r, c)."""
        gradient = torch.stack([part.of(part.parameter.grad) for part in parts])
        average = torch.stack([part.of(self.state[part.parameter]["momentum"]) for part in parts])
        return torch.where(skips, average, gradient).lerp_(average, momentum)  # always finite


def _parts(parameter: Tensor) -> list[_Part]:
    """Split a parameter into the matrices that it holds: three for `qkv`, (3 C, C)."""
    num_rows, num_columns = parameter.shape
    num_parts = 3 if num_rows == 3 * num_columns else 1
    height = num_rows // num_parts
    return [_Part(parameter, slice(i * height, (i + 1) * height)) for i in range(num_parts)]
