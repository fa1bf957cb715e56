"""Variants that change one number only: loss over its value, and the value with the lowest loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.polynomial import Polynomial

from lab.curve_fits import fit_log_quadratic
from lab.runs import number
from lab.sweep.plan import Sweep
from lab.sweep.results import Entry

NEEDED_FOR_FIT = 3  # different values


@dataclass(frozen=True)
class Range:
    """The losses of variants that change one key to different numbers, by rising number.

    Attributes:
        entries: the value and the variant; the baseline too, if its value is a number.
    """

    key: str
    entries: list[tuple[float, Entry]]

    @property
    def means(self) -> list[tuple[float, float]]:
        """Different values and mean losses of variants of which at least one run has finished."""
        losses: dict[float, list[float]] = {}
        for value, entry in self.entries:
            if entry.loss is not None:
                losses.setdefault(value, []).append(entry.loss)
        return [(value, statistics.fmean(found)) for value, found in losses.items()]

    @cached_property
    def fit(self) -> tuple[Polynomial, tuple[float, float] | None] | None:
        """The fitted curve and its minimum; None with fewer than 3 positive values."""
        x, y = [value for value, _ in self.means], [loss for _, loss in self.means]
        return fit_log_quadratic(x, y) if len(x) >= NEEDED_FOR_FIT and x[0] > 0 else None

    def line(self) -> str:
        """Describe the minimum, or why there is none."""
        if self.fit is None:
            return (f"{self.key}: no curve is fitted; it needs the losses of 3 values above 0")
        _, minimum = self.fit
        if minimum is None:
            return (f"{self.key}: the fitted curve has no minimum between {self.means[0][0]:g} and"
                    f" {self.means[-1][0]:g}; try values beyond the best one")
        value, loss = minimum
        return (f"{self.key}: lowest loss {loss:.4f} at {value:.4g}, by a quadratic in"
                f" log2({self.key}) through {len(self.means)} values")


def ranges_of(sweep: Sweep, entries: list[Entry]) -> list[Range]:
    """Return a range for each key that at least two variants change alone, to numbers."""
    found: dict[str, list[tuple[float, Entry]]] = {}
    for entry in entries:
        if len(entry.variant.changes) == 1 and not entry.variant.is_stack:
            key, value = next(iter(entry.variant.changes.items()))
            if number(value) is not None and not entry.validates_on_other_tokens:
                found.setdefault(key, []).append((value, entry))
    ranges = []
    for key, changed in found.items():
        own = _own_value(sweep, entries[0], key)
        points = changed + ([] if own is None else [(own, entries[0])])
        if len(changed) > 1:
            ranges.append(Range(key, sorted(points, key=lambda point: point[0])))
    return ranges


def _own_value(sweep: Sweep, baseline: Entry, key: str) -> float | None:
    """Return the baseline's value of a key; of the global batch, the one it was trained with."""
    values: dict[str, Any] = sweep.base.model.model_dump() | sweep.base.train.model_dump()
    return number(values[key]) if values[key] is not None or key != "global_batch_size" else (
        baseline.mean(key))
