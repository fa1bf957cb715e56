"""Parameters of tests that run only with --thorough."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thorough_but(kept: Collection[object], cases: Iterable[object]) -> list[Any]:
    """Return all cases as parameters; those that are not kept run only with --thorough."""
    return [case if case in kept else pytest.param(
        *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
        for case in cases]
