"""`lab list`: all runs with their status, progress and last losses."""

from dataclasses import asdict
from pathlib import Path

import click

from basics.cli import print_json
from basics.errors import visible

MIN_STATUS = 24  # characters of a line in a narrow terminal


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
    from basics.text import dollars
    from lab.runs import NEW, chosen_runs, new_runs
    from lab.table import Column, Table, terminal_width
    from lab.watch.run_state import RunState, read_state
    from lab.watch.text import HEADS, figures
    from reporting.summary import duration

    new = [name for name in new_runs(runs_dir) if name in runs or not runs]
    launched = [] if runs and set(runs) <= set(new) else chosen_runs(
        runs_dir, [name for name in runs if name not in new])
    states = sorted((read_state(runs_dir, name) for name in launched),
                    key=lambda state: not state.is_running)
    states += [RunState(name, NEW) for name in new]
    if as_json:
        print_json({"schema": "list/1", "runs": [asdict(state) for state in states]})
        return
    table = Table(
        [Column("run", "left"), Column("status", "left", MIN_STATUS), *map(Column, HEADS[1:])],
        [[state.name, f"{state.status} ({state.reason})" if state.reason else state.status,
          *figures(state)] for state in states])
    click.echo(visible(table.terminal(terminal_width())))
    priced = [state.usd for state in states if state.usd is not None]
    total = f"in all: {duration(sum(state.seconds or 0.0 for state in states))}"
    if priced:
        total += f", US${dollars(sum(priced))}"
    if priced and (rest := len(launched) - len(priced)):
        total += f" and {rest} of {len(launched)} runs without a price"
    click.echo(visible(total))
