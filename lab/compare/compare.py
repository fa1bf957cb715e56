"""`lab compare`: one table over runs, and the charts that go with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from run_config import UserError

if TYPE_CHECKING:
    from lab.compare.run_results import Result

WIDTH_WITHOUT_TERMINAL = 160  # characters


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--published", is_flag=True, help="Add what the original system measured.")
@click.option("--markdown", "form", flag_value="markdown", help="Print the table in Markdown.")
@click.option("--csv", "form", flag_value="csv",
              help="Print plain numbers, more columns, no marks.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), metavar="FILE",
              help="Write table and charts as one page, too.")
@click.option("--charts", "charts_dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Where to draw the charts; with --markdown and --csv they are drawn if it is"
                   " said.  [default: comparison, in --runs-dir]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(runs: tuple[str, ...], published: bool, form: str | None, html_path: Path | None,
            charts_dir: Path | None, runs_dir: Path) -> None:
    """Compare RUNs, or all that have begun, also while they train.

    Runs that differ only in random_seed are one row.
    """
    # Imported here so that --help answers at once.
    from lab.compare.rows import compare
    from lab.compare.tables import csv_table, html_page, markdown_table, terminal_table

    comparison = compare(_results(runs_dir, runs, published=published))
    if form == "csv":
        click.echo(csv_table(comparison), nl=False)
    elif form == "markdown":
        click.echo(markdown_table(comparison))
    else:
        width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 0)).columns
        click.echo(terminal_table(comparison, width=width))
    if form and not (html_path or charts_dir):
        return
    from lab.compare.charts import draw_comparison

    charts_dir = charts_dir or runs_dir / "comparison"
    with _told_if_not_written(charts_dir, "--charts"):
        charts, missing = draw_comparison(comparison, charts_dir)
    if html_path:
        with _told_if_not_written(html_path, "--html"):
            html_path.write_text(html_page(comparison, charts), encoding="utf-8")
    for line in [*missing, *(f"written: {path}" for path in [*charts, html_path] if path)]:
        click.echo(line, err=True)  # not into a table that goes to a file


@contextmanager
def _told_if_not_written(place: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # names no file where it was the disk that had no room
        raise UserError(f"{error.filename or place}: cannot be written ({error.strerror or error});"
                        f" make room, or name another place with {option}") from None


def _results(runs_dir: Path, names: tuple[str, ...], *, published: bool) -> list[Result]:
    """Find what is to be compared. Raises: UserError if that is nothing."""
    from lab.compare.published import read_published
    from lab.compare.run_results import find_results

    results = find_results(runs_dir, names)
    if not results and not published:
        raise UserError(f"{runs_dir}: no run has been trained there; train one, or see --published")
    return results + (read_published() if published else [])
