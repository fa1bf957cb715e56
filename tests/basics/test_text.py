"""Sizes as text: small ones are not shown as 0."""

from __future__ import annotations

import pytest

from basics.text import gb, gib


@pytest.mark.parametrize(("size", "text"), [
    (0, "0.00 KiB"), (1536, "1.50 KiB"), (0.00999 * 2**30, "10.2 MiB"), (1023 * 2**20, "1,023 MiB"),
    (2**30, "1.00 GiB"), (31.25 * 2**30, "31.2 GiB"), (4096 * 2**30, "4,096 GiB"),
    (-50 * 2**20, "-50.0 MiB"),
])
def test_binary_sizes_have_three_digits(size: float, text: str) -> None:
    assert gib(size) == text


@pytest.mark.parametrize(("size", "text"), [
    (48_000, "48.0 kB"), (2_240_000, "2.24 MB"), (999.7e6, "1,000 MB"), (1.956e9, "1.96 GB"),
    (9.996e9, "10.0 GB"), (97.8e9, "97.8 GB"), (1.5e12, "1,500 GB"),
])
def test_decimal_sizes_have_three_digits(size: float, text: str) -> None:
    assert gb(size) == text
