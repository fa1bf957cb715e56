"""Packages that only some tests need: without one, these tests are skipped and all others run."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest


class Absent:
    """Stands in for a package that is not installed; a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        pytest.skip(f"needs {self._name}")


class AnyStrategy:
    """Stands in for hypothesis' strategies, which are built when a module is imported."""

    def __getattr__(self, name: str) -> "AnyStrategy":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> "AnyStrategy":
        return self

    def __or__(self, other: Any) -> "AnyStrategy":
        return self


def package(name: str) -> Any:
    """Import a package, or return what stands in for it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return Absent(name)


try:
    from hypothesis import example, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:
    st = AnyStrategy()  # type: ignore[assignment]

    def given(*_: Any, **__: Any) -> Callable:  # type: ignore[no-redef]
        return pytest.mark.skip(reason="needs hypothesis")

    def unchanged(*_: Any, **__: Any) -> Callable:
        return lambda test: test

    example = settings = unchanged  # type: ignore[assignment,misc]
