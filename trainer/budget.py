"""What a run may spend, and what its parts take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reporting.clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    DIAGNOSTICS,
    TRAINING,
    VALIDATION,
    WAITING,
    PhaseClock,
)
from reporting.speed import SLOW_DISK_BYTES_PER_SECOND
from run_config import TrainConfig
from tokens.batch_plan import BatchPlan


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of a run take on this machine."""

    step: float
    validation: float
    save: float  # the stall of training for a checkpoint

    @classmethod
    def measured(cls, clock: PhaseClock, train: TrainConfig, *, num_steps: int, plan: BatchPlan,
                 checkpoint_bytes: int) -> Pace:
        """Measure the pace of this launch, of which `num_steps` came after its first step.

        Parts that have not happened yet are estimated: a validation as forward passes, a third of
        a step's work each, on one process; a checkpoint as written to a slow disk.
        """
        spent = clock.read_this_launch()
        first = spent[COMPILE]  # the only measurement as long as no other step is done
        steps = spent[TRAINING] + spent[DIAGNOSTICS] + spent[WAITING]
        step = steps / num_steps if num_steps else first
        forward = step / plan.gradient_accumulation_steps / 3
        num_batches = -(-train.num_validation_sequences // plan.microbatch_size)
        return cls(
            step=step,
            validation=clock.longest[VALIDATION] or forward * num_batches,
            save=clock.longest[CHECKPOINT] + clock.longest[CHART]
            or checkpoint_bytes / SLOW_DISK_BYTES_PER_SECOND,
        )


def nearest_limit(train: TrainConfig, clock: PhaseClock) -> tuple[float, str]:
    """Return the seconds until `max_hours` or `max_cost_usd` is reached, and how much is spent.

    They are of all launches of a run. Below 0 after the limit; inf without any.
    """
    limits = [(math.inf, "")]
    if train.max_hours is not None:
        hours = sum(clock.read().values()) / 3600
        limits.append(((train.max_hours - hours) * 3600,
                       f"max_hours is {train.max_hours:g}, and the run has taken {hours:.3g}"))
    if train.max_cost_usd is not None:
        spent = sum(clock.usd().values())
        limits.append(((train.max_cost_usd - spent) * 3600 / clock.usd_per_hour,  # type: ignore[operator]
                       f"max_cost_usd is {train.max_cost_usd:g}, and the run has spent"
                       f" {spent:.3g}"))
    return min(limits)
