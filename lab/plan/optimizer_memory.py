"""The memory of the optimizer: its state, and its temporary tensors while it takes a step."""

from __future__ import annotations

from lab.plan.setting import FLOAT32, Setting, parameters_by_group
from run_config import ModelConfig, TrainConfig


def state_bytes(setting: Setting) -> int:
    """Return the bytes of two moments of each parameter; Muon keeps one of each matrix."""
    sizes = parameters_by_group(setting.model)
    moments = 2 * sum(sizes.values())
    if setting.train.optimizer == "muon":
        moments -= sizes["matrix"]
    return FLOAT32 * moments


def step_bytes(setting: Setting) -> int:
    """Return the most bytes of temporary tensors at once: see `trainer/muon.py`."""
    found = [0]
    if setting.train.cautious_weight_decay:
        found.append(_cautious_decay_bytes(setting))
    if setting.train.optimizer == "muon":
        C, L = setting.model.emb_dim, setting.model.n_layers
        found += [_orthogonalising_bytes(setting, 4 * L, columns=C),
                  _orthogonalising_bytes(setting, 2 * L, columns=4 * C)]
    return max(found)


def _cautious_decay_bytes(setting: Setting) -> int:
    """Count the weights as they were before AdamW's step, and two products of the largest."""
    train, model = setting.train, setting.model
    sizes = {group: size for group, size in parameters_by_group(model).items()
             if size and _decays(train, group)}
    if train.optimizer == "muon":
        sizes.pop("matrix", None)
    largest = max((_largest_parameter(model, group) for group in sizes), default=0)
    return FLOAT32 * (sum(sizes.values()) + 2 * largest)


def _decays(train: TrainConfig, group: str) -> bool:
    own = getattr(train, f"{group}_weight_decay")
    by_default = group != "vector" or train.decay_norms_and_biases
    return bool(train.weight_decay * by_default if own is None else own)


def _largest_parameter(model: ModelConfig, group: str) -> int:
    C = model.emb_dim
    return {"matrix": 4 * C**2, "vector": 4 * C}.get(group, model.vocab_size * C)


def _orthogonalising_bytes(setting: Setting, num_matrices: int, *, columns: int) -> int:
    """Count what Muon needs for all matrices of one shape, C x columns.

    First a process holds its share of them: the input, x and the next x; gram and polynomial, both
    C x C. Then all updates, one of them in float32; before that, its own beside the gathered ones.
    The float32 momentum of the last matrix of its share stays all the time.
    """
    C, element = setting.model.emb_dim, 2 if setting.precision == "bf16" else FLOAT32
    share = -(-num_matrices // setting.num_processes)
    one = C * columns
    own = element * share * one
    applied = (13 if setting.train.cautious_weight_decay else 2 * FLOAT32) * one
    if setting.num_processes > 1:
        applied = max(applied, own)
    return FLOAT32 * one + max(3 * own + 2 * element * share * C**2,
                               setting.num_processes * own + applied)
