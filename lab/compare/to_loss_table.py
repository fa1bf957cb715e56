"""The table of tokens to a loss: for the terminal, in Markdown or HTML."""

from __future__ import annotations

from textwrap import wrap

from tabulate import tabulate

from basics.text import escaped
from lab.compare.formats import UNKNOWN, dollars, short_count
from lab.compare.tokens_to_loss import TokensToLoss

TITLE = "tokens to the final validation loss of"
BETWEEN_COLUMNS = 4  # characters: two spaces, and tabulate makes a column 2 wider than its head
MIN_WIDTH = 10  # characters, of a column


def to_loss_table(found: TokensToLoss | None, form: str, *, width: int | None = None) -> str:
    """Format the tokens to a loss in one of tabulate's formats; empty if there are none.

    Args:
        width: of the terminal, in characters, into which the cells are wrapped.
    """
    if found is None:
        return ""
    heads = [TITLE, *(f"{row.short_name} ({row.figures.validation_loss:.4f})"
                      for row in found.references)]
    lines = [heads, *([row.name, *(_reached(found, i, j) for j in range(len(found.references)))]
                      for i, row in enumerate(found.rows))]
    if form == "github":
        lines = [list(map(escaped, line)) for line in lines]
    if width is not None:
        limit = max(MIN_WIDTH, width // len(heads) - BETWEEN_COLUMNS)
        lines = [["\n".join(wrap(cell, limit, break_on_hyphens=False)) for cell in line]
                 for line in lines]
    return tabulate(lines[1:], headers=lines[0], tablefmt=form, disable_numparse=True,
                    colalign=["left", *["right"] * len(found.references)])


def _reached(found: TokensToLoss, row: int, reference: int) -> str:
    cell = found.cells[row][reference]
    if cell is None:
        return UNKNOWN
    share = found.share(row, reference)
    parts = [short_count(cell.tokens), *([] if share is None else [f"{share:.0%}"]),
             *([] if cell.usd is None else [f"${dollars(cell.usd)}"])]
    return ", ".join(parts)
