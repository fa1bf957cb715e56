"""Critical values of Student's t distribution."""

from __future__ import annotations

# Two-sided, 95%: the 97.5% quantiles for 1, 2, ..., 30 degrees of freedom.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)


def t_95(freedom: int) -> float:
    """Return the half width of a 95% interval, in standard errors.

    Args:
        freedom: degrees of freedom, at least 1. Above 30 the normal distribution's 1.960 with
            the first term of its expansion in 1 / freedom, right to 0.003.

    Source: Student 1908, Biometrika 6; Fisher and Cornish 1960, Technometrics 2 (the expansion).
    """
    return T_95[freedom - 1] if freedom <= len(T_95) else 1.960 + 2.372 / freedom
