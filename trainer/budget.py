"""What a run may spend, and what its parts take."""

from __future__ import annotations

import math
from collections.abc import Iterator
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

SAFETY_MARGIN = 0.25  # steps may take 25% longer than measured


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

    def seconds(self, num_steps: int, *, num_validations: int = 0, num_saves: int = 0) -> float:
        """Return the seconds of some steps with their validations and saves."""
        return (num_steps * self.step + num_validations * self.validation + num_saves * self.save)


class Budget:
    """The limits of a run over all its launches: `max_hours`, `max_cost_usd`, or both."""

    def __init__(self, train: TrainConfig, clock: PhaseClock) -> None:
        self._train, self._clock = train, clock

    @property
    def is_limited(self) -> bool:
        return bool(self._train.max_hours or self._train.max_cost_usd)

    def seconds_left(self) -> float:
        """Return the seconds until the first limit, below 0 after it; inf without any."""
        return min((left for left, _ in self._limits()), default=math.inf)

    def nearest_limit(self) -> str:
        """Name the limit that is reached first, its value and how much of it is spent."""
        return min(self._limits())[1]

    def _limits(self) -> Iterator[tuple[float, str]]:
        max_hours, max_cost_usd = self._train.max_hours, self._train.max_cost_usd
        if max_hours is not None:
            hours = sum(self._clock.read().values()) / 3600
            yield ((max_hours - hours) * 3600,
                   f"max_hours is {max_hours:g}, and the run has taken {hours:.3g}")
        if max_cost_usd is not None:
            spent, price = sum(self._clock.usd().values()), self._clock.usd_per_hour
            yield ((max_cost_usd - spent) * 3600 / price,
                   f"max_cost_usd is {max_cost_usd:g}, and the run has spent {spent:.3g}")

    def affords(self, seconds: float) -> bool:
        """Return whether this fits into what is left, with a safety margin."""
        return seconds * (1 + SAFETY_MARGIN) <= self.seconds_left()
