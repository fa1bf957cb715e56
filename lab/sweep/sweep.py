"""`lab sweep`: train changes to a run one after the other, and compare them with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.cli import ABOVE_0, USD_PER_HOUR, print_json, stdout_to_stderr
from basics.errors import UserError, cannot_be_written, visible
from basics.files import write_atomically

if TYPE_CHECKING:
    from lab.sweep.changes import Changes
    from lab.sweep.execution import Budget, Execution, Launch
    from lab.sweep.plan import Sweep
    from run_config import Run


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    base: str
    torchrun_arguments: tuple[str, ...]
    changes: tuple[str, ...]
    ranges: tuple[str, ...]
    seeds: int | None
    stack: bool
    name: str | None
    budget_hours: float | None
    budget_usd: float | None
    usd_per_hour: float | None
    nproc_per_node: int | None
    runs_dir: Path
    sweeps_dir: Path
    datasets_dir: Path
    as_json: bool


@click.command()
@click.argument("base")
@click.argument("torchrun_arguments", nargs=-1, metavar="[-- TORCHRUN_ARGUMENT...]")
@click.option("--change", "changes", multiple=True, metavar="KEY=VALUE[,KEY=VALUE...]",
              help="One variant: keys of model.json or train.json. null takes a key out.")
@click.option("--range", "ranges", multiple=True, metavar="KEY=VALUE,VALUE...",
              help="One variant for each value of a key. A curve is fitted to 3 values or more,"
                   " the baseline's included.")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N",
              help="Train each variant with N seeds: the base's random_seed and the next ones."
                   "  [default: 1]")
@click.option("--stack", is_flag=True,
              help="Then train all changes together that were better than the baseline.")
@click.option("--name", help="Directory in --sweeps-dir.  [default: BASE]")
@click.option("--budget-hours", type=ABOVE_0, metavar="HOURS",
              help="Stop before all runs of the sweep together take longer.")
@click.option("--budget-usd", type=ABOVE_0, metavar="USD",
              help="Stop before all runs of the sweep together cost more.")
@click.option("--usd-per-hour", type=USD_PER_HOUR, metavar="USD",
              help="Price of the machine; overrides usd_per_hour of the runs.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N",
              help="Number of processes of each run.  [default: one per GPU]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True, help="Directory of BASE.")
@click.option("--sweeps-dir", type=click.Path(path_type=Path), default=Path("sweeps"),
              show_default=True)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON document on standard output, and all else on standard error.")
def command(**options: Any) -> None:
    """Train BASE and changes to it, one after the other, and compare them in one table.

    The same command goes on where it was stopped; other changes are added to the sweep. Arguments
    after -- go to torchrun, as in: lab sweep demo --seeds 3 -- --nproc_per_node=8
    """
    # Imported here so that --help is fast.
    from lab.sweep.changes import parse_change, parse_range
    from lab.sweep.execution import Budget, Execution, Launch
    from lab.sweep.plan import Sweep, open_sweep
    from lab.sweep.results import entries_of
    from lab.sweep.table import sweep_document
    from run_config import load_run

    given = Options(**options)
    wanted = [*map(parse_change, given.changes),
              *(one for text in given.ranges for one in parse_range(text))]
    loaded = load_run(given.runs_dir, given.base)
    launch = Launch(given.datasets_dir, given.nproc_per_node, given.usd_per_hour,
                    given.torchrun_arguments)
    budget = Budget(given.budget_hours, given.budget_usd,
                    given.usd_per_hour or loaded.train.usd_per_hour)
    _check_options(launch, budget)
    execution = Execution(launch, budget)
    new = Sweep.of(loaded, _directory(given.sweeps_dir, given.name or given.base),
                   num_processes=_num_processes(launch, loaded, wanted))
    with stdout_to_stderr(given.as_json), open_sweep(new, wanted, given.seeds) as sweep:
        with execution.handling_signals():
            sweep = _train(sweep, execution, stack=given.stack)
        _report(sweep, execution)
        document = sweep_document(sweep, entries_of(sweep, execution.statuses),
                                  execution.stop_reason)
    if given.as_json:
        print_json(document)
    sys.exit(execution.exit_status)


def _check_options(launch: Launch, budget: Budget) -> None:
    """Refuse options that contradict each other. Raises: UserError."""
    if launch.torchrun and not launch.torchrun[0].startswith("-"):
        raise UserError(f"{launch.torchrun[0][:60]!r}: one BASE is changed; arguments of torchrun"
                        " begin with -, after --")
    if launch.torchrun and launch.nproc_per_node:
        raise UserError("--nproc-per-node and arguments of torchrun exclude each other: pass"
                        " --nproc_per_node after --")
    if budget.usd is not None and budget.usd_per_hour is None:
        raise UserError("--budget-usd needs the machine's price: pass --usd-per-hour, or set"
                        " usd_per_hour in BASE's train.json")


def _num_processes(launch: Launch, base: Run, wanted: list[Changes]) -> int | None:
    """Return the number of processes of each run; None if it is not known, or not needed."""
    key = "global_batch_size"
    if base.train.global_batch_size is None and not any(changes.get(key) for changes in wanted):
        return None
    return launch.num_processes()


def _directory(sweeps_dir: Path, name: str) -> Path:
    """Return the directory of a sweep. Raises: UserError if it is not inside `sweeps_dir`."""
    from run_config import RUN_NAME, check_inside

    if not RUN_NAME.fullmatch(name):
        raise UserError(f"--name {name[:60]!r} is not a plain name; wanted a directory inside"
                        f" {sweeps_dir}")
    check_inside(sweeps_dir / name, sweeps_dir, "--sweeps-dir")
    return sweeps_dir / name


def _train(sweep: Sweep, execution: Execution, *, stack: bool) -> Sweep:
    """Train all runs, and then with `stack` those of one more variant; return the sweep."""
    from lab.sweep.results import entries_of, with_stack

    execution.train(sweep)
    if stack and not execution.stop_reason:
        sweep, lines = with_stack(sweep, entries_of(sweep, execution.statuses))
        click.echo(visible("\n".join(lines)))
        sweep.write()
        execution.train(sweep)
    return sweep


def _report(sweep: Sweep, execution: Execution) -> None:
    """Print the table, and write it and the charts. Raises: UserError."""
    from lab.sweep.charts import draw_sweep
    from lab.sweep.results import entries_of
    from lab.sweep.table import table_of
    from lab.table import terminal_width

    entries = entries_of(sweep, execution.statuses)
    table, path = table_of(sweep, entries), sweep.sweep_dir / "table.md"
    click.echo(visible(f"\n{table.terminal(terminal_width())}"))  # whatever fails below, it is seen
    try:
        charts = draw_sweep(sweep, entries)
        images = [f"![{path.stem}]({path.name})" for path in charts]
        write_atomically(path, "\n".join([table.markdown(), "", *images, ""]))
        written = [path, *charts]
    except OSError as error:
        raise cannot_be_written(sweep.sweep_dir, error) from None
    click.echo(visible("\n".join(f"written: {path}" for path in written)), err=True)
    if execution.stop_reason:
        more = " with a larger budget" if execution.stop_reason.startswith("budget") else ""
        click.echo(visible(
            f"sweep stopped: {execution.stop_reason}; the same command{more} continues it"))
