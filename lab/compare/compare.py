"""`lab compare`: one table of runs, also as Markdown, CSV or JSON, and charts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import UserError, cannot_be_written, one_line, print_error, visible
from basics.text import dollars, short_count
from lab.bills import PRICES, prices_of, read_bills
from lab.columns import RunFigure, hidden_first, shown_in
from lab.compare.published import published_bills, read_published
from lab.compare.reference import mark_differences, references_of, save_reference
from lab.compare.rows import LOSS_NAMES, WITHOUT_EFFECT, ComparedRuns, Row, compare
from lab.runs import Result, chosen_runs, read_run, read_searched
from lab.table import UNKNOWN, Column, Table
from reporting.metrics_file import set_keys
from reporting.reference import Compared, ReferenceCurve
from run_config import plain_name

BITS = {"validation_bits_per_byte", "test_bits_per_byte"}
WIDTH = 24  # to which names and settings are wrapped in a terminal


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--published", is_flag=True, help="Add the published results of the original system.")
@click.option(
    "--markdown",
    "forms",
    flag_value="markdown",
    multiple=True,
    type=str,
    help="Print the table in Markdown.",
)
@click.option(
    "--csv",
    "forms",
    flag_value="csv",
    multiple=True,
    type=str,
    help="Print CSV: more columns, all digits, no marks.",
)
@click.option(
    "--json",
    "forms",
    flag_value="json",
    multiple=True,
    type=str,
    help="Print one JSON document: the columns of CSV, and the notes.",
)
@click.option(
    "--charts",
    "charts_dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also draw charts into this directory: losses, loss over batch, memory.",
)
@click.option(
    "--to-loss-of",
    metavar="RUN",
    help="Show after how many tokens each run reached the final validation loss of RUN."
    "  [default: of the finished run with the highest one]",
)
@PRICES
@click.option(
    "--reference",
    "reference_name",
    metavar="NAME",
    help="Show how far each run is from this curve.  [default: the one of the runs' training]",
)
@click.option(
    "--save-reference",
    "saved_name",
    metavar="NAME",
    help="Save the losses of one run, or the mean over seeds, as a curve with this name.",
)
@RUNS_DIR
def command(
    runs: tuple[str, ...],
    published: bool,
    forms: tuple[str, ...],
    charts_dir: Path | None,
    to_loss_of: str | None,
    prices: tuple[str, ...],
    reference_name: str | None,
    saved_name: str | None,
    runs_dir: Path,
) -> None:
    """Compare RUNs, or all runs that have been launched. Works while they train.

    Runs that differ only in random_seed are merged into one row.
    """
    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude each other; choose one")
    found = find_results(runs_dir, runs, with_searches=charts_dir is not None)
    results = {result.name: result for result in found}
    if not results and not published:
        raise UserError(f"{runs_dir}: holds no trained run; train one, or add --published")
    by_run = prices_of(prices, results, runs_dir)
    bills, _ = read_bills(runs_dir, by_run)
    for name, result in results.items():
        priced = result.priced(by_run[name]) if name in by_run else result
        results[name] = replace(priced, bill=bills.get(name))
    if to_loss_of is not None:
        to_loss_of = plain_name(runs_dir, to_loss_of)
    comparison = compare([*results.values(), *(read_published() if published else [])], to_loss_of)
    if published:
        comparison.notes.append(published_bills())
    curves, problems = references_of([*results.values()], reference_name, runs_dir)
    comparison.notes.extend([*mark_differences(comparison.rows, curves), *problems])
    saved_to = save_reference(comparison.rows, saved_name, runs_dir) if saved_name else None
    rows = [row.values for row in comparison.rows]
    if forms == ("json",):
        print_json({"schema": "compare/2", "rows": rows, "notes": comparison.notes})
    elif forms == ("csv",):
        click.echo(visible(csv_of(rows)))
    elif forms == ("markdown",):
        click.echo(visible(table_of(comparison).markdown()))
    else:
        click.echo(visible(table_of(comparison).terminal()))
    if saved_to:
        print_error(
            f"saved: {saved_to}; compare with it: ddp_train.py RUN --reference {saved_name}"
        )
    if charts_dir:
        _draw(comparison.rows, curves, charts_dir)


def find_results(
    runs_dir: Path, names: tuple[str, ...], *, with_searches: bool = False
) -> list[Result]:
    """Read the runs with these names, or all that can be read.

    `with_searches` adds the runs that were not launched and have a saved search, for the charts.

    Raises: UserError: a named run does not exist, was not launched, or cannot be read.
    """
    names = tuple(plain_name(runs_dir, name) for name in names)
    searched = read_searched(runs_dir, names) if with_searches else []
    launched = [name for name in names if name not in [result.name for result in searched]]
    results = []
    for name in chosen_runs(runs_dir, launched) if launched or not names else []:
        try:
            results.append(read_run(runs_dir / name))
        except UserError as error:
            if names:
                raise
            print_error(f"warning: left out: {one_line(str(error))}")
    return [*results, *searched]


def table_of(comparison: ComparedRuns) -> Table:
    """Format a comparison, without columns in which no value is known."""
    rows = comparison.rows
    sets = set_figures(rows)
    figures = [*shown_in("compare"), *sets]
    columns = [
        Column("run", "left", WIDTH, "run"),
        Column("settings", "left", WIDTH, "settings"),
        Column("model", "left", key="model"),
        *(one.column for one in figures),
        Column("machine", "left", key="machine"),
    ]
    names = {row.values["reference"] for row in rows} - {None}
    if names:
        columns.append(Column(f"to {names.pop()}", key="reference_difference"))
    if comparison.target:
        loss = comparison.target.values["validation_loss"]
        columns.append(Column(f"tokens to loss {loss:.4f}", key="tokens_to_loss"))
    texts = [_texts(comparison, row, figures) for row in rows]
    hidden = set()
    if len({cells["model"] for cells in texts}) == 1:
        hidden.add("model")
    if comparison.sorted_by not in BITS and not sets:  # the losses compare the rows as well
        hidden |= BITS
    known = [
        column
        for column in columns
        if column.key not in hidden and any(cells[column.key] for cells in texts)
    ]
    return Table(
        known,
        [[cells[column.key] or UNKNOWN for column in known] for cells in texts],
        comparison.notes,
        (
            *("model", "machine"),
            *(key for key in hidden_first(figures) if key != comparison.sorted_by),
            *("tokens_to_loss", "reference_difference"),
        ),
    )


def set_figures(rows: list[Row]) -> list[RunFigure]:
    """Return the figures of validation sets with names; none if no run has any."""
    units = {"validation_loss": "nats per token", "validation_bits_per_byte": "bits per byte"}
    found = [
        RunFigure(
            key,
            f"{name} {metric.removeprefix('validation_').replace('_', ' ')}",
            units.get(metric, "perplexity"),
            importance=9 if metric == "validation_loss" else 0,
        )
        for key, (metric, name) in set_keys(rows[0].values if rows else {}).items()
    ]
    if any(row.first.validation_sets for row in rows):
        found.insert(0, RunFigure("validation_perplexity", "val. perplexity", "perplexity"))
    return found


def _texts(comparison: ComparedRuns, row: Row, figures: list[RunFigure]) -> dict[str, str]:
    """Return the cells of a row by key, empty where nothing is known; losses with their marks."""
    values = row.values
    settings = [
        f"{key}={value}" for key, value in row.settings.items() if key not in WITHOUT_EFFECT
    ]
    texts = {
        "run": row.name,
        "settings": " ".join(settings) or row.first.notes,
        "model": values["model"] or "",
        "machine": values["machine"] or "",
        "tokens_to_loss": "",
        "reference_difference": "",
    }
    for one in figures:
        value = values[one.key]
        texts[one.key] = "" if value is None else one.text(value)
    if row.is_published:  # no more digits than were published
        texts |= {key: texts[key].removesuffix("0") for key in LOSS_NAMES}

    low, high = values["ift_low"], values["ift_high"]
    if len(row.results) == 1 and None not in (low, high):
        texts["ift_score"] += f" ({low:.2f} to {high:.2f})"

    # The column that the rows are sorted by has the marks of the comparison.
    kind = comparison.sorted_by
    spread = values.get(f"{kind}_spread")
    if spread is not None:
        texts[kind] += f" ± {spread:.4f} (n={values['num_seeds']})"
    if values["is_within_spread"]:
        texts[kind] += " ≈"
    if row.is_of_other_text:
        texts["test_loss"] += " †"

    tokens, usd = values["tokens_to_loss"], values["usd_to_loss"]
    if tokens is not None:
        share = tokens / comparison.target.values["tokens"]
        texts["tokens_to_loss"] = f"{short_count(tokens)}, {share:.0%}"
        if usd is not None:
            texts["tokens_to_loss"] += f", ${dollars(usd)}"
    difference = values["reference_difference"]
    if difference is not None:
        texts["reference_difference"] = str(Compared(difference, values["reference_tokens_ahead"]))
    return texts


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Format values as CSV, all digits; text that a spreadsheet would run is quoted."""
    from pandas import DataFrame

    def safe(value: Any) -> Any:
        is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
        return f"'{value}" if is_formula else value

    return DataFrame(rows).map(safe).convert_dtypes().to_csv(index=False).rstrip("\n")


def _draw(rows: list[Row], curves: dict[str, ReferenceCurve], charts_dir: Path) -> None:
    """Draw charts and name them. Raises: UserError."""
    from lab.compare.charts import draw_comparison  # not above: matplotlib takes a second

    try:
        charts, missing = draw_comparison(rows, charts_dir, curves)
    except OSError as error:  # some errors, such as a full disk, have no file name
        raise cannot_be_written(error.filename or charts_dir, error) from None
    for line in [*missing, *(f"written: {path}" for path in charts)]:
        click.echo(visible(line), err=True)  # stdout may be redirected to a file with the table
