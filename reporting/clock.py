"""Seconds and dollars of a run by phase, and what its budget leaves."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from run_config import TrainConfig
from tokens.batch_plan import BatchPlan

STARTUP, DOWNLOAD, COMPILE, TRAINING = "startup", "download", "compile", "training"
WAITING, VALIDATION, CHECKPOINT, CHART = "waiting", "validation", "checkpoint", "chart"
LOST = "lost"  # after the checkpoint that a later start went on from: paid for all the same
PHASES = (STARTUP, DOWNLOAD, COMPILE, TRAINING, WAITING, VALIDATION, CHECKPOINT, CHART, LOST)
SPENT_VARIABLE = "DDP_TRAIN_SPENT_SECONDS"  # from the process that starts torchrun to its workers

SLOW_DISK_BYTES_PER_SECOND = 100e6  # to guess how long a first checkpoint takes
BYTES_PER_PARAMETER_SAVED = 12  # float32 weights and AdamW's two moments
FIT_MARGIN = 0.02  # of the time left, for what the pace does not show
SURPRISE = 0.25  # of the time to the next look at the clock, in case it takes so much longer
REPORT_INTERVAL = 10  # global steps from one look at the losses, and at the clock, to the next

Item = TypeVar("Item")


@dataclass
class PhaseTime:
    """How long one stay in a phase has taken."""

    seconds: float = 0.0


class PhaseClock:
    """Seconds and dollars of a run by phase, going on from what earlier starts have spent.

    Args:
        since: what `time.perf_counter()` gave when this start began.
    """

    def __init__(self, since: float | None = None) -> None:
        self._now = time.perf_counter
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._earlier_seconds = dict.fromkeys(PHASES, 0.0)
        self._earlier_usd: dict[str, float] = {}
        self._phase, self._since = STARTUP, self._now() if since is None else since
        self.usd_per_hour: float | None = None
        self.longest = dict.fromkeys(PHASES, 0.0)  # stay in each phase, in this start
        self.longest_write = 0.0  # of a checkpoint, while training goes on

    def go_on_from(self, seconds: dict[str, float], usd: dict[str, float]) -> None:
        """Count what the starts before this one have spent."""
        self._earlier_seconds |= seconds
        self._earlier_usd = dict(usd)

    def count_lost(self, seconds: float, usd: float) -> None:
        """Book what was spent in all before this start, and is in no checkpoint, to `LOST`."""
        lost = seconds - sum(self._earlier_seconds.values())
        self._earlier_seconds[LOST] += max(0.0, lost)
        lost_usd = usd - sum(self._earlier_usd.values())
        if lost_usd > 0:
            self._earlier_usd[LOST] = self._earlier_usd.get(LOST, 0.0) + lost_usd

    @property
    def current(self) -> str:
        """The phase that time goes to now."""
        return self._phase

    def enter(self, phase: str) -> str:
        """Book the time from here on to another phase; give the one before."""
        before, now = self._phase, self._now()
        self._spent[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseTime]:
        """Book the time inside to another phase; on leaving, its length is known.

        After an error it is still that phase: where it has happened.
        """
        outer, booked, time_inside = self.enter(name), self._spent[name], PhaseTime()
        yield time_inside
        self.enter(outer)
        time_inside.seconds = self._spent[name] - booked
        self.longest[name] = max(self.longest[name], time_inside.seconds)

    def waiting_for(self, items: Generator[Item]) -> Generator[Item]:
        """Pass items on; book the time until each has come to `WAITING`."""
        try:
            while True:
                # What the first step waits for is its own: it is no sign of slow data.
                with self.phase(COMPILE if self._phase == COMPILE else WAITING):
                    item = next(items, None)
                if item is None:
                    return
                yield item
        finally:
            items.close()

    def read(self) -> dict[str, float]:
        """Give the seconds of each phase, over all starts."""
        spent = self.read_this_start()
        return {phase: self._earlier_seconds[phase] + spent[phase] for phase in PHASES}

    def read_this_start(self) -> dict[str, float]:
        self.enter(self._phase)
        return dict(self._spent)

    def usd(self) -> dict[str, float]:
        """Give the dollars of each phase, over all starts; empty where no price was ever given.

        A start without a price adds nothing.
        """
        if self.usd_per_hour is None:
            return dict(self._earlier_usd)
        return {phase: self._earlier_usd.get(phase, 0.0) + seconds / 3600 * self.usd_per_hour
                for phase, seconds in self.read_this_start().items()}

    def hand_over(self) -> None:
        """Leave this start's seconds to the processes that this one starts."""
        os.environ[SPENT_VARIABLE] = json.dumps(self.read_this_start())

    def take_over(self) -> None:
        """Count what the process that started torchrun has spent, once."""
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            for phase, seconds in json.loads(os.environ.get(SPENT_VARIABLE, "{}")).items():
                self._spent[phase] += seconds


