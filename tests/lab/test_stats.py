import math

import pytest

from lab.stats import Difference, pooled_deviation, seeds_needed, t_95


def test_interval_of_paired_differences():
    """Student's sleep data, in R: t.test(extra ~ group, paired = TRUE): -2.4598858 -0.7001142."""
    found = Difference.of([-1.2, -2.4, -1.3, -1.3, 0.0, -1.0, -1.8, -0.8, -4.6, -1.4])
    assert found.mean == pytest.approx(-1.58)
    assert found.interval == pytest.approx((-2.4598858, -0.7001142), abs=1e-3)
    assert found.is_noise is False


def test_an_interval_around_zero_is_noise():
    assert Difference.of([0.1, -0.12]).is_noise is True
    assert Difference.of([-0.1, -0.11]).is_noise is False
    assert Difference.of([0.1, 0.101]).is_noise is False


def test_one_pair_has_no_interval_and_none_no_difference():
    found = Difference.of([-0.1])
    assert found.interval is None and found.is_noise is None and found.deviation is None
    assert Difference.of([]) is None
    assert pooled_deviation([]) == (0.0, 0)


def test_deviations_are_pooled_by_degrees_of_freedom():
    assert pooled_deviation([(1.0, 2), (2.0, 4)]) == pytest.approx((math.sqrt((1 + 3 * 4) / 4), 4))


@pytest.mark.parametrize(("size", "num_seeds"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_are_those_of_the_exact_paired_test(size, num_seeds):
    """The published numbers for 80% power at the 5% level (noncentral t), by effect size."""
    assert seeds_needed(size, 1.0) == seeds_needed(-2 * size, 2.0) == num_seeds


def test_at_least_two_seeds_are_needed():
    assert seeds_needed(100.0, 1.0) == seeds_needed(0.1, 0.0) == 2


@pytest.mark.parametrize(("freedom", "quantile"), [
    (1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (31, 2.040), (60, 2.000), (120, 1.980)])
def test_critical_values_of_student(freedom, quantile):
    assert t_95(freedom) == pytest.approx(quantile, abs=0.004)
