"""Texts of the cells and notes of tables."""

from __future__ import annotations

from collections.abc import Iterable

from basics.text import escaped

UNKNOWN = "-"


def short_count(value: float) -> str:
    """Format a count of tokens with three digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.0f}"


def dollars(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def markdown_notes(notes: Iterable[str]) -> list[str]:
    """Format notes as lines of a Markdown list."""
    return [f"- {escaped(note)}" for note in notes]
