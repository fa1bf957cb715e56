"""Fewer points for a line: the mean and the extremes of each bucket of values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Buckets:
    """Values in buckets; a bucket has one value if all are drawn.

    Attributes:
        size: values in each bucket but the last one.
        ends: the index of the last value of each bucket, ascending.
    """

    size: int
    ends: np.ndarray
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray


def thin(values: np.ndarray, max_points: int) -> Buckets:
    """Put values into at most `max_points` buckets.

    A bucket has a power of two of values, so that only the last point moves when values are
    appended, until all buckets double.

    Args:
        values: (n,), finite.
    """
    size = bucket_size(len(values), max_points)
    starts = np.arange(0, len(values), size)
    if size == 1:
        return Buckets(size, starts, values, values, values)
    counts = np.diff(np.append(starts, len(values)))
    return Buckets(size, starts + counts - 1, np.add.reduceat(values, starts) / counts,
                   np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))


def bucket_size(num_values: int, max_points: int) -> int:
    """Return how many values become one point; 1 if all are drawn.

    Buckets have three numbers, values one: there are at most half as many buckets as values.
    """
    size = 1
    while num_values > max_points and -(-num_values // size) > max_points // 2:
        size *= 2
    return size
