"""The optimizer: its parameter groups, AdamW and Muon, clipped gradients.

Shapes: a hidden matrix is (out, in). `qkv` holds three of them, one below the other.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from ops.orthogonalise import orthogonalise
from processes.distributed import Process
from run_config import ModelConfig, TrainConfig
from settings.optimizer import GROUPS, Group


def build_optimizer(model: nn.Module, config: TrainConfig, process: Process) -> AdamW:
    """Build the optimizer with a parameter group for the matrices, embeddings, head and vectors.

    Source of AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """
    by_group: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        by_group.setdefault(group_of(name, parameter), []).append(parameter)
    groups = []
    for group, parameters in by_group.items():
        peak = peak_learning_rate(group, config)
        groups.append(
            {
                "params": parameters,
                "lr": peak,
                # The schedule gives one rate for a step; each group's keeps this ratio to it.
                "peak_ratio": peak / config.learning_rate,
                "betas": (config.beta1, config.beta2),
                "eps": config.epsilon,
                "weight_decay": config.weight_decay if is_decayed(group, config) else 0.0,
                "is_orthogonalised": group == "matrix" and config.optimizer == "muon",
                "momentum": config.momentum,
                "state": config.optimizer_state(group),  # names, for checkpoints
            }
        )
    if config.optimizer == "muon":
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        return Muon(groups, dtype=dtype, rank=process.rank, world_size=process.world_size)
    return AdamW(groups, fused=True)


def group_of(name: str, parameter: Tensor) -> Group:
    """Return the group of a parameter of `GPTModel`; a tied head is the token embedding."""
    if parameter.dim() < 2:
        return "vector"
    if "embedding" in name:
        return "embedding"
    return "head" if name.startswith("head.") else "matrix"


def is_decayed(group: Group, config: TrainConfig) -> bool:
    """Return whether a group has weight decay: with Muon the matrices alone.

    Source: `benchmarks/recipes.md`, "Weight decay": decay of embeddings and head too was no gain.
    """
    if config.optimizer == "muon":
        return group == "matrix"
    return group != "vector" or config.decay_norms_and_biases


def decay_line(model: nn.Module, config: TrainConfig) -> str:
    """Say which groups have weight decay, be it 0, and which have none, with their sizes."""
    grouped = [(group_of(*found), found[1].numel()) for found in model.named_parameters()]

    def size_of(groups: list[Group]) -> str:
        sizes = [size for group, size in grouped if group in groups]
        names = f" of {', '.join(groups)}" if groups else ""
        return f"{len(sizes)} tensors{names} ({sum(sizes):,} parameters)"

    present = [group for group in GROUPS if group in dict(grouped)]
    decayed = [group for group in present if is_decayed(group, config)]
    others = [group for group in present if group not in decayed]
    return f"weight decay {config.weight_decay:g} on {size_of(decayed)}, none on {size_of(others)}"


def peak_learning_rate(group: Group, config: TrainConfig) -> float:
    own = getattr(config, f"{group}_learning_rate")
    return config.learning_rate if own is None else own


def rates_line(model: ModelConfig, config: TrainConfig) -> str:
    return ", ".join(
        f"{group} {peak_learning_rate(group, config):g}"
        for group in GROUPS
        if group != "head" or not model.tie_weights
    )


def set_rates(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the rates of all parameter groups; those with a rate of their own keep their ratio."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["peak_ratio"]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the gradient's norm over all parameters, (); clip it to `max_norm` if that is set."""
    norm = get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class Muon(AdamW):
    """Muon for the group with `is_orthogonalised`, AdamW for the others. `step`: every rank.

    All ranks hold the momentum of all matrices. Each one orthogonalises its share of them, a batch
    for each shape and in `dtype`, and the results are gathered, so that this work is done once.
    `found_inf`, () float32, is set before each step; if it is 1, the step changes nothing.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et
    al. 2025, "Muon is Scalable for LLM Training", section 2.2, for its weight decay.
    """

    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], *, dtype: torch.dtype, rank: int, world_size: int
    ) -> None:
        super().__init__(groups, fused=True)
        self._dtype, self._rank, self._world_size = dtype, rank, world_size
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in self._group()["params"]:
            by_shape.setdefault(_matrices([parameter])[0].shape, []).append(parameter)
        self._batches = []  # parameters of one shape, and factors of their updates, (n, 1, 1)
        for parameters in by_shape.values():
            # A matrix with more rows than columns may change more.
            scales = [
                max(1.0, _height(each) / each.shape[1]) ** 0.5
                for each in parameters
                for _ in _matrices([each])
            ]
            self._batches.append(
                (parameters, torch.tensor(scales, device=parameters[0].device).view(-1, 1, 1))
            )

    def _group(self) -> dict[str, Any]:
        return next(group for group in self.param_groups if group["is_orthogonalised"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self._group()
        self._update_momentum(group)
        skips = self.found_inf.bool()
        # On the device: an `if` would wait for it. With a rate of 0 nothing changes below.
        rate = torch.where(skips, 0.0, group["lr"])  # ()
        if group["weight_decay"]:
            torch._foreach_mul_(group["params"], 1 - rate * group["weight_decay"])
        # One shape's updates are gathered while those of the next are orthogonalised.
        started = [
            (parameters, scales, *self._start_updates(parameters, skips, group["momentum"]))
            for parameters, scales in self._batches
        ]
        for parameters, scales, updates, gathering in started:
            if gathering is not None:
                gathering.wait()
            # The updates may end with padding: `scales` has one entry for each matrix.
            torch._foreach_sub_(  # the product has the weights' dtype: one pass
                _matrices(parameters), list(updates[: len(scales)] * (scales * rate))
            )
        # AdamW's step takes all groups in `param_groups` and has no argument for some of them. The
        # matrices are done, so their group is left out during the call.
        groups = self.param_groups
        self.param_groups = [each for each in groups if each is not group]
        super().step(closure)
        self.param_groups = groups

    def _update_momentum(self, group: dict[str, Any]) -> None:
        """Add the gradients to their moving averages in one pass; a skipped step adds nothing.

        The fused kernel of SGD computes this, with the averages in the place of weights:
        weight + lr (gradient - weight_decay weight), where `maximize` gives the signs. With a
        weight decay of 1 it is average + (1 - momentum) (gradient - average).

        The function is private. No public one leaves its result unchanged where a tensor on the GPU
        says so (`found_inf`), and reading that tensor here would wait for the GPU.
        """
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        torch._fused_sgd_(
            [self.state[parameter]["momentum"] for parameter in group["params"]],
            [parameter.grad for parameter in group["params"]],
            [],
            lr=1 - group["momentum"],
            weight_decay=1.0,
            maximize=True,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            is_first_step=False,
            found_inf=self.found_inf,
        )

    def _start_updates(
        self, parameters: list[nn.Parameter], skips: Tensor, momentum: float
    ) -> tuple[Tensor, dist.Work | None]:
        """Start to compute the updates of the n matrices of one shape, (r, c).

        Returns the updates, (n or more, r, c), and the work to wait for before they are read, if
        other ranks compute a part of them.
        """
        gradients = _matrices([each.grad for each in parameters])  # type: ignore[misc]
        averages = _matrices([self.state[each]["momentum"] for each in parameters])
        share = -(-len(gradients) // self._world_size)  # matrices of each rank
        mine = slice(self._rank * share, (self._rank + 1) * share)
        num_mine = len(gradients[mine])  # the last ranks may have fewer, or none
        # Every rank gathers `share` matrices, so those that are missing are zeros.
        batch = torch.zeros(share, *gradients[0].shape, dtype=self._dtype, device=skips.device)
        if num_mine:
            gradient = torch.stack(gradients[mine])  # (num_mine, r, c)
            average = torch.stack(averages[mine])
            # Nesterov: the moving averages, one step further. In a skipped step the gradient is not
            # finite, and Newton-Schulz iterations would spread that: the average stands in for it.
            gradient = torch.where(skips, average, gradient)
            batch[:num_mine] = gradient.lerp_(average, momentum)
        batch = orthogonalise(batch)
        if self._world_size == 1:
            return batch, None
        gathered = batch.new_empty(self._world_size * share, *batch.shape[1:])
        return gathered, dist.all_gather_into_tensor(gathered, batch, async_op=True)


def _height(parameter: Tensor) -> int:
    """Return the rows of each matrix in a parameter: `qkv`, (3 C, C), holds three."""
    num_rows, num_columns = parameter.shape
    return num_columns if num_rows == 3 * num_columns else num_rows


def _matrices(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the matrices in parameters, or in tensors like them, as views (r, c), r at most c."""
    # `orthogonalise` takes r <= c, which makes its products smallest.
    return [
        matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        for tensor in tensors
        for matrix in tensor.split(_height(tensor))
    ]
