"""Bits per byte: they compare runs with different tokenizers, whose losses per token do not."""

from __future__ import annotations

from collections.abc import Callable

from lab.compare.row import BITS_PER_BYTE, LOSS_NAMES, Row

DIFFERENT_TOKENS = 1.1  # ratio of bytes per token, for runs that do not name their tokenizer


def bits_order(kind: str) -> Callable[[Row], tuple]:
    """Return a sort key: the bits per byte of this loss; rows without them come last."""
    def key(row: Row) -> tuple:
        bits = getattr(row.figures, BITS_PER_BYTE[kind])
        return bits is None, bits or 0.0
    return key


def tokens_note(rows: list[Row], kind: str) -> str:
    """Say how rows with different tokenizers are sorted; empty if their losses can be compared."""
    rows_with_bits = [row for row in rows if kind in BITS_PER_BYTE
                      and row.bytes_per_token(kind) is not None]
    if not rows_with_bits or not _tokenizers_differ(rows, rows_with_bits, kind):
        return ""
    lengths = [row.bytes_per_token(kind) for row in rows_with_bits]
    missing = len(rows) - len(rows_with_bits)
    last = f"; rows without them come last ({missing})" if missing else ""
    text = ("" if _are_of_same_text(rows_with_bits, kind) else
            "; the bits are not of the same text: measure the runs together with lab evaluate")
    return (f"sorted by bits per byte of the {LOSS_NAMES[kind]}, best first{last}: tokenizers"
            f" differ ({min(lengths):.2f} to {max(lengths):.2f} bytes per token), so losses (nats"
            f" per token) do not compare{text}")


def _tokenizers_differ(rows: list[Row], rows_with_bits: list[Row], kind: str) -> bool:
    """Compare the names of the tokenizers; of runs without one, the mean lengths of tokens."""
    names = {row.first.tokenizer for row in rows if getattr(row.figures, kind) is not None}
    if len(names - {None}) > 1:
        return True
    lengths = [row.bytes_per_token(kind) for row in rows_with_bits]
    return (any(row.first.tokenizer is None for row in rows_with_bits)
            and max(lengths) >= DIFFERENT_TOKENS * min(lengths))


def _are_of_same_text(rows: list[Row], kind: str) -> bool:
    """Return whether bits of different tokens are known to be of the same text."""
    texts = {row.first.texts.get(row.first.test_slice) for row in rows}
    return kind == "test_loss" and len(texts) == 1 and None not in texts
