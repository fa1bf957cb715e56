"""Measured figures and their 95% intervals: how far off they may be because the text is a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lab.stats import t_95

Interval = tuple[float, float]
Z_95 = 1.959964  # of the normal distribution


class Figure(NamedTuple):
    """A result and its 95% interval; None if there is none."""

    value: float
    interval: Interval | None

    def through(self, function: Callable[[float], float]) -> Figure:
        """Return a rising function of the figure and of both bounds."""
        low, high = map(function, self.interval or (0.0, 0.0))
        return Figure(function(self.value), self.interval and (low, high))

    def cell(self, decimals: int) -> str:
        """Return a table's cell: the figure, then its interval in brackets."""
        if self.interval is None:
            return f"{self.value:.{decimals}f}"
        low, high = (f"{bound:.{min(decimals, 4)}f}" for bound in self.interval)
        return f"{self.value:.{decimals}f} [{low}, {high}]"


def share(is_right: np.ndarray) -> Figure:
    """Return the share of questions that are right, (N,) bool, with Wilson's interval.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    found, num_questions, z2 = float(is_right.mean()), len(is_right), Z_95**2
    scale = 1 + z2 / num_questions
    middle = (found + z2 / (2 * num_questions)) / scale
    half = Z_95 / scale * math.sqrt(found * (1 - found) / num_questions
                                    + z2 / (4 * num_questions**2))
    return Figure(found, (max(0.0, middle - half), min(1.0, middle + half)))


def ratio(x: np.ndarray, y: np.ndarray) -> Figure:
    """Return sum(x) / sum(y) with its interval; x and y, (N,), such as losses and tokens of blocks.

    The interval is None with fewer than two pairs, or if an x is not finite. With equal y it is
    mean +- t x standard error of x / y, with Student's t for N - 1 degrees of freedom.

    Source: Cochran 1977, "Sampling Techniques", section 6.4 (the variance of a ratio).
    """
    n, total = len(x), float(y.sum())
    found = float(x.sum()) / total
    if n < 2 or not math.isfinite(found):
        return Figure(found, None)
    deviations = x - found * y
    half = t_95(n - 1) * math.sqrt(n / (n - 1) * float((deviations**2).sum())) / total
    return Figure(found, (found - half, found + half))


def exp(exponent: float) -> float:
    """Return e to a power, at most 1e304: the perplexity of a very large loss."""
    return math.exp(min(exponent, 700.0))
