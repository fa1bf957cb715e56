"""`lab list`, and its table, which `lab watch --text` shows too. Needs no torch."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import print_error, visible
from basics.text import dollars
from lab.runs import NEW, RUNNING, RunState, chosen_runs, launched_runs, read_state
from lab.table import UNKNOWN, Column, Table, cell
from reporting.summary import duration
from run_config import RUN_NAME

MIN_STATUS = 12  # characters of a line in a narrow terminal


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@RUNS_DIR
def command(runs: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """List all runs, or RUNs: status, progress, last losses, what they have cost.

    It may be run while they train.
    """
    launched = launched_runs(runs_dir)
    for path in [] if runs else sorted(runs_dir.iterdir()):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
            print_error(f"warning: {path}: cannot be read (no permission): left out")
    new = sorted(
        path.parent.name
        for path in runs_dir.glob("*/train.json")
        if path.parent.name not in launched and RUN_NAME.fullmatch(path.parent.name)
    )
    if runs:
        new = [name for name in new if name in runs]
        others = [name for name in runs if name not in new]
        launched = chosen_runs(runs_dir, others) if others else []
    states = [read_state(runs_dir, name) for name in launched]
    states.sort(key=lambda state: state.status != RUNNING)
    states += [RunState(name, NEW) for name in new]
    if as_json:
        print_json({"schema": "list/1", "runs": [asdict(state) for state in states]})
        return
    if not states:
        click.echo(
            visible(
                f"no run in {runs_dir}: a run is a directory there with model.json and"
                " train.json; ddp_train.py demo trains the one that comes with the"
                " project"
            )
        )
        return
    priced = [state.usd for state in states if state.usd is not None]
    total = f"in all: {duration(sum(state.seconds or 0.0 for state in states))}"
    if priced:
        total += f", US${dollars(sum(priced))}"
        if rest := len(launched) - len(priced):
            total += f" and {rest} of {len(launched)} runs without a price"
    click.echo(visible(f"{table_of(states).terminal()}\n{total}"))


def table_of(states: Sequence[RunState]) -> Table:
    """Return a table of runs; in a narrow terminal reasons are wrapped and columns hidden."""
    rows = []
    for state in states:
        step = UNKNOWN if state.global_step is None else f"{state.global_step + 1:,}"
        rows.append(
            [
                state.name,
                f"{state.status} ({state.reason})" if state.reason else state.status,
                f"{step}/{state.num_steps:,}" if state.num_steps else step,
                cell(state.train_loss, "{:.4f}".format),
                cell(state.validation_loss, "{:.4f}".format),
                cell(state.seconds, duration),
                cell(state.usd, dollars),
            ]
        )
    return Table(
        [
            Column("run", "left"),
            Column("status", "left", MIN_STATUS),
            *(Column(head, key=head) for head in ("step", "loss", "validation", "time", "US$")),
        ],
        rows,
        hidden_first=("validation", "time", "US$"),
    )
