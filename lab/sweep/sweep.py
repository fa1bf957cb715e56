"""`lab sweep`: train changes to a run, one after the other or several at once, and compare them."""

import sys
from pathlib import Path
from typing import Any

import click

from basics.cli import ABOVE_0, DATASETS_DIR, RUNS_DIR, USD_PER_HOUR, print_json, stdout_to_stderr
from basics.errors import UserError, print_error, print_line, visible, writing_to
from basics.files import write_atomically
from basics.json_files import to_json

MAX_PARALLEL = 4096


def _parallel(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not (value.isdecimal() and 1 <= int(value) <= MAX_PARALLEL):
        raise click.BadParameter(f"{value[:60]!r} is neither auto nor a number above 0.")
    return int(value)


@click.command()
@click.argument("base")
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="KEY=VALUE[,KEY=VALUE...]",
    help="One variant: keys of model.json or train.json. null takes a key out.",
)
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="KEY=VALUE,VALUE...",
    help="One variant for each value of a key.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Train each variant with N seeds: the base's random_seed and the next ones.",
)
@click.option(
    "--stack",
    is_flag=True,
    help="Then train all changes together that were better than the baseline.",
)
@click.option("--name", help="Directory in --sweeps-dir.  [default: BASE]")
@click.option(
    "--budget-hours",
    type=ABOVE_0,
    metavar="HOURS",
    help="Stop when all runs of the sweep together have taken so long.",
)
@click.option(
    "--budget-usd",
    type=ABOVE_0,
    metavar="USD",
    help="Stop when all runs of the sweep together have cost so much.",
)
@click.option(
    "--usd-per-hour",
    type=USD_PER_HOUR,
    metavar="USD",
    help="Price of the machine; overrides usd_per_hour of the runs.",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes of each run.  [default: one per GPU; with --parallel 1]",
)
@click.option(
    "--parallel",
    metavar="N|auto",
    callback=_parallel,
    help="Train N runs at once, each on GPUs or CPU cores of its own; auto: as many as there is"
    " room for.",
)
@click.option(
    "--prune",
    is_flag=True,
    help="Train the baseline first, and end runs that are behind its curve outside the noise.",
)
@RUNS_DIR
@click.option(
    "--sweeps-dir", type=click.Path(path_type=Path), default=Path("sweeps"), show_default=True
)
@DATASETS_DIR
@click.option("--charts", is_flag=True, help="Draw charts into the directory of the sweep.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document on standard output, and all else on standard error.",
)
def command(base: str, changes: tuple[str, ...], ranges: tuple[str, ...], **options: Any) -> None:
    """Train BASE and changes to it, and compare them in one table.

    The same command goes on where it was stopped; other changes are added to the sweep. Given on
    several machines that share --sweeps-dir, it shares the runs.
    """
    # Imported here so that --help is fast.
    from lab.sweep.definition import open_sweep, parse_change, parse_range
    from lab.sweep.execution import Execution
    from lab.sweep.progress import showing
    from lab.sweep.report import add_stack, document_of, draw_sweep, entries_of, table_of
    from lab.sweep.shares import share_machine
    from run_config import RUN_NAME, load_run

    wanted = [parse_change(text) for text in changes]
    for text in ranges:
        wanted += parse_range(text)
    loaded = load_run(options["runs_dir"], base)
    name, sweeps_dir = options["name"] or loaded.name, options["sweeps_dir"]
    if not RUN_NAME.fullmatch(name):
        raise UserError(
            f"--name {name[:60]!r} is not a plain name; wanted a directory inside"
            f" {sweeps_dir}, of letters, digits, '.', '_' and '-', at most 128"
        )
    price = options["usd_per_hour"] or loaded.config.usd_per_hour
    if options["budget_usd"] is not None and price is None:
        raise UserError(
            "--budget-usd needs the machine's price: pass --usd-per-hour, or set"
            " usd_per_hour in BASE's train.json"
        )
    with stdout_to_stderr(options["as_json"]):
        sweep = open_sweep(loaded, sweeps_dir / name, wanted, options["seeds"], price)
        execution = Execution(
            options["datasets_dir"],
            options["nproc_per_node"],
            price,
            options["budget_hours"],
            options["budget_usd"],
            options["prune"],
        )
        if options["parallel"] is not None or sweep.processes is not None:
            execution.nproc_per_node, execution.shares = share_machine(
                sweep, options["parallel"] or 1, options["nproc_per_node"]
            )
        with execution.handling_signals(), showing(sweep, execution) as refresh:
            execution.train(sweep, refresh)
            if options["stack"] and not execution.stop_reason:
                print_line(add_stack(sweep, entries_of(sweep, execution.outcomes)))
                execution.train(sweep, refresh)
        try:
            sweep.update()  # other commands may have added to it, and trained other runs
        except UserError as error:  # a file was edited since: what was trained is still shown
            print_error(f"warning: {error}")
        outcomes = execution.outcomes_of(sweep)
        entries = entries_of(sweep, outcomes)
        table, path = table_of(sweep, entries), sweep.sweep_dir / "table.md"
        document = document_of(sweep, entries, execution.stop_reason)
        json_path = path.with_suffix(".json")
        click.echo(visible(f"\n{table.terminal()}"))  # whatever fails below, it is seen
        with sweep.locked(), writing_to(sweep.sweep_dir):
            drawn = draw_sweep(sweep, entries) if options["charts"] else []
            lines = [table.markdown()]
            if drawn:
                lines += ["", *(f"![{chart.stem}]({chart.name})" for chart in drawn)]
            write_atomically(path, "\n".join([*lines, ""]))
            write_atomically(json_path, to_json(document, indent=4) + "\n")
        for file in (path, json_path, *drawn):
            click.echo(visible(f"written: {file}"), err=True)
        if execution.stop_reason:
            click.echo(
                visible(
                    f"sweep stopped: {execution.stop_reason}; the same command, or"
                    " one with a larger budget, continues it"
                )
            )
    if options["as_json"]:
        print_json(document)
    sys.exit(execution.exit_status)
