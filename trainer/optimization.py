"""Parameter groups, the optimizer, and clipped gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from processes.launch import Process
from run_config import GROUPS, Group, ModelConfig, TrainConfig
from trainer.muon import Muon
from trainer.schedule import schedule_of


def build_optimizer(model: nn.Module, train: TrainConfig, process: Process) -> AdamW:
    """Build the optimizer with a parameter group for the matrices, embeddings, head and vectors.

    Args:
        train: after `resolve_for_device`.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, for
    AdamW.
    """
    by_group: dict[Group, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        by_group.setdefault(group_of(name, parameter), []).append(parameter)
    groups = [_options(group, train) | {"params": parameters}
              for group, parameters in by_group.items()]
    if train.optimizer == "muon":
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        return Muon(groups, dtype=dtype, rank=process.rank, world_size=process.world_size)
    return AdamW(groups, fused=True)


def group_of(name: str, parameter: Tensor) -> Group:
    """Return the group of a parameter of `GPTModel`; a tied head is the token embedding."""
    if parameter.dim() < 2:
        return "vector"
    if "embedding" in name:
        return "embedding"
    return "head" if name.startswith("head.") else "matrix"


def peak_learning_rate(group: Group, train: TrainConfig) -> float:
    """Return the highest learning rate of a group."""
    own = getattr(train, f"{group}_learning_rate")
    return train.learning_rate if own is None else own


def rates_line(model: ModelConfig, train: TrainConfig) -> str:
    """Name the peak rate of each group, and which are the defaults."""
    rates = []
    for group in GROUPS:
        if group == "head" and model.tie_weights:
            continue
        key = f"{group}_learning_rate"
        decides = "learning_rate" if getattr(train, key) is None else key
        default = "" if decides in train.model_fields_set else " (default)"
        rates.append(f"{group} {peak_learning_rate(group, train):g}{default}")
    return ", ".join(rates)


def unused_options(model: ModelConfig, train: TrainConfig) -> list[str]:
    """Return a warning for options that are set but have no effect beside another one."""
    unused = {
        'optimizer "adamw"': {"momentum", "momentum_warmup_percent"},
        'schedule "constant"': {"decay_period_percent", "final_learning_rate_fraction"},
        "tie_weights": {"head_learning_rate"},
    }
    if train.weight_decay == 0 and train.decay_norms_and_biases:
        unused["weight_decay 0"] = {"decay_norms_and_biases"}
    reasons = [f'optimizer "{train.optimizer}"', f'schedule "{schedule_of(train)}"',
               "weight_decay 0",
               *(["tie_weights"] if model.tie_weights else [])]
    warnings = []
    if train.init_from is not None and "init" in model.model_fields_set:
        warnings.append("init: no effect with init_from")
    for reason in reasons:
        found = sorted(unused.get(reason, set()) & train.model_fields_set)
        if found:
            warnings.append(f"{', '.join(found)}: no effect with {reason}")
    return warnings


def _options(group: Group, train: TrainConfig) -> dict[str, Any]:
    decay = train.weight_decay if group != "vector" or train.decay_norms_and_biases else 0.0
    if group == "matrix" and train.matrix_weight_decay is not None:
        decay = train.matrix_weight_decay
    peak = peak_learning_rate(group, train)
    return {
        "lr": peak, "peak_ratio": peak / train.learning_rate,
        "betas": (train.beta1, train.beta2), "eps": train.epsilon,
        "weight_decay": decay,
        "is_orthogonalised": group == "matrix" and train.optimizer == "muon",
        "momentum": train.momentum,
    }


def set_rates(optimizer: AdamW, *, learning_rate: float, momentum: float) -> None:
    """Set the rates of all parameter groups; those with a rate of their own keep their ratio."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["peak_ratio"]
        group["momentum"] = momentum


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the gradient's norm over all parameters, (); clip it to `max_norm` if that is set."""
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