@dataclass(frozen=True)
class Pace:
    """Seconds that the parts of a run take on this machine."""

    step: float
    validation: float
    saving: float  # a checkpoint and the charts, as far as training stands still
    last_write: float = 0.0  # of a checkpoint, that the end has to wait for

    @classmethod
    def measured(cls, clock: PhaseClock, *, num_steps: int, plan: BatchPlan, train: TrainConfig,
                 num_parameters: int) -> Pace:
        """Take the pace of this start so far, of which `num_steps` came after its first one.

        A part that has not happened yet is guessed: validation as forward passes, a third of a
        step's work, on one process; a checkpoint as written to a slow disk.
        """
        spent = clock.read_this_start()
        first = spent[COMPILE]  # all there is to go by as long as no other step is done
        step = (spent[TRAINING] + spent[WAITING]) / num_steps if num_steps else first
        forward = step / plan.gradient_accumulation_steps / 3
        num_batches = -(-train.num_validation_sequences // plan.microbatch_size)
        written = num_parameters * BYTES_PER_PARAMETER_SAVED
        return cls(
            step=step,
            validation=clock.longest[VALIDATION] or forward * num_batches,
            saving=clock.longest[CHECKPOINT] + clock.longest[CHART]
            or written / SLOW_DISK_BYTES_PER_SECOND,
            last_write=2 * clock.longest_write,  # it may have to wait for the one before
        )

    def seconds(self, num_steps: int, *, num_validations: int = 0, num_savings: int = 0) -> float:
        return (num_steps * self.step + num_validations * self.validation
                + num_savings * self.saving)

    def with_its_share(self, train: TrainConfig) -> float:
        """Give the seconds of a step with its share of validations and checkpoints."""
        seconds = self.step
        if train.validation_interval:
            seconds += (self.validation + self.saving) / train.validation_interval
        if train.checkpoint_interval:
            seconds += self.saving / train.checkpoint_interval
        return seconds


class Budget:
    """What a run may spend over all its starts: `max_hours`, `max_cost_usd`, or both."""

    def __init__(self, train: TrainConfig, clock: PhaseClock) -> None:
        self._train, self._clock = train, clock

    @property
    def is_limited(self) -> bool:
        return bool(self._train.max_hours or self._train.max_cost_usd)

    def seconds_left(self) -> float:
        """Give the seconds until the first of the limits, below 0 behind it; inf without any."""
        return min((left for left, _ in self._limits()), default=math.inf)

    def nearest_limit(self) -> str:
        """Name the limit that comes first, its value and what is spent of it."""
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
        """Tell if what comes next fits in, also where it takes somewhat longer than thought."""
        return seconds * (1 + SURPRISE) <= self.seconds_left()

    def affordable_steps(self, pace: Pace) -> int:
        """Count the steps that fit into what is left, with a last validation and checkpoint."""
        ending = pace.seconds(0, num_validations=int(self._train.validates), num_savings=1)
        ending += pace.last_write
        surprise = SURPRISE * (ending + pace.seconds(REPORT_INTERVAL))
        seconds = (self.seconds_left() - ending - surprise) * (1 - FIT_MARGIN)
        return max(0, int(seconds / pace.with_its_share(self._train)))
