"""The variants of a sweep beside its baseline: differences, verdicts, and what is stacked."""

import statistics
from dataclasses import dataclass
from functools import cached_property

from numpy.polynomial import Polynomial

from basics.errors import UserError
from lab.compare.results import Reached, first_reaching, mean_reached
from lab.runs import number
from lab.stats import Difference, fit_log_quadratic
from lab.sweep.changes import Changes, label
from lab.sweep.execution import Outcome
from lab.sweep.plan import Sweep, Variant

NEEDED_FOR_FIT = 3  # different values


@dataclass(frozen=True)
class Entry:
    """One variant, over all its seeds, beside the baseline.

    Attributes:
        outcomes: in the order of the seeds.
        baselines: the baseline's outcomes with the same seeds.
    """

    name: str
    variant: Variant
    outcomes: list[Outcome]
    baselines: list[Outcome]

    @property
    def losses(self) -> list[float]:
        return [found.loss for found in self.outcomes if found.loss is not None]

    @property
    def loss(self) -> float | None:
        """The mean over the finished seeds."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def pairs(self) -> list[tuple[Outcome, Outcome]]:
        """The seeds with which both this variant and the baseline have finished."""
        return [pair for pair in zip(self.outcomes, self.baselines, strict=True)
                if pair[0].loss is not None and pair[1].loss is not None]

    @property
    def validates_on_other_tokens(self) -> bool:
        own, base = ({found.result.validation_slice for found in outcomes}
                     for outcomes in zip(*self.pairs, strict=True)) if self.pairs else ((), ())
        return own != base

    @cached_property
    def difference(self) -> Difference | None:
        """The difference to the baseline; None for the baseline, and if they do not compare."""
        if not self.variant.changes or self.validates_on_other_tokens:
            return None
        return Difference.of([own.loss - base.loss for own, base in self.pairs])

    @cached_property
    def reached(self) -> Reached | None:
        """When the baseline's final loss was reached, mean over the seeds; None if not by all."""
        if self.validates_on_other_tokens:
            return None
        return mean_reached([first_reaching(own.result.records, base.loss)
                             for own, base in self.pairs])

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure over the finished seeds."""
        values = [found.result.figures[key] for found in self.outcomes if found.loss is not None]
        return statistics.fmean(values) if values and None not in values else None

    @property
    def unfinished(self) -> str:
        """The states of the seeds that have not finished; empty if all have."""
        states = [found.state for found in self.outcomes if found.loss is None]
        counts = {state: states.count(state) for state in states}
        return ", ".join(state if len(self.outcomes) == 1 else
                         f"{count} of {len(self.outcomes)} {state}"
                         for state, count in counts.items())

    @property
    def verdict(self) -> str:
        """Where the difference lies; `better` and `worse` are outside the noise."""
        if self.difference is None:
            return ""
        is_lower = self.difference.mean < 0
        if self.difference.is_noise is None:
            return "lower, noise unknown" if is_lower else "not lower, noise unknown"
        return "inside" if self.difference.is_noise else "better" if is_lower else "worse"


def entries_of(sweep: Sweep, outcomes: dict[str, Outcome]) -> list[Entry]:
    """Return the variants with what their runs have come to; the baseline first."""
    by_variant = [[found for found in outcomes.values() if found.run.variant == variant]
                  for variant in sweep.plan.variants]
    return [Entry(name, variant, found, by_variant[0]) for name, variant, found in zip(
        sweep.names, sweep.plan.variants, by_variant, strict=True)]


def with_stack(sweep: Sweep, entries: list[Entry]) -> tuple[Sweep, list[str]]:
    """Return the sweep with all improvements as one variant, and lines that say what was done.

    An improvement is better outside the noise; with one seed, better at all. The largest one comes
    first; a later one that sets a key to another value is left out.
    """
    better = sorted((entry for entry in entries if not entry.variant.is_stack
                     and not entry.unfinished
                     and entry.verdict in ("better", "lower, noise unknown")),
                    key=lambda entry: entry.difference.mean)
    together: Changes = {}
    used, lines = [], []
    for entry in better:
        changes = entry.variant.changes
        if any(together.get(key, value) != value for key, value in changes.items()):
            lines.append(f"stack: without {entry.variant.label}: a larger improvement sets the"
                         " same key")
            continue
        together |= changes
        used.append(entry.variant.label)
    if len(used) < 2:
        return sweep, [*lines, "stack: nothing to train: fewer than two changes were better than"
                               " the baseline outside the noise"]
    if any(entry.difference.is_noise is None for entry in better):
        lines.append("stack: with one seed the noise is not known: all changes with a lower loss"
                     " are taken")
    try:
        stacked = sweep.with_variant(together, is_stack=True)
    except UserError as error:
        return sweep, [*lines, f"stack: {label(together)} cannot be trained: {error}"]
    return stacked, [*lines, f"stack: {', '.join(used)}"]


@dataclass(frozen=True)
class Range:
    """The losses of variants that change one key to different numbers, by rising number.

    Attributes:
        points: values and mean losses; a value of which no run has finished has none.
    """

    key: str
    points: dict[float, float]

    @cached_property
    def fit(self) -> tuple[Polynomial, tuple[float, float] | None] | None:
        """The fitted curve and its minimum; None with fewer than 3 positive values."""
        if len(self.points) < NEEDED_FOR_FIT or min(self.points) <= 0:
            return None
        return fit_log_quadratic(list(self.points), list(self.points.values()))

    def line(self) -> str:
        """Describe the minimum, or why there is none."""
        if self.fit is None:
            return f"{self.key}: no curve is fitted; it needs the losses of 3 values above 0"
        _, minimum = self.fit
        if minimum is None:
            return (f"{self.key}: the fitted curve has no minimum between {min(self.points):g} and"
                    f" {max(self.points):g}; try values beyond the best one")
        value, loss = minimum
        return (f"{self.key}: lowest loss {loss:.4f} at {value:.4g}, by a quadratic in"
                f" log2({self.key}) through {len(self.points)} values")


def ranges_of(sweep: Sweep, entries: list[Entry]) -> list[Range]:
    """Return a range for each key that at least two variants change alone, to numbers."""
    found: dict[str, dict[float, list[float]]] = {}
    for entry in entries:
        if len(entry.variant.changes) == 1 and not entry.validates_on_other_tokens:
            ((key, value),) = entry.variant.changes.items()
            if number(value) is not None:
                found.setdefault(key, {})[value] = entry.losses
    ranges = []
    for key, losses in found.items():
        if len(losses) > 1:
            own = (sweep.base.model.model_dump() | sweep.base.train.model_dump())[key]
            if own is None and key == "global_batch_size":  # the one that it was trained with
                own = entries[0].mean(key)
            if number(own) is not None:
                losses.setdefault(own, []).extend(entries[0].losses)
            ranges.append(Range(key, {value: statistics.fmean(losses[value])
                                      for value in sorted(losses) if losses[value]}))
    return ranges
