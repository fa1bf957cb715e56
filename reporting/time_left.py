"""What is left of a run: its steps at the pace of the last reports, and the validations to come."""

import math
from collections import deque
from typing import NamedTuple, Self

from reporting.clock import COMPILE, DOWNLOAD, LOST, STARTUP, VALIDATION, PhaseClock
from reporting.speed import checkpoint_bytes
from run_config import ModelConfig, Run, TrainConfig
from tokens.batch_plan import BatchPlan

PACE_REPORTS = 50  # the pace is that of so many reports
ONE_TIME_PHASES = (STARTUP, DOWNLOAD, COMPILE, LOST)  # do not come again


class Growth(NamedTuple):
    """When the model of a launch gets the layers that it lacks, and what a step costs then."""

    step: int = 0  # the first one with all layers; 0: it has them
    factor: float = 1.0  # FLOPs of a step with all layers / FLOPs of a step now
    checkpoint_factor: float = 1.0  # the same, of the bytes of a checkpoint

    @classmethod
    def ahead(cls, run: Run, model: ModelConfig, *, num_steps: int, first_step: int) -> Self:
        """Return the growth of a launch that begins at `first_step` with the layers of `model`."""
        if model.n_layers >= run.model.n_layers:
            return cls()
        all_bytes, bytes_now = (checkpoint_bytes(each, run.config) for each in (run.model, model))
        return cls(
            max(first_step, run.config.growth_step(num_steps)),
            run.model.flops_per_token / model.flops_per_token,
            all_bytes / bytes_now,
        )

    def as_steps_now(self, first: int, stop: int) -> float:
        """Return as how many steps of now the steps from `first` on, before `stop`, take."""
        num_late = max(0, stop - max(first, self.step))
        return stop - first - num_late + num_late * self.factor


NO_GROWTH = Growth()


def estimated_validation_seconds(
    step_seconds: float, config: TrainConfig, plan: BatchPlan
) -> float:
    """Estimate one validation, of all sets, from the time of a global step: as forward passes.

    A backward pass takes about twice as long as a forward pass, so that is a third of a
    microbatch's share of the step.
    """
    num_batches = math.ceil(config.num_validation_sequences / plan.microbatch_size)
    if config.validate_on == "all":
        num_batches = math.ceil(num_batches / plan.world_size)
    forward = step_seconds / plan.gradient_accumulation_steps / 3
    return forward * num_batches * config.num_validation_sets


class TimeLeft:
    """Estimates what the rest of a run takes, from what this launch has measured. Rank 0.

    A validation takes as long as those of this launch did, and until the first one is measured, as
    long as its forward passes. Everything else that comes again, such as checkpoints, is part of
    the pace of the steps. Of a growth ahead of the run, steps and validations with all layers take
    longer by the ratio of the FLOPs, and compiling takes as long as in this launch so far.
    """

    def __init__(self, config: TrainConfig, plan: BatchPlan, clock: PhaseClock) -> None:
        self._config, self._plan, self._clock = config, plan, clock
        # Global steps, and what all launches had spent after each on what comes again with steps.
        self._reports: deque[tuple[int, float]] = deque(maxlen=PACE_REPORTS + 1)
        self._num_validations, self._validating_before = 0, 0.0
        self._growth = NO_GROWTH

    def start(self, first_step: int, growth: Growth = NO_GROWTH) -> None:
        """Begin a launch, or go on with all layers: the first step compiles and is not measured."""
        spent = self._clock.read()
        self._growth = growth
        self._reports.clear()
        self._num_validations, self._validating_before = 0, spent[VALIDATION]
        self._reports.append((first_step, _spent_on_steps(spent)))

    def after_steps(self, global_step: int, spent: dict[str, float]) -> float | None:
        """Return the seconds left after a step, before its own validation if one is due.

        `spent` has what all launches had spent by then, by phase: it may be reported later, after
        other steps. None as long as nothing has been measured.
        """
        self._reports.append((global_step, _spent_on_steps(spent)))
        return self._seconds(global_step, after=global_step)

    def after_validation(self, global_step: int) -> float | None:
        """Return the seconds left after the validation of a step, as `after_steps` does."""
        self.add_validation()
        return self._seconds(global_step, after=global_step + 1)

    def add_validation(self) -> None:
        """Count one whose seconds the clock has by now."""
        self._num_validations += 1

    def _seconds(self, global_step: int, *, after: int) -> float | None:
        """Return the seconds left; the validations of the first `after` steps are done."""
        if len(self._reports) < 2 or self._reports[-1][0] == self._reports[0][0]:
            return None
        (first, before), (last, now) = self._reports[0], self._reports[-1]
        step = (now - before) / (last - first)
        if self._num_validations:
            validating = self._clock.read()[VALIDATION] - self._validating_before
            validation = validating / self._num_validations
        else:
            validation = estimated_validation_seconds(step, self._config, self._plan)
        num_steps, growth = self._plan.num_steps, self._growth
        num_validations = self._config.num_validations(num_steps, after=after)
        num_late = self._config.num_validations(num_steps, after=max(after, growth.step))
        return (
            growth.as_steps_now(global_step + 1, num_steps) * step
            + (num_validations - num_late + num_late * growth.factor) * validation
            + (self._clock.read_this_launch()[COMPILE] if growth.step else 0.0)
        )


def _spent_on_steps(spent: dict[str, float]) -> float:
    return sum(spent.values()) - sum(spent[phase] for phase in (*ONE_TIME_PHASES, VALIDATION))
