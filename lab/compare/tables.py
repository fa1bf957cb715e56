"""A comparison as a table for the terminal, or in Markdown, CSV or HTML."""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

from tabulate import tabulate

from basics.text import escaped
from lab.compare.formats import UNKNOWN, dollars, markdown_notes, short_count
from lab.compare.rows import LOSS_NAMES, Comparison, Row
from lab.compare.to_loss_table import to_loss_table
from lab.compare.tokens_to_loss import TokensToLoss

MIN_WIDTHS = {"run": 20, "differs": 28}  # characters, of the columns whose text can be wrapped
HIDDEN_FIRST = (  # in a terminal that is too narrow
    "model", "machine", "microbatch_size", "usd_per_megatoken_without_validation", "ift_score",
    "steps", "num_gpus", "usd_per_hour",
    "usd_without_validation", "tokens_per_second", "usd_per_megatoken", "train_loss",
    "seconds_without_validation", "tokens", "seconds", "usd", "validation_loss",
    "global_batch_size",
)
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Comparison of runs</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; font-size: 90%; }}
th, td {{ padding: 0.3em 0.7em; border-bottom: 1px solid #ccc; vertical-align: top; }}
img {{ max-width: 100%; display: block; margin: 1em 0; }}
</style>
</head>
<body>
<h1>Comparison of runs</h1>
{table}
{notes}
{to_loss}
{charts}
</body>
</html>
"""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: the column's name in CSV.
        show: formats the cell of a row; None if the value is not known.
    """

    key: str
    head: str
    show: Callable[[Comparison, Row], str | None]
    align: str = "right"


def _figure(key: str, text: Callable[[float], str]) -> Callable[[Comparison, Row], str | None]:
    def show(_: Comparison, row: Row) -> str | None:
        value = getattr(row.figures, key)
        return None if value is None else text(value)
    return show


def _loss(comparison: Comparison, row: Row, key: str) -> str | None:
    """Format a loss with its marks; a published one with no more digits than were published."""
    loss = getattr(row.figures, key)
    if loss is None:
        return None
    text = f"{loss:.4f}" if loss < 1000 else f"{loss:.4g}"
    text = text.removesuffix("0") if row.is_published else text
    is_sorted_by = key == comparison.sorted_by
    return "".join([
        text,
        f" ± {row.spread[key]:.4f} (n={len(row.results)})"
        if is_sorted_by and key in row.spread else "",
        " ≈" if is_sorted_by and row.is_within_spread else "",
        " †" if key == "test_loss" and row.is_of_other_slice else "",
    ])


def _bits(comparison: Comparison, row: Row, key: str) -> str | None:
    """Format bits per byte, if tokenizers differ: else the losses compare the rows as well."""
    bits = getattr(row.figures, key)
    return f"{bits:.4f}" if comparison.mixes_tokenizers and bits is not None else None


def _score(_: Comparison, row: Row) -> str | None:
    """Format the instruction score; with its interval if it is of one run."""
    found = row.figures
    if len(row.results) > 1 or None in (found.ift_score, found.ift_low, found.ift_high):
        return None if found.ift_score is None else f"{found.ift_score:.2f}"
    return f"{found.ift_score:.2f} ({found.ift_low:.2f} to {found.ift_high:.2f})"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


COLUMNS = (
    Column("run", "run", lambda _, row: row.name, "left"),
    Column("differs", "differences", lambda _, row: row.differs or row.first.notes or None,
           "left"),
    Column("model", "model", lambda comparison, row: row.first.size if len(
        {each.first.size for each in comparison.rows}) > 1 else None, "left"),
    Column("global_batch_size", "global\nbatch", _figure("global_batch_size", _whole)),
    Column("microbatch_size", "micro-\nbatch", _figure("microbatch_size", _whole)),
    Column("tokens", "tokens", _figure("tokens", short_count)),
    Column("steps", "steps", _figure("steps", _whole)),
    Column("train_loss", "train\nloss", partial(_loss, key="train_loss"), "left"),
    Column("validation_loss", "val.\nloss", partial(_loss, key="validation_loss"), "left"),
    Column("test_loss", "test\nloss", partial(_loss, key="test_loss"), "left"),
    Column("validation_bits_per_byte", "val. bits\nper byte",
           partial(_bits, key="validation_bits_per_byte")),
    Column("test_bits_per_byte", "test bits\nper byte", partial(_bits, key="test_bits_per_byte")),
    Column("ift_score", "IFT", _score),
    Column("seconds", "seconds", _figure("seconds", _whole)),
    Column("seconds_without_validation", "seconds,\nno val.",
           _figure("seconds_without_validation", _whole)),
    Column("tokens_per_second", "tokens\nper s", _figure("tokens_per_second", _whole)),
    Column("machine", "machine", lambda _, row: row.first.device, "left"),
    Column("num_gpus", "GPUs", _figure("num_gpus", _whole)),
    Column("usd_per_hour", "US$ an\nhour", _figure("usd_per_hour", dollars)),
    Column("usd", "US$", _figure("usd", dollars)),
    Column("usd_without_validation", "US$,\nno val.",
           _figure("usd_without_validation", dollars)),
    Column("usd_per_megatoken", "US$ per\nMtoken", _figure("usd_per_megatoken", "{:.4f}".format)),
    Column("usd_per_megatoken_without_validation", "US$ per\nMtoken,\nno val.",
           _figure("usd_per_megatoken_without_validation", "{:.4f}".format)),
)
CSV_FIGURES = tuple(column.key for column in COLUMNS
                    if column.key not in (*MIN_WIDTHS, "model", "machine"))


@dataclass(frozen=True)
class Cells:
    """Columns of a table and the texts of its cells."""

    columns: list[Column]
    rows: list[list[str]]

    @classmethod
    def of(cls, comparison: Comparison) -> Cells:
        """Format a comparison, without columns in which no value is known."""
        known = [column for column in COLUMNS
                 if any(column.show(comparison, row) for row in comparison.rows)]
        return cls(known, [[column.show(comparison, row) or UNKNOWN for column in known]
                           for row in comparison.rows])

    def without(self, key: str) -> Cells:
        kept = [i for i, column in enumerate(self.columns) if column.key != key]
        return Cells([self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows])

    def widths(self) -> list[int]:
        return [max(map(len, [*column.head.split("\n"), *(row[i] for row in self.rows)]))
                for i, column in enumerate(self.columns)]

    def table(self, form: str) -> str:
        """Format the cells in one of tabulate's formats."""
        heads = [column.head.replace("-\n", "").replace("\n", " ") for column in self.columns]
        return tabulate(self.rows, headers=heads, tablefmt=form, disable_numparse=True,
                        colalign=[column.align for column in self.columns])

    def narrow_table(self, limits: list[int]) -> str:
        """Format the cells in columns of at most these widths, in characters."""
        # The heads are rows: tabulate makes a column two characters wider than its head.
        lines = ["-" * min(*both) for both in zip(self.widths(), limits, strict=True)]
        rows = [["\n".join(wrap(cell, limit, break_on_hyphens=False))
                 for cell, limit in zip(row, limits, strict=True)] for row in self.rows]
        return tabulate([[column.head for column in self.columns], lines, *rows],
                        tablefmt="plain", disable_numparse=True,
                        colalign=[column.align for column in self.columns])


def terminal_table(comparison: Comparison, *, width: int) -> str:
    """Format a comparison and its notes for a terminal of `width` characters."""
    cells, hidden = Cells.of(comparison), []
    candidates = [key for key in HIDDEN_FIRST if key in [c.key for c in cells.columns]]
    while _text_width(cells, width) < sum(MIN_WIDTHS.values()) and candidates:
        hidden.append(candidates.pop(0))
        cells = cells.without(hidden[-1])
    notes = list(comparison.notes)
    if hidden:
        notes.append(f"hidden columns: {', '.join(hidden)}; use --csv or a wider terminal")
    table = cells.narrow_table(_limits(cells, _text_width(cells, width)))
    return "\n".join([table, "", *notes])


def _text_width(cells: Cells, width: int) -> int:
    """Return the characters that are left for the columns whose text can be wrapped."""
    others = sum(width for width, column in zip(cells.widths(), cells.columns, strict=True)
                 if column.key not in MIN_WIDTHS)
    return width - others - 2 * (len(cells.columns) - 1)


def _limits(cells: Cells, text_width: int) -> list[int]:
    """Return the largest width of each column; names get half of the text, or what is left over."""
    widths = dict(zip([column.key for column in cells.columns], cells.widths(), strict=True))
    names = min(widths["run"], max(text_width // 2, text_width - widths.get("differs", 0)))
    names = max(MIN_WIDTHS["run"], min(names, text_width - MIN_WIDTHS["differs"]))
    widths |= {"run": names, "differs": max(MIN_WIDTHS["differs"], text_width - names)}
    return [widths[column.key] for column in cells.columns]


def markdown_table(comparison: Comparison) -> str:
    """Format a comparison in Markdown; special characters in cells are escaped."""
    cells = Cells.of(comparison)
    rows = [list(map(escaped, row)) for row in cells.rows]
    return "\n".join([Cells(cells.columns, rows).table("github"), "",
                      *markdown_notes(comparison.notes)])


def csv_table(comparison: Comparison, to_loss: TokensToLoss | None = None) -> str:
    """Format a comparison as CSV: numbers with all digits, always the same columns.

    Args:
        to_loss: fills its columns if it has one reference.
    """
    text = io.StringIO()
    rows = [values_of(comparison, row, to_loss) for row in comparison.rows]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _plain(value) for key, value in row.items()})
    return text.getvalue()


def comparison_document(comparison: Comparison, to_loss: TokensToLoss | None) -> dict[str, Any]:
    """Return a comparison as a JSON document: the columns of CSV; None for what is not known."""
    return {"schema": "compare/1",
            "rows": [values_of(comparison, row, to_loss) for row in comparison.rows],
            "notes": comparison.notes}


def values_of(comparison: Comparison, row: Row, to_loss: TokensToLoss | None) -> dict[str, Any]:
    """Return the columns of CSV of one row."""
    has_reference = to_loss is not None and len(to_loss.references) == 1 and row in to_loss.rows
    reached = to_loss.cells[to_loss.rows.index(row)][0] if has_reference else None
    return {
        "run": ", ".join(result.name for result in row.results), "status": row.first.status,
        "differs": row.differs or row.first.notes, "model": row.first.size,
        "num_seeds": len(row.results),
        **{key: getattr(row.figures, key) for key in CSV_FIGURES},
        **{key: getattr(row.figures, key) for key in ("ift_low", "ift_high")},
        "ift_judge": row.first.judge, "machine": row.first.device,
        **{key.replace("loss", "loss_spread"): row.spread.get(key) for key in LOSS_NAMES},
        "sorted_by": comparison.sorted_by, "is_within_spread": row.is_within_spread,
        "test_slice": row.first.test_slice,
        "tokens_to_loss": reached and reached.tokens, "usd_to_loss": reached and reached.usd,
    }


def _plain(value: str | bool | float | None) -> str:
    """Format a value, a whole number without an exponent; empty if it is not known.

    A spreadsheet would run text that begins like a formula: it gets an apostrophe.
    """
    if value is None or isinstance(value, str):
        return f"'{value}" if value and value[0] in "=+-@" else value or ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if value == int(value) else repr(value)


def html_page(comparison: Comparison, charts: list[Path],
              to_loss: TokensToLoss | None = None) -> str:
    """Format a comparison as one HTML page, with the charts embedded."""
    notes = "\n".join(f"<p>{html.escape(note)}</p>" for note in comparison.notes)
    images = [f'<img alt="{path.stem}" src="data:image/png;base64,'
              f'{base64.b64encode(path.read_bytes()).decode()}">' for path in charts]
    return PAGE.format(table=Cells.of(comparison).table("html"), notes=notes,
                       to_loss=to_loss_table(to_loss, "html"), charts="\n".join(images))
