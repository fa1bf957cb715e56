"""Seconds and dollars of a run by phase, and what is left of its budget."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Self

from basics.machine import seconds_since_process_start
from basics.text import dollars
from run_config import TrainConfig

PHASES = (
    "startup",
    "download",
    "compile",
    "training",
    "diagnostics",
    "waiting",
    "validation",
    "checkpoint",
    "chart",
    "lost",
)  # after the checkpoint that a later launch resumed from, unless a launch ended there in order
(
    STARTUP,
    DOWNLOAD,
    COMPILE,
    TRAINING,
    DIAGNOSTICS,
    WAITING,
    VALIDATION,
    CHECKPOINT,
    CHART,
    LOST,
) = PHASES
SPENT_VARIABLE = "DDP_TRAIN_SPENT_SECONDS"  # from the process that starts torchrun to its workers


class PhaseClock:
    """Seconds and dollars of a run by phase, added to those of earlier launches.

    `longest` is the longest stay in each phase in this launch, which began at the value `since` of
    `time.perf_counter()`.
    """

    def __init__(self, since: float | None = None) -> None:
        self._now = time.perf_counter
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._earlier_seconds = dict.fromkeys(PHASES, 0.0)
        self._earlier_usd: dict[str, float] = {}
        self._began = self._since = self._now() if since is None else since
        self.current = STARTUP
        self.usd_per_hour: float | None = None
        self.longest = dict.fromkeys(PHASES, 0.0)

    @classmethod
    def since_process_start(cls) -> Self:
        return cls(since=time.perf_counter() - seconds_since_process_start())

    def resume(self, seconds: dict[str, float], usd: dict[str, float]) -> None:
        """Add the seconds and dollars that a checkpoint records of earlier launches."""
        self._earlier_seconds |= seconds
        self._earlier_usd = dict(usd)

    def count_lost(self, seconds: float, usd: float | None = None) -> None:
        """Book to `LOST` what earlier launches spent in all and the checkpoint does not record.

        By default the dollars are those of the lost seconds at this launch's price.
        """
        lost = max(0.0, seconds - sum(self._earlier_seconds.values()))
        self._earlier_seconds[LOST] += lost
        spent = sum(self._earlier_usd.values())
        if usd is None:
            usd = spent + lost / 3600 * (self.usd_per_hour or 0.0)
        if usd > spent:
            self._earlier_usd[LOST] = self._earlier_usd.get(LOST, 0.0) + usd - spent

    def set_price(self, usd_per_hour: float | None) -> str:
        """Set this launch's price; where it or an earlier one is missing, use the other; say so."""
        hours = sum(self._earlier_seconds.values()) / 3600
        usd = sum(self._earlier_usd.values())
        self.usd_per_hour = usd_per_hour or (usd / hours if usd and hours else None)
        if usd_per_hour and hours and not usd:
            self._earlier_usd = {
                phase: seconds / 3600 * usd_per_hour
                for phase, seconds in self._earlier_seconds.items()
            }
            return (
                f"earlier launches had no price: their {hours:.3g} hours are counted at"
                f" US${dollars(usd_per_hour)} an hour too"
            )
        if self.usd_per_hour and not usd_per_hour:
            return (
                "this launch has no price: it is counted at that of the earlier ones,"
                f" US${dollars(self.usd_per_hour)} an hour; set --usd-per-hour if it differs"
            )
        return ""

    def enter(self, phase: str) -> str:
        """Book the time from here on to another phase; return the previous one."""
        before = self.current
        now = self._now()
        self._spent[before] += now - self._since
        self.current = phase
        self._since = now
        return before

    def count_diagnostics(self, seconds: float) -> None:
        """Book some of the seconds of training to diagnostics: the device has worked for both."""
        # Measured on the device, which may be behind this process's clock.
        seconds = min(seconds, self.read_this_launch()[TRAINING])
        self._spent[TRAINING] -= seconds
        self._spent[DIAGNOSTICS] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[SimpleNamespace]:
        """Book the time inside to another phase; afterwards what is yielded has its `seconds`.

        After an error the phase is not left: it is where the error happened.
        """
        outer = self.enter(name)
        booked = self._spent[name]
        stay = SimpleNamespace()
        yield stay
        self.enter(outer)
        stay.seconds = self._spent[name] - booked
        self.longest[name] = max(self.longest[name], stay.seconds)

    def forget_longest(self, phase: str) -> None:
        """Measure the longest stay in a phase anew: those to come differ from those before."""
        self.longest[phase] = 0.0

    def total_seconds(self) -> float:
        """Return the seconds of all launches until now. Any thread."""
        return sum(self._earlier_seconds.values()) + self.launch_seconds()

    def launch_seconds(self) -> float:
        """Return the seconds of this launch until now. Any thread."""
        return self._now() - self._began

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase, over all launches."""
        return self.spent()[0]

    def read_this_launch(self) -> dict[str, float]:
        self.enter(self.current)
        return dict(self._spent)

    def usd(self) -> dict[str, float]:
        """Return the dollars of each phase, over all launches; empty if no price was ever set."""
        return self.spent()[1]

    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds and the dollars of each phase, as of one moment."""
        seconds, usd = {}, {}
        for phase, of_launch in self.read_this_launch().items():
            seconds[phase] = self._earlier_seconds[phase] + of_launch
            if self.usd_per_hour is not None:
                earlier = self._earlier_usd.get(phase, 0.0)
                usd[phase] = earlier + of_launch / 3600 * self.usd_per_hour
        return seconds, usd

    def export_to_children(self) -> None:
        os.environ[SPENT_VARIABLE] = json.dumps(self.read_this_launch())

    def import_from_parent(self) -> None:
        """Add the seconds of the process that started torchrun, once."""
        # After a restart the earlier processes have recorded these seconds with theirs.
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            for phase, seconds in json.loads(os.environ.get(SPENT_VARIABLE, "{}")).items():
                self._spent[phase] += seconds
                self._began -= seconds


def nearest_limit(config: TrainConfig, clock: PhaseClock) -> tuple[float, str]:
    """Return the seconds until `max_hours` or `max_cost_usd` is reached, and how much is spent.

    They are of all launches of a run. Below 0 after the limit; inf without any.
    """
    limits = [(math.inf, "")]
    if config.max_hours is not None:
        hours = sum(clock.read().values()) / 3600
        limits.append(
            (
                (config.max_hours - hours) * 3600,
                f"max_hours is {config.max_hours:g}, and the run has taken {hours:.3g}",
            )
        )
    if config.max_cost_usd is not None:
        spent = sum(clock.usd().values())
        limits.append(
            (
                (config.max_cost_usd - spent) * 3600 / clock.usd_per_hour,  # type: ignore[operator]
                f"max_cost_usd is {config.max_cost_usd:g}, and the run has spent {spent:.3g}",
            )
        )
    return min(limits)
