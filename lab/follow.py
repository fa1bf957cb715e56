"""`lab list --follow`: runs in a terminal, drawn anew while they train."""

import sys
import time
from contextlib import suppress
from dataclasses import fields

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lab.run_table import table_of
from lab.runs import RUNNING, Result, chosen_runs, read_run
from lab.watch.answers import Watched
from reporting.terminal import Shown, label_of

SECONDS_BETWEEN = 2.0


def follow(watched: Watched) -> None:
    """Show runs until Ctrl-C; once, if standard output is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.print(screen(watched, console.width))
        sys.stdout.flush()
        return
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        while True:
            live.update(screen(watched, console.width), refresh=True)
            time.sleep(SECONDS_BETWEEN)


def screen(watched: Watched, width: int) -> RenderableType:
    """Return a panel for each run that trains or is named, and a table of the rest."""
    names = chosen_runs(watched.runs_dir, watched.names)
    states = [read_run(watched.runs_dir / name, whole=False) for name in names]
    states.sort(key=lambda state: state.status != RUNNING)
    panels = [state for state in states if state.status == RUNNING or watched.names]
    parts: list[RenderableType] = [shown(watched, state).panel(width) for state in panels]
    if rest := states[len(panels) :]:
        parts.append(Text(table_of(rest).terminal(width), no_wrap=True, overflow="crop"))
    if not states:
        parts.append(Text("no run has been launched yet"))
    return Group(*parts)


def shown(watched: Watched, state: Result) -> Shown:
    """Return what is shown of a run: figures of the same names, and the lines of its losses."""
    losses = {}
    for key, line in watched.run(state.name)["lines"].items():
        values = [value for value in line["y"] if value is not None]
        if (label := label_of(key)) and values:
            values[-1] = state.value(key) or values[-1]  # the last one, not a mean of several
            losses[label] = values
    compared = state.validation_compared or state.train_compared
    status = f"{state.status} in {state.phase}" if state.phase else state.status
    figures = {one.name: state.value(one.name) for one in fields(Shown) if one.name != "samples"}
    return Shown(
        **figures
        | {
            "status": f"{status} ({state.reason})" if state.reason else status,
            "losses": losses,
            "compared": f"{compared}  ({state.reference})" if compared else "",
            "samples": watched.samples(state.name),
        }
    )
