"""Seconds of a run that are to come: counted here alone, from what its parts take."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reporting.clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    DIAGNOSTICS,
    DOWNLOAD,
    LOST,
    STARTUP,
    TRAINING,
    VALIDATION,
    WAITING,
    PhaseClock,
)
from reporting.speed import SLOW_DISK_BYTES_PER_SECOND, checkpoint_bytes
from run_config import ModelConfig, Run, Stage, TrainConfig
from tokens.batch_plan import BatchPlan

PACE_REPORTS = 50  # the expected pace is that of so many reports
ONE_TIME_PHASES = (STARTUP, DOWNLOAD, COMPILE, LOST)  # do not come again
FORWARD_SHARE = 1 / 3  # of a step's time: a backward pass takes about twice as long


@dataclass(frozen=True)
class Rates:
    """Seconds that each part of a run takes, with the layers of `model`."""

    model: ModelConfig
    step: float
    validation: float  # of all sets
    save: float = 0.0  # by which a checkpoint holds up training
    chart: float = 0.0  # after each checkpoint
    compilation: float = 0.0


class Ahead(NamedTuple):
    """Seconds of steps that are to come, of one stage."""

    training: float
    validation: float
    saving: float
    compilation: float


def seconds_ahead(
    run: Run,
    plan: BatchPlan,
    stages: Sequence[Stage],
    rates: Rates,
    *,
    first: int,
    stop: int,
    first_due: int | None = None,
) -> list[Ahead]:
    """Estimate the seconds of the steps from `first` on, before `stop`, for each stage.

    A step and a validation of other layers take longer by the ratio of their FLOPs, a checkpoint by
    that of the bytes. All stages but the first begin with a compilation.

    Args:
        first_due: the first step whose validation and checkpoint are to come, else `first`.
    """
    config, found = run.config, []
    for model, steps in stages:
        slower = config.flops_per_token(model) / config.flops_per_token(rates.model)
        deeper = model.flops_per_token / rates.model.flops_per_token  # with the whole head
        larger = checkpoint_bytes(model, config) / checkpoint_bytes(rates.model, config)
        trained = _part(steps, first, stop)
        due = _part(steps, first if first_due is None else first_due, stop)
        num_saves = config.num_saves(due, num_steps=plan.num_steps)
        begins = model != stages[0].model and first <= steps.start < stop
        found.append(
            Ahead(
                len(trained) * rates.step * slower,
                config.num_validations(due, num_steps=plan.num_steps) * rates.validation * deeper,
                num_saves * (rates.save * larger + rates.chart),
                rates.compilation * begins,
            )
        )
    return found


def _part(steps: range, first: int, stop: int) -> range:
    start = max(steps.start, first)
    return range(start, max(start, min(steps.stop, stop)))


def validation_steps(model: ModelConfig, config: TrainConfig, plan: BatchPlan) -> float:
    """Estimate how many global steps take as long as one validation, of all sets.

    It is forward passes alone, of whole microbatches: a small one is hardly faster on a GPU. With
    `sampled_softmax` a step leaves out a part of the head.
    """
    num_microbatches = math.ceil(config.num_validation_sequences / plan.microbatch_size)
    if config.validate_on == "all":  # those of the process that the others wait for
        num_microbatches = math.ceil(num_microbatches / plan.world_size)
    num_forward = config.num_validation_sets * num_microbatches
    share = FORWARD_SHARE * model.flops_per_token / config.flops_per_token(model)
    return share * num_forward / plan.gradient_accumulation_steps


class Pace:
    """Measures what this launch's steps, validations and checkpoints take; estimates the rest.

    What a launch has not measured yet is estimated from what it has: a validation as its
    forward passes, compiling more layers as what was compiled so far, a checkpoint by its bytes.

    Args:
        longest_write: returns the seconds of the longest write of a checkpoint in the background.
    """

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        clock: PhaseClock,
        longest_write: Callable[[], float] = float,
    ) -> None:
        self._run, self._plan, self._clock = run, plan, clock
        self._longest_write = longest_write
        self._stages: Sequence[Stage] = []  # the present one, and those after it
        # Global steps, and what all launches had spent after each on what comes again with steps.
        self._reports: deque[tuple[int, float]] = deque(maxlen=PACE_REPORTS + 1)
        self._num_validations, self._validating_before = 0, 0.0
        self._spent_before: dict[str, float] = {}  # by phase, in this launch before this stage
        # Seconds of the longest checkpoint of the stages before, if it had one byte.
        self._save_per_byte = self._write_per_byte = 0.0

    def begin(self, stages: Sequence[Stage]) -> None:
        """Begin the first of these stages: its first step compiles, and is not measured."""
        if self._stages:
            size = checkpoint_bytes(self.model, self._run.config)
            self._save_per_byte = self._clock.longest[CHECKPOINT] / size
            self._write_per_byte = self._longest_write() / size
        self._clock.forget_longest(VALIDATION)
        self._stages, self._spent_before = stages, self._clock.read_this_launch()
        self._num_validations = 0
        spent = self._clock.read()
        self._validating_before = spent[VALIDATION]
        self._reports.clear()
        self._reports.append((stages[0].steps.start, _spent_on_steps(spent)))

    @property
    def model(self) -> ModelConfig:
        """The shape that is trained now."""
        return self._stages[0].model

    def num_measured(self, global_step: int) -> int:
        """Return how many steps were measured until this one: all of this stage but the first."""
        return max(0, global_step - self._stages[0].steps.start)

    def measured(self) -> dict[str, float]:
        """Return the seconds of each phase in this launch since the stage began."""
        return {
            phase: seconds - self._spent_before[phase]
            for phase, seconds in self._clock.read_this_launch().items()
        }

    def this_launch(self, global_step: int) -> dict[str, Any]:
        """Return what `summary.json` says of the steps of this launch with the present layers."""
        num_steps = self.num_measured(global_step)
        return {
            "steps": num_steps,
            "tokens": num_steps * self._plan.tokens_per_step,
            "seconds": step_seconds(self.measured()),
            "num_layers": self.model.n_layers,
        }

    def seconds_after_report(self, global_step: int, spent: dict[str, float]) -> float | None:
        """Return the seconds left after a step, before its own validation if one is due.

        `spent` has what all launches had spent by then, by phase: it may be reported later, after
        other steps. None as long as nothing has been measured.
        """
        self._reports.append((global_step, _spent_on_steps(spent)))
        return self._seconds_left(global_step, first_due=global_step)

    def seconds_after_validation(self, global_step: int) -> float | None:
        """Return the seconds left after the validation of a step, which the clock has by now."""
        self.add_validation()
        return self._seconds_left(global_step, first_due=global_step + 1)

    def add_validation(self) -> None:
        """Count one whose seconds the clock has by now."""
        self._num_validations += 1

    def _seconds_left(self, global_step: int, *, first_due: int) -> float | None:
        """Return the seconds left at the pace of the last reports.

        Whatever comes again beside validations, such as checkpoints, is part of that pace.
        """
        (first, before), (last, now) = self._reports[0], self._reports[-1]
        if last == first:
            return None
        step = (now - before) / (last - first)
        validation = step * validation_steps(self.model, self._run.config, self._plan)
        if self._num_validations:
            validating = self._clock.read()[VALIDATION] - self._validating_before
            validation = validating / self._num_validations
        compilation = self._clock.read_this_launch()[COMPILE]
        return sum(
            map(
                sum,
                self._ahead(
                    Rates(self.model, step, validation, compilation=compilation),
                    first=global_step + 1,
                    stop=self._plan.num_steps,
                    first_due=first_due,
                ),
            )
        )

    def most_seconds(self, global_step: int, *, stop: int) -> float:
        """Return the most that the launch may take if it ends with the step before `stop`.

        Called at the report of `global_step`, before its validation and its checkpoint. A launch
        ends with a checkpoint, and may wait for the write of the one before.
        """
        clock, config = self._clock, self._run.config
        spent, num_measured = self.measured(), self.num_measured(global_step)
        trained = spent[TRAINING] + spent[DIAGNOSTICS] + spent[WAITING]
        step = trained / num_measured if num_measured else spent[COMPILE]
        size = checkpoint_bytes(self.model, config)
        save = max(clock.longest[CHECKPOINT], size * self._save_per_byte)
        rates = Rates(
            self.model,
            step,
            clock.longest[VALIDATION] or step * validation_steps(self.model, config, self._plan),
            save or size / SLOW_DISK_BYTES_PER_SECOND,
            clock.longest[CHART],
            spent[COMPILE],
        )
        ahead = self._ahead(rates, first=global_step + 1, stop=stop, first_due=global_step)
        last = next(stage.model for stage in self._stages if stage.steps.stop >= stop)
        larger = checkpoint_bytes(last, config) / size
        seconds = sum(map(sum, ahead))
        if not config.is_save_due(stop - 1, num_steps=self._plan.num_steps):
            seconds += rates.save * larger + rates.chart
        write = max(self._longest_write(), size * self._write_per_byte)
        return seconds + 2 * write * larger

    def _ahead(self, rates: Rates, *, first: int, stop: int, first_due: int) -> list[Ahead]:
        return seconds_ahead(
            self._run,
            self._plan,
            self._stages,
            rates,
            first=first,
            stop=stop,
            first_due=first_due,
        )


def _spent_on_steps(spent: dict[str, float]) -> float:
    return sum(spent.values()) - sum(spent[phase] for phase in (*ONE_TIME_PHASES, VALIDATION))


def step_seconds(seconds: dict[str, float]) -> float:
    """Return the seconds of all steps, with waiting for data and other processes."""
    return seconds[TRAINING] + seconds[WAITING]
