"""Learning rate and momentum at every global step: pure functions, so there is no state to save."""

from __future__ import annotations

import math

from run_config import Schedule, TrainConfig

COSINE_FINAL_FRACTION = 0.1  # of the original system
WSD_DECAY_PERCENT = 20.0
FIRST_MOMENTUM = 0.85  # where the warm-up of the momentum begins


def learning_rate_at(train: TrainConfig, global_step: int, *, num_steps: int) -> float:
    """Return the learning rate of a global step; groups with a rate of their own keep their ratio.

    A linear warm-up over `warmup_period_percent` of the steps, then `learning_rate`, and over the
    last `decay_period_percent` of the steps a decay to `final_learning_rate_fraction` of it, which
    the last step reaches: along half a cosine, along a line, or along 1 - sqrt(progress) (`wsd`).
    The only step of a run has `learning_rate`.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts, for the cosine;
    Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", section 3, for 1 - sqrt.
    """
    peak, schedule = train.learning_rate, schedule_of(train)
    warmup_steps = int(num_steps * train.warmup_period_percent / 100)
    if global_step < warmup_steps:
        return peak * (global_step + 1) / warmup_steps
    percent = train.decay_period_percent or (WSD_DECAY_PERCENT if schedule == "wsd" else 100.0)
    decay_start = max(warmup_steps, num_steps - math.ceil(num_steps * percent / 100))
    if schedule == "constant" or global_step < decay_start:
        return peak
    rest = num_steps - 1 - decay_start  # steps of the decay after its first one
    progress = (global_step - decay_start) / rest if rest else float(num_steps > 1)
    floor = peak * final_fraction(train)
    if schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * (1 - (progress if schedule == "linear" else progress**0.5))


def schedule_of(train: TrainConfig) -> Schedule:
    """Return the schedule; `schedule_learning_rate` is the original's name of the cosine."""
    return train.schedule or ("cosine" if train.schedule_learning_rate else "constant")


def final_fraction(train: TrainConfig) -> float:
    """Return the learning rate of the last step, as a fraction of the peak."""
    if train.final_learning_rate_fraction is not None:
        return train.final_learning_rate_fraction
    return COSINE_FINAL_FRACTION if schedule_of(train) == "cosine" else 0.0


def momentum_at(train: TrainConfig, global_step: int, *, num_steps: int) -> float:
    """Return Muon's momentum: a line from 0.85 to `momentum` over `momentum_warmup_percent`."""
    warmup_steps = int(num_steps * train.momentum_warmup_percent / 100)
    if global_step >= warmup_steps:
        return train.momentum
    first = min(FIRST_MOMENTUM, train.momentum)
    return first + (train.momentum - first) * global_step / warmup_steps
