"""Is a difference of losses larger than the noise of the seeds, and how many seeds show it?"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from statistics import NormalDist

from lab.compare.student import t_95

LEVEL, POWER = 0.05, 0.8  # of a two-sided test; of finding a difference that is there


@dataclass(frozen=True)
class Difference:
    """The mean difference of paired losses, variant minus baseline.

    Attributes:
        deviation: sample standard deviation of the differences; None with one pair.
        num_pairs: seeds with which both were trained.
    """

    mean: float
    deviation: float | None
    num_pairs: int

    @classmethod
    def of(cls, differences: list[float]) -> Difference | None:
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
        if self.interval is None:
            return None
        low, high = self.interval
        return low <= 0 <= high


def pooled_deviation(differences: list[Difference]) -> tuple[float, int]:
    """Return the standard deviation of a paired difference over all variants.

    Returns:
        It and its degrees of freedom; 0 and 0 if no variant has two pairs.
    """
    known = [(found.deviation, found.num_pairs - 1) for found in differences
             if found.deviation is not None]
    freedom = sum(free for _, free in known)
    squares = sum(free * deviation**2 for deviation, free in known)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def seeds_needed(difference: float, deviation: float) -> int:
    """Return how many seeds find a difference with 80% power at the 5% level; at least 2.

    n = ((z(1 - level / 2) + z(power)) * deviation / difference)^2 + z(1 - level / 2)^2 / 2

    Args:
        difference: not 0.
        deviation: standard deviation of the paired differences.

    Source: Guenther 1981, The American Statistician 35, 243-244 (paired t-test; the second term
        corrects the normal approximation).
    """
    z_level, z_power = NormalDist().inv_cdf(1 - LEVEL / 2), NormalDist().inv_cdf(POWER)
    ratio = (z_level + z_power) * deviation / difference
    return max(2, math.ceil(ratio**2 + z_level**2 / 2)) if deviation else 2
