"""Fewer points for a line that looks the same: the smallest and the largest of each bucket."""

from __future__ import annotations

import numpy as np


def thin(values: np.ndarray, max_points: int) -> np.ndarray:
    """Return the indices of the values to draw, ascending; all if there are few.

    A bucket has a power of two of values, so that only the last one changes when values are
    appended, until all buckets double. The first and the last value are always drawn.

    Args:
        values: (n,), finite.
        max_points: two of them may be exceeded.
    """
    size = bucket_size(len(values), max_points)
    if size == 1:
        return np.arange(len(values))
    num_full = len(values) // size
    full = values[:num_full * size].reshape(num_full, size)
    starts = np.arange(num_full) * size
    rest, start = values[num_full * size:], num_full * size
    of_rest = [start + rest.argmin(), start + rest.argmax()] if len(rest) else []
    return np.unique(np.concatenate([
        starts + full.argmin(axis=1), starts + full.argmax(axis=1), of_rest,
        [0, len(values) - 1]])).astype(np.int64)


def bucket_size(num_values: int, max_points: int) -> int:
    """Return how many values become a smallest and a largest one; 1 if all are drawn."""
    size = 1
    while num_values > max_points and -(-num_values // size) > max_points // 2:
        size *= 2
    return size


def first_changed(before: int, now: int, max_points: int) -> int:
    """Return the first index from which on other values are drawn, after some were appended.

    Args:
        before, now: the numbers of values.
    """
    size = bucket_size(now, max_points)
    if before == 0 or size != bucket_size(before, max_points):
        return 0
    return before if size == 1 else (before - 1) // size * size
