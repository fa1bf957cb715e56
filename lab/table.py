"""One table of the lab: for a terminal, in Markdown or in HTML; texts of its cells."""

from __future__ import annotations

import html
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from textwrap import wrap

from basics.errors import visible
from basics.text import escaped

UNKNOWN = "-"
WIDTH_WITHOUT_TERMINAL = 160  # characters


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        head: of one or several lines.
        min_width: characters to which its text can be wrapped in a terminal; 0 for a column of
            figures, whose cells stay on one line.
    """

    key: str
    head: str
    align: str = "right"
    min_width: int = 0

    @property
    def whole_head(self) -> str:
        return self.head.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """Columns, the texts of their cells, and notes below.

    Attributes:
        hidden_first: keys of columns, in the order in which a narrow terminal leaves them out.
    """

    columns: list[Column]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    hidden_first: tuple[str, ...] = ()

    def terminal(self, width: int) -> str:
        """Format the table for a terminal of `width` characters."""
        table, hidden = self, []
        for key in self.hidden_first:
            if table._min_width() <= width:
                break
            if key in [column.key for column in table.columns]:
                table = table._without(key)
                hidden.append(key)
        notes = list(self.notes)
        if hidden:
            notes.append(f"hidden columns: {', '.join(hidden)}; use --csv or a wider terminal")
        return "\n".join([*table._lines(width), *(["", *notes] if notes else [])])

    def _lines(self, width: int) -> Iterator[str]:
        """Return the lines; longer ones if even the least widths are too much."""
        widths = [self._least(column) for column in self.columns]
        rest = max(0, width - self._min_width())
        text = sorted((place for place, column in enumerate(self.columns) if column.min_width),
                      key=lambda place: self._whole(self.columns[place]) - widths[place])
        for count, place in zip(range(len(text), 0, -1), text, strict=True):
            more = min(self._whole(self.columns[place]) - widths[place], rest // count)
            widths[place], rest = widths[place] + more, rest - more
        heads = [column.head.split("\n") for column in self.columns]
        for cells in (heads, [["-" * size] for size in widths], *(
                [wrap(visible(cell), size, break_on_hyphens=False)
                 for cell, size in zip(row, widths, strict=True)] for row in self.rows)):
            for line in zip_longest(*cells, fillvalue=""):
                yield "  ".join(
                    part.ljust(size) if column.align == "left" else part.rjust(size)
                    for part, size, column in zip(line, widths, self.columns, strict=True)).rstrip()

    def _whole(self, column: Column) -> int:
        """Return the characters of a column's longest cell or line of its head."""
        place = self.columns.index(column)
        return max(len(text) for text in [*column.head.split("\n"),
                                          *(visible(row[place]) for row in self.rows)])

    def _least(self, column: Column) -> int:
        whole = self._whole(column)
        return min(whole, column.min_width or whole)

    def _min_width(self) -> int:
        return sum(map(self._least, self.columns)) + 2 * (len(self.columns) - 1)

    def _without(self, key: str) -> Table:
        kept = [place for place, column in enumerate(self.columns) if column.key != key]
        return replace(self, columns=[self.columns[place] for place in kept],
                       rows=[[row[place] for place in kept] for row in self.rows])

    def markdown(self) -> str:
        """Format the table in Markdown; special characters in cells are escaped."""
        marks = [":---" if column.align == "left" else "---:" for column in self.columns]
        lines = [[column.whole_head for column in self.columns], marks,
                 *([escaped(cell) for cell in row] for row in self.rows)]
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines),
                          *(["", *(f"- {escaped(note)}" for note in self.notes)]
                            if self.notes else [])])

    def html(self) -> str:
        """Format the table in HTML; a table that is too wide for its window can be scrolled."""
        def line(tag: str, cells: list[str]) -> str:
            return "<tr>" + "".join(
                f'<{tag} class="{column.align}">{html.escape(visible(cell))}</{tag}>'
                for column, cell in zip(self.columns, cells, strict=True)) + "</tr>"

        return "\n".join([
            '<div class="table"><table>', line("th", [c.whole_head for c in self.columns]),
            *(line("td", row) for row in self.rows), "</table></div>",
            *(f"<p>{html.escape(visible(note))}</p>" for note in self.notes)])


def terminal_width() -> int:
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns


def short_count(value: float) -> str:
    """Format a count of tokens with three digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.0f}"


def dollars(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"
