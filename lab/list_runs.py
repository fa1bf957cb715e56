"""`lab list`: all runs as a table, once or as they train. Needs no torch."""

import os
from pathlib import Path

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import UserError, print_error, visible
from basics.text import counted, dollars
from lab.bills import PRICES, prices_of, read_bills
from lab.run_table import table_of
from lab.runs import NEW, RUNNING, Result, chosen_runs, launched_runs, read_run
from reporting.summary import duration
from run_config import RUN_NAME, plain_name


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@PRICES
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@click.option("--follow", "follows", is_flag=True, help="Draw those that train anew, until Ctrl-C.")
@RUNS_DIR
def command(
    runs: tuple[str, ...], prices: tuple[str, ...], as_json: bool, follows: bool, runs_dir: Path
) -> None:
    """List all runs, or RUNs: status, progress, last losses, what they have cost.

    It may be run while they train. Beside the time and the dollars of the launches stand those of
    the machine, with set-up, searches and idle time.
    """
    if follows:
        from lab.follow import follow
        from lab.watch.answers import Watched

        if prices or as_json:
            raise UserError(
                "--follow shows runs as they train: leave out --usd-per-hour and --json"
            )
        chosen = chosen_runs(runs_dir, runs)
        return follow(Watched(runs_dir, tuple(chosen) if runs else ()))
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
    bills, bill_of_all = read_bills(runs_dir, by_run)
    states = []
    for name in launched:
        state = read_run(runs_dir / name, bills.get(name), whole=False)
        if name in by_run and state.seconds is not None:
            state = state.priced(by_run[name])
        states.append(state)
    states.sort(key=lambda state: state.status != RUNNING)
    num_unknown = sum(state.bill is None for state in states)
    states += [Result(name, NEW, bill=bills.get(name)) for name in new]  # of a search
    if as_json:
        print_json({"schema": "list/2", "runs": [state.state() for state in states]})
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
    if bill_of_all.machine_usd is not None and not runs:
        up = duration(bill_of_all.machine_seconds)
        total += f"\nmachines up: {up}, with set-up and idle time,"
        total += f" US${dollars(bill_of_all.machine_usd)}"
        if num_unknown:
            total += f"; the bills of {counted(num_unknown, 'run')} are not known"
    click.echo(visible(f"{table_of(states).terminal()}\n{total}"))
