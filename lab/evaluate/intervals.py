"""95% intervals of measured figures: how far off they may be because the text is a sample."""

from __future__ import annotations

import math

import numpy as np

from lab.stats import t_95

Interval = tuple[float, float]
Z_95 = 1.959964  # of the normal distribution


def of_share(num_right: float, num_questions: int) -> Interval:
    """Return Wilson's interval of a share of questions.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    share, z2 = num_right / num_questions, Z_95**2
    scale = 1 + z2 / num_questions
    middle = (share + z2 / (2 * num_questions)) / scale
    half = Z_95 / scale * math.sqrt(share * (1 - share) / num_questions
                                    + z2 / (4 * num_questions**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def pair_sums(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the sums from which `of_ratio` computes: (6,) float64.

    Args:
        x: (N,), for example the loss of each sequence.
        y: (N,), for example the number of its tokens.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum()])


def of_ratio(sums: np.ndarray) -> Interval | None:
    """Return the interval of sum(x) / sum(y).

    None with fewer than two pairs, if all y are 0, or if an x is not finite.

    With equal y this is mean +- t x standard error of x / y, with Student's t for one degree of
    freedom less than there are pairs (1.96 if there are many).

    Source: Cochran 1977, "Sampling Techniques", section 6.4 (the variance of a ratio).
    """
    n, x, y, xx, xy, yy = map(float, sums)
    if n < 2 or not y or not math.isfinite(x):
        return None
    ratio = x / y
    squares = max(0.0, xx - 2 * ratio * xy + ratio**2 * yy)  # of the deviations of x from ratio * y
    half = t_95(int(n) - 1) * math.sqrt(n / (n - 1) * squares) / y
    return ratio - half, ratio + half


def exp(exponent: float) -> float:
    """Return e to a power, at most 1e304: the perplexity of a very large loss."""
    return math.exp(min(exponent, 700.0))


def rounded(interval: Interval | None) -> Interval | None:
    """Round to six decimals: further ones depend on the microbatch size."""
    return interval and (round(interval[0], 6), round(interval[1], 6))


def shown(figure: float, interval: Interval | None, *, decimals: int) -> str:
    """Return a table's cell: the figure, then its interval in brackets."""
    if interval is None:
        return f"{figure:.{decimals}f}"
    low, high = (f"{bound:.{min(decimals, 4)}f}" for bound in interval)
    return f"{figure:.{decimals}f} [{low}, {high}]"
