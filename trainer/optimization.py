"""Parameter groups, the optimizer, and the learning rate at every global step."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from run_config import TrainConfig

FINAL_LEARNING_RATE_FRACTION = 0.1


def build_optimizer(model: nn.Module, train: TrainConfig) -> AdamW:
    """Build AdamW with weight decay on matrices and embeddings only.

    With `decay_norms_and_biases`, norms and biases decay too, as in the original.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    decayed, kept = [], []
    for parameter in model.parameters():
        decays = parameter.dim() >= 2 or train.decay_norms_and_biases
        (decayed if decays else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": train.weight_decay}]
    if kept:
        groups.append({"params": kept, "weight_decay": 0.0})
    return AdamW(groups, lr=train.learning_rate, fused=True)


def learning_rate_at(train: TrainConfig, global_step: int, *, num_steps: int) -> float:
    """Return the learning rate of a global step: a pure function, so there is no state to save.

    With `schedule_learning_rate`: a linear warm-up over `warmup_period_percent` of the steps, then
    half a cosine from `learning_rate` down to a tenth of it at the last step.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.
    """
    peak = train.learning_rate
    if not train.schedule_learning_rate:
        return peak
    warmup_steps = int(num_steps * train.warmup_period_percent / 100)
    if global_step < warmup_steps:
        return peak * (global_step + 1) / warmup_steps
    progress = (global_step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    floor = peak * FINAL_LEARNING_RATE_FRACTION
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Return the gradient's norm over all parameters, (); clip it to `max_norm` if that is set."""
    parameters = list(model.parameters())
    norm = get_total_norm([parameter.grad for parameter in parameters])
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def skip_unless_finite(optimizer: AdamW, grad_norm: Tensor) -> None:
    """Make the optimizer's next step do nothing if the gradient is not finite.

    Without waiting for the device: where `found_inf` is 1, the fused kernel leaves weights, moments
    and its step count unchanged. `GradScaler` uses the same attribute.
    """
    optimizer.found_inf = (~grad_norm.isfinite()).float()
