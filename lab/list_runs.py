"""`lab list`, and its table, which `lab watch --text` shows too. Needs no torch."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import print_error, visible
from basics.text import counted, dollars
from lab.bills import PRICES, prices_of, read_bills
from lab.runs import NEW, RUNNING, RunState, chosen_runs, launched_runs, read_state
from lab.table import UNKNOWN, Column, Table, cell
from reporting.summary import duration
from run_config import RUN_NAME, plain_name

BILL_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # head and format, by key
    "setup_seconds": ("set-up", duration),
    "download_seconds": ("download", duration),
    "search_seconds": ("search", duration),
    "idle_seconds": ("idle", duration),
    "machine_seconds": ("machine", duration),
    "machine_usd": ("US$ of it", dollars),
}
MIN_STATUS = 12  # characters of a line in a narrow terminal


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@PRICES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@RUNS_DIR
def command(runs: tuple[str, ...], prices: tuple[str, ...], as_json: bool, runs_dir: Path) -> None:
    """List all runs, or RUNs: status, progress, last losses, what they have cost.

    It may be run while they train. Beside the time and the dollars of the launches stand those of
    the machine, with set-up, searches and idle time.
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
        names = [plain_name(runs_dir, text) for text in runs]
        new = [name for name in new if name in names]
        others = [name for name in names if name not in new]
        launched = chosen_runs(runs_dir, others) if others else []
    by_run = prices_of(prices, [*launched, *new], runs_dir)  # a search has a price too
    bills = read_bills(runs_dir, by_run)
    states = []
    for name in launched:
        state = read_state(runs_dir, name, bills.get(name))
        if name in by_run and state.seconds is not None:
            state = replace(state, usd=state.seconds / 3600 * by_run[name])
        states.append(state)
    states.sort(key=lambda state: state.status != RUNNING)
    num_unknown = sum(state.bill is None for state in states)
    states += [RunState(name, NEW, bill=bills.get(name)) for name in new]  # of a search
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
    billed = [state.bill for state in states if state.bill]
    if billed:
        total += f"\nmachines: {duration(sum(bill['machine_seconds'] for bill in billed))}"
        known = [bill["machine_usd"] for bill in billed if bill["machine_usd"] is not None]
        if known:
            total += f", US${dollars(sum(known))}"
            if rest := len(billed) - len(known):
                total += f" and {rest} of {len(billed)} bills without a price"
        if num_unknown:
            total += f"; the bills of {counted(num_unknown, 'run')} are not known"
    click.echo(visible(f"{table_of(states).terminal()}\n{total}"))


def table_of(states: Sequence[RunState]) -> Table:
    """Return a table of runs; in a narrow terminal reasons are wrapped and columns hidden."""
    rows = []
    columns = BILL_COLUMNS if any(state.bill for state in states) else {}
    for state in states:
        figures = {"download_seconds": state.download_seconds} | (state.bill or {})
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
                *(cell(figures.get(key), form) for key, (_, form) in columns.items()),
            ]
        )
    return Table(
        [
            Column("run", "left"),
            Column("status", "left", MIN_STATUS),
            *(Column(head, key=head) for head in ("step", "loss", "validation", "time", "US$")),
            *(Column(head, key=head) for head, _ in columns.values()),
        ],
        rows,
        hidden_first=(*[head for head, _ in columns.values()][:-1], "validation", "time", "US$"),
    )
