"""Least-squares fits: memory over microbatch size, loss over batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """y = intercept + slope * x."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    def largest_x(self, y: float) -> float:
        """Return the x at which the line reaches y; inf if it does not rise."""
        return (y - self.intercept) / self.slope if self.slope > 0 else math.inf


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line by least squares.

    Raises:
        ValueError: `x` has fewer than two different values.
    """
    if len(set(x)) < 2:
        raise ValueError(f"a line needs two different x, found {sorted(set(x))}")
    intercept, slope = np.polynomial.polynomial.polyfit(x, y, 1)
    return Line(float(intercept), float(slope))


@dataclass(frozen=True)
class LogQuadratic:
    """y = constant + linear * ln(x) + quadratic * ln(x)^2."""

    constant: float
    linear: float
    quadratic: float

    def at(self, x: float) -> float:
        return self.constant + self.linear * math.log(x) + self.quadratic * math.log(x) ** 2

    def minimum(self) -> tuple[float, float] | None:
        """Return the x with the smallest y, and that y; None if the parabola opens downwards."""
        if self.quadratic <= 0:
            return None
        x = math.exp(-self.linear / (2 * self.quadratic))
        return x, self.at(x)


def fit_log_quadratic(x: Sequence[float], y: Sequence[float]) -> LogQuadratic:
    """Fit a parabola in ln(x) by least squares.

    Raises:
        ValueError: `x` has fewer than three different values, or one that is not positive.
    """
    if len(set(x)) < 3 or min(x) <= 0:
        raise ValueError(f"wanted three different positive x, found {sorted(set(x))}")
    constant, linear, quadratic = np.polynomial.polynomial.polyfit(np.log(x), y, 2)
    return LogQuadratic(float(constant), float(linear), float(quadratic))
