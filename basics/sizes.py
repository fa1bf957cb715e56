"""Sizes of memory and files, and as text, in the unit in which they are not nearly 0."""

from __future__ import annotations

SNAPSHOT_BLOCK_BYTES = 2**29  # of pinned memory, of which a snapshot of a state takes whole blocks


def gib(size: float) -> str:
    """Format a number of bytes with three digits, in GiB, MiB or KiB."""
    return _with_unit(size, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")))


def gb(size: float) -> str:
    """Format a number of bytes with three digits, in GB, MB or kB."""
    return _with_unit(size, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def _with_unit(size: float, units: tuple[tuple[float, str], ...]) -> str:
    factor, name = next((unit for unit in units if abs(size) >= unit[0]), units[-1])
    value = abs(size) / factor
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{size / factor:,.{digits}f} {name}"
