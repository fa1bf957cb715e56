"""The schedule of the learning rate: a pure function of the global step, so nothing of it is saved.

Needs no torch.
"""

import math
from collections.abc import Collection

from run_config import TrainConfig

COSINE_FINAL_FRACTION = 0.1  # of the original system
WSD_DECAY_PERCENT = 20.0
SCHEDULE_SETTINGS = (  # that `learning_rate_at` reads
    "learning_rate",
    "schedule",
    "schedule_learning_rate",
    "warmup_period_percent",
    "decay_period_percent",
    "final_learning_rate_fraction",
)
RAISED = 1.1  # ratio of two learning rates that is worth a warning


def learning_rate_at(config: TrainConfig, global_step: int, *, num_steps: int) -> float:
    """Return the learning rate of a global step; groups with a rate of their own keep their ratio.

    A linear warm-up over `warmup_period_percent` of the steps, then `learning_rate`, and over the
    last `decay_period_percent` of the steps a decay to `final_learning_rate_fraction` of it, which
    the last step reaches: along half a cosine, along a line, or along 1 - sqrt(progress) (`wsd`).
    The only step of a run has `learning_rate`.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts, for the cosine;
    Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", section 3, for 1 - sqrt.
    """
    peak, schedule = config.learning_rate, config.resolved_schedule
    warmup_steps = int(num_steps * config.warmup_period_percent / 100)
    if global_step < warmup_steps:
        return peak * (global_step + 1) / warmup_steps
    percent = config.decay_period_percent or (WSD_DECAY_PERCENT if schedule == "wsd" else 100.0)
    decay_start = max(warmup_steps, num_steps - math.ceil(num_steps * percent / 100))
    if schedule == "constant" or global_step < decay_start:
        return peak
    rest = num_steps - 1 - decay_start  # steps of the decay after its first one
    progress = (global_step - decay_start) / rest if rest else float(num_steps > 1)
    fraction = config.final_learning_rate_fraction
    if fraction is None:
        fraction = COSINE_FINAL_FRACTION if schedule == "cosine" else 0.0
    floor = peak * fraction
    if schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    if schedule == "linear":
        return floor + (peak - floor) * (1 - progress)
    if schedule == "wsd":
        return floor + (peak - floor) * (1 - progress**0.5)
    raise ValueError(f"no schedule {schedule}")


def schedule_warning(
    config: TrainConfig,
    step: int,
    before: float | None,
    *,
    num_steps: int,
    changed: Collection[str] | None,
) -> str:
    """Return a warning if a step had a lower rate, `before`; it names which setting has changed."""
    rate, next_rate = (
        learning_rate_at(config, each, num_steps=num_steps) for each in (step, step + 1)
    )
    if before is None or step + 1 == num_steps or rate <= RAISED * before:
        return ""
    rises = f"the learning rate rises from {before:.2g} to {next_rate:.2g}"
    if changed is None:  # a checkpoint of older code does not tell
        return rises
    if causes := [key for key in SCHEDULE_SETTINGS if key in changed]:
        return f"{rises}, because {' and '.join(causes)} changed"
    return (
        f"{rises}, because the run has another length: the schedule"
        f" ({config.resolved_schedule}) now has {num_steps:,} steps; with the schedule wsd a"
        " run can be continued from a checkpoint before its decay"
    )
