"""One table of the lab: for a terminal, or in Markdown."""

import io
import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from basics.errors import visible
from basics.text import escaped

UNKNOWN = "-"
WIDTH_WITHOUT_TERMINAL = 160  # characters
TEXT_WIDTH = 120  # characters of a line of text, in a wider terminal
GAP = 2  # characters between two columns
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    ", ascii=True)  # a line below the heads


@dataclass(frozen=True)
class Column:
    """A column. Those of a table whose text may be wrapped have the same `min_width`."""

    head: str  # of one or several lines
    align: Literal["left", "right"] = "right"
    min_width: int = 0  # to which a terminal may wrap its text; 0: figures, which stay on one line
    key: str = ""  # its name where it is hidden, if that is not its head

    @property
    def whole_head(self) -> str:
        return self.head.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """Columns, the texts of their cells, and notes below."""

    columns: list[Column]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    hidden_first: tuple[str, ...] = ()  # column keys, in the order in which they are left out

    def terminal(self, width: int = 0) -> str:
        """Format the table for so many characters or the terminal; wider if its least width is."""
        width = width or terminal_width()
        rows = [[visible(cell) for cell in row] for row in self.rows]
        least = {}  # widths by place
        for place, column in enumerate(self.columns):
            cells = [*column.head.split("\n"), *(row[place] for row in rows)]
            whole = max(map(cell_len, cells))
            longest_word = max(cell_len(word) for cell in cells for word in cell.split() or [""])
            least[place] = max(longest_word, min(whole, column.min_width or whole))

        def least_width() -> int:
            return sum(least.values()) + GAP * (len(least) - 1)

        keys = [column.key or column.whole_head for column in self.columns]
        hidden = []
        for key in self.hidden_first:
            if least_width() > width and key in keys:
                place = keys.index(key)
                del least[place]
                hidden.append(self.columns[place].whole_head)
        grid = Grid(box=RULED, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for place, min_width in least.items():
            column = self.columns[place]
            grid.add_column(
                Text(column.head),
                justify=column.align,
                vertical="top",
                no_wrap=not column.min_width,
                min_width=min_width,
                overflow="fold",
            )
        for row in rows:
            grid.add_row(*(Text(row[place]) for place in least))
        output = io.StringIO()
        console = Console(file=output, color_system=None, height=1, width=max(width, least_width()))
        console.print(grid)
        lines = [line.rstrip() for line in output.getvalue().splitlines()]
        notes = list(self.notes)
        if hidden:
            names = ", ".join(f'"{name}"' for name in hidden)
            notes.append(f"hidden columns: {names}; a wider terminal shows them")
        if notes:
            lines += ["", *wrapped(notes, width)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Format the table in Markdown; special characters in cells are escaped."""
        heads = [column.whole_head for column in self.columns]
        marks = [":---" if column.align == "left" else "---:" for column in self.columns]
        cells = [[escaped(cell) for cell in row] for row in self.rows]
        lines = [f"| {' | '.join(line)} |" for line in (heads, marks, *cells)]
        if self.notes:
            lines += ["", *(f"- {escaped(note)}" for note in self.notes)]
        return "\n".join(lines)


def terminal_width() -> int:
    return shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns


def wrapped(texts: Iterable[str], width: int) -> list[str]:
    """Break lines of text for a terminal; what goes on is indented."""
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            text, min(width, TEXT_WIDTH), subsequent_indent="    ", break_on_hyphens=False
        )
        or [""]
    ]


def cell(value: float | None, form: Callable[[float], str]) -> str:
    """Format a figure; UNKNOWN if it is None."""
    return UNKNOWN if value is None else form(value)
