"""The table of runs that `lab list` prints, and `--follow` below its panels. Needs no torch."""

from collections.abc import Sequence

from lab.columns import hidden_first, shown_in
from lab.runs import Result
from lab.table import UNKNOWN, Column, Table, cell

MIN_STATUS = 12  # characters of a line in a narrow terminal


def table_of(states: Sequence[Result]) -> Table:
    """Return a table of runs; in a narrow terminal reasons are wrapped and columns hidden."""
    known = {
        one.key
        for one in shown_in("list")
        if any(state.value(one.key) is not None for state in states)
    }
    if "machine_usd" not in known:  # how long a machine is up matters to whoever pays for it
        known.discard("machine_seconds")
    figures = [one for one in shown_in("list") if one.key in known]
    rows = []
    for state in states:
        step = UNKNOWN if state.steps is None else f"{state.steps:,}"
        rows.append(
            [
                state.name,
                f"{state.status} ({state.reason})" if state.reason else state.status,
                f"{step}/{state.num_steps:,}" if state.num_steps else step,
                *(cell(state.value(one.key), one.text) for one in figures),
            ]
        )
    return Table(
        [
            Column("run", "left"),
            Column("status", "left", MIN_STATUS),
            Column("step"),
            *(one.column for one in figures),
        ],
        rows,
        hidden_first=tuple(hidden_first(figures)),
    )
