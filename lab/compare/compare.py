"""`lab compare`: one table of runs, and charts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from basics.cli import USD_PER_HOUR, print_json
from basics.errors import UserError, visible, why_not_written

if TYPE_CHECKING:
    from lab.compare.rows import Comparison
    from lab.compare.run_results import Result
    from lab.compare.tokens_to_loss import TokensToLoss

WIDTH_WITHOUT_TERMINAL = 160  # characters


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--published", is_flag=True, help="Add the published results of the original system.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table in Markdown.")
@click.option("--csv", "form", flag_value="csv",
              help="Print CSV: more columns, all digits, no marks.")
@click.option("--json", "form", flag_value="json",
              help="Print one JSON document: the columns of CSV, and the notes.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the table and the charts as one HTML page.")
@click.option("--charts", "charts_dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Directory for the charts. With --markdown, --csv or --json, charts are only"
                   " drawn if this or --html is set.  [default: comparison, in --runs-dir]")
@click.option("--to-loss-of", metavar="RUN",
              help="Show after how many tokens each run reached the final validation loss of RUN."
                   "  [default: of every other run, if there are 2 to 4]")
@click.option("--usd-per-hour", "prices", multiple=True, metavar="RUN=PRICE",
              help="Price all the time of RUN afterwards; may be repeated.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(runs: tuple[str, ...], published: bool, form: str | None, html_path: Path | None,
            charts_dir: Path | None, to_loss_of: str | None, prices: tuple[str, ...],
            runs_dir: Path) -> None:
    """Compare RUNs, or all runs that have been launched. Works while they train.

    Runs that differ only in random_seed are merged into one row.
    """
    # Imported here so that --help is fast.
    from lab.compare.rows import compare
    from lab.compare.tables import comparison_document, csv_table, html_page
    from lab.compare.tokens_to_loss import tokens_to_loss

    comparison = compare(_priced(_results(runs_dir, runs, published=published), prices))
    to_loss = tokens_to_loss(comparison, to_loss_of)
    if form == "csv":
        click.echo(visible(csv_table(comparison, to_loss)), nl=False)
    elif form == "json":
        print_json(comparison_document(comparison, to_loss))
    else:
        click.echo(visible(_tables(comparison, to_loss, form)))
    if form and not (html_path or charts_dir):
        return
    from lab.compare.charts import draw_comparison

    charts_dir = charts_dir or runs_dir / "comparison"
    with _write_errors_reported(charts_dir, "--charts"):
        charts, missing = draw_comparison(comparison, charts_dir)
    if html_path:
        with _write_errors_reported(html_path, "--html"):
            html_path.write_text(html_page(comparison, charts, to_loss), encoding="utf-8")
    for line in [*missing, *(f"written: {path}" for path in [*charts, html_path] if path)]:
        click.echo(visible(line), err=True)  # stdout may be redirected to a file with the table


def _priced(results: list[Result], prices: tuple[str, ...]) -> list[Result]:
    """Price results. Raises: UserError: a price is not one, or of none of the runs."""
    from lab.compare.run_results import priced

    by_name = {}
    for text in prices:
        name, _, price = text.rpartition("=")
        if name not in [result.name for result in results]:
            raise UserError(f"--usd-per-hour {text[:60]!r}: wanted RUN=PRICE, with a RUN of the"
                            " comparison")
        by_name[name] = USD_PER_HOUR(price)
    return [priced(result, by_name[result.name]) if result.name in by_name else result
            for result in results]


def _tables(comparison: Comparison, to_loss: TokensToLoss | None, form: str | None) -> str:
    """Format the comparison, and below it the tokens to a loss, if there are any."""
    from lab.compare.tables import markdown_table, terminal_table
    from lab.compare.to_loss_table import to_loss_table

    if form == "markdown":
        tables = markdown_table(comparison), to_loss_table(to_loss, "github")
    else:
        width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns
        tables = (terminal_table(comparison, width=width),
                  to_loss_table(to_loss, "plain", width=width))
    return "\n\n".join(filter(None, tables))


@contextmanager
def _write_errors_reported(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # some errors, such as a full disk, have no file name
        raise UserError(f"{error.filename or path}: cannot be written"
                        f" ({why_not_written(error)}); or set another place with {option}"
                        ) from None


def _results(runs_dir: Path, names: tuple[str, ...], *, published: bool) -> list[Result]:
    """Return the results to compare. Raises: UserError if there are none."""
    from lab.compare.published import read_published
    from lab.compare.run_results import find_results

    results = find_results(runs_dir, names)
    if not results and not published:
        raise UserError(f"{runs_dir}: holds no trained run; train one, or add --published")
    return results + (read_published() if published else [])
