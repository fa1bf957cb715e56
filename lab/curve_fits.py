"""The loss over a number, such as the batch size: a least-squares fit in its logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.polynomial import Polynomial


def fit_log_quadratic(
    x: Sequence[float], y: Sequence[float]
) -> tuple[Polynomial, tuple[float, float] | None]:
    """Fit a quadratic in ln(x), which has at least three different values above 0.

    Returns:
        The curve as a function of ln(x); x and y of its minimum, None if that is outside of `x`.
    """
    curve = Polynomial(np.polynomial.polynomial.polyfit(np.log(x), y, 2))
    _, linear, quadratic = curve.coef
    lowest = -linear / (2 * quadratic) if quadratic > 0 else math.inf
    if not math.log(min(x)) <= lowest <= math.log(max(x)):
        return curve, None
    return curve, (math.exp(lowest), float(curve(lowest)))
