from __future__ import annotations

import math

import numpy as np
import pytest

from basics.curve_fits import fit_line, fit_log_quadratic


def test_a_line_is_recovered() -> None:
    line = fit_line([1, 4, 9], [2.5, 4.0, 6.5])
    assert (line.intercept, line.slope) == pytest.approx((2.0, 0.5))
    assert line.at(100) == pytest.approx(52)
    assert line.largest_x(52) == pytest.approx(100)


def test_noisy_points_give_the_least_squares_line() -> None:
    line = fit_line([0, 0, 2, 2], [0.9, 1.1, 4.9, 5.1])
    assert (line.intercept, line.slope) == pytest.approx((1.0, 2.0))


def test_a_line_that_does_not_rise_has_an_infinite_largest_x() -> None:
    assert fit_line([1, 2], [3, 3]).largest_x(10) == math.inf


def test_a_parabola_in_the_logarithm_is_recovered_with_its_minimum() -> None:
    x = [2.0**n for n in range(3, 12)]
    y = [3.5 + 0.02 * math.log(size / 100) ** 2 for size in x]
    curve = fit_log_quadratic(x, y)
    assert curve.quadratic == pytest.approx(0.02)
    assert curve.minimum() == pytest.approx((100, 3.5))
    np.testing.assert_allclose([curve.at(size) for size in x], y)


def test_a_parabola_that_opens_downwards_has_no_minimum() -> None:
    assert fit_log_quadratic([1, 10, 100], [1.0, 2.0, 1.0]).minimum() is None


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="two different x"):
        fit_line([3, 3], [1, 2])
    with pytest.raises(ValueError, match="three different positive x"):
        fit_log_quadratic([1, 2, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="three different positive x"):
        fit_log_quadratic([0, 1, 2], [1, 2, 3])
