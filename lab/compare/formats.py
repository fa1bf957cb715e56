"""Texts of the cells and notes of tables."""

from __future__ import annotations

from collections.abc import Iterable

UNKNOWN = "-"


def short_count(value: float) -> str:
    """Format a count of tokens with three digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.0f}"


def dollars(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def escaped(cell: str) -> str:
    """Escape the characters that mean something in a cell of a Markdown table."""
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def markdown_notes(notes: Iterable[str]) -> list[str]:
    """Format notes as lines of a Markdown list."""
    return [f"- {note}".replace("<", "&lt;") for note in notes]
