"""Is a difference of losses larger than the noise of the seeds."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

# Two-sided, 95%: the 97.5% quantiles for 1, 2, ..., 30 degrees of freedom.
T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


def t_95(freedom: int) -> float:
    """Return the half width of a 95% interval, in standard errors, for 1 degree of freedom or more.

    Above 30 the normal distribution's 1.960 with the first term of its expansion in 1 / freedom,
    right to 0.003.

    Source: Student 1908, Biometrika 6; Fisher and Cornish 1960, Technometrics 2 (the expansion).
    """
    return T_95[freedom - 1] if freedom <= len(T_95) else 1.960 + 2.372 / freedom


@dataclass(frozen=True)
class Difference:
    """The mean difference of paired losses, variant minus baseline."""

    mean: float
    deviation: float | None  # standard deviation of the differences; None with one pair
    num_pairs: int  # seeds with which both were trained

    @classmethod
    def of(cls, differences: list[float]) -> Self | None:
        """Return the mean difference; None if there is none."""
        if not differences:
            return None
        deviation = statistics.stdev(differences) if len(differences) > 1 else None
        return cls(statistics.fmean(differences), deviation, len(differences))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean; None with one pair.

        Source: Student's t-test of paired differences (Student 1908, Biometrika 6).
        """
        if self.deviation is None:
            return None
        half = t_95(self.num_pairs - 1) * self.deviation / math.sqrt(self.num_pairs)
        return self.mean - half, self.mean + half

    @property
    def is_noise(self) -> bool | None:
        """Whether the interval contains 0; None with one pair."""
        return None if self.interval is None else self.interval[0] <= 0 <= self.interval[1]


def pooled_deviation(groups: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """Return the common standard deviation of several groups, and its degrees of freedom.

    A group is its sample standard deviation and number of values, at least 2. Without any: 0, 0.
    """
    known = [(deviation, size - 1) for deviation, size in groups]
    freedom = sum(free for _, free in known)
    squares = sum(free * deviation**2 for deviation, free in known)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)
