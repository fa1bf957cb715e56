"""`lab list`: all runs with their status, progress and last losses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from basics.cli import print_json
from basics.errors import visible

if TYPE_CHECKING:
    from lab.watch.run_state import RunState

HEADS = ["run", "status", "step", "loss", "validation\nloss", "time", "US$"]
NEW = "not launched"


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(runs: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """List all runs, or RUNs: status, progress, last losses, what they have cost.

    It may be run while they train.
    """
    # Imported here so that --help is fast.
    from tabulate import tabulate

    from lab.watch.run_state import RunState, chosen_runs, read_state
    from lab.watch.text import figures

    states = sorted((read_state(runs_dir, name) for name in chosen_runs(runs_dir, runs)),
                    key=lambda state: not state.is_running)
    new = [] if runs else _not_launched(runs_dir, {state.name for state in states})
    if as_json:
        print_json({"schema": "list/1", "runs": [
            asdict(state) for state in (*states, *(RunState(name, NEW) for name in new))]})
        return
    rows = [[state.name, f"{state.status} ({state.reason})" if state.reason else state.status,
             *figures(state)] for state in states]
    rows += [[name, NEW, *["-"] * 5] for name in new]
    click.echo(visible(tabulate(rows, headers=HEADS, disable_numparse=True,
                                colalign=["left", "left", *["right"] * 5])))
    click.echo(visible(_total(states)))


def _total(states: list[RunState]) -> str:
    """Return the sum of what runs have taken and cost."""
    from lab.compare.formats import dollars
    from reporting.summary import duration

    priced = [state.usd for state in states if state.usd is not None]
    rest = len(states) - len(priced)
    return (f"in all: {duration(sum(state.seconds or 0.0 for state in states))}"
            + (f", US${dollars(sum(priced))}" if priced else "")
            + (f" and {rest} of {len(states)} runs without a price" if priced and rest else ""))


def _not_launched(runs_dir: Path, launched: set[str]) -> list[str]:
    """Return the names of the runs that have a config only."""
    from run_config import RUN_NAME

    names = {path.parent.name for path in runs_dir.glob("*/train.json")} - launched
    return sorted(filter(RUN_NAME.fullmatch, names))
