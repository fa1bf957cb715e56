"""Types of command-line options."""

from __future__ import annotations

import math
from typing import Any

import click

MAX_USD_PER_HOUR = 1e6


class FiniteRange(click.FloatRange):
    """A finite number in a range; click alone accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


ABOVE_0 = FiniteRange(min=0, min_open=True)
USD_PER_HOUR = FiniteRange(min=0, max=MAX_USD_PER_HOUR, min_open=True)
