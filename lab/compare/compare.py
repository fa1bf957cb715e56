"""`lab compare`: one table of runs, and charts."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from basics.cli import USD_PER_HOUR, print_json
from basics.errors import UserError, visible, why_not_written

if TYPE_CHECKING:
    from lab.compare.results import Result
    from lab.table import Table

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Comparison of runs</title>
<style>
body {{ font-family: sans-serif; margin: 1.5em; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: clamp(7px, 0.72vw, 12px); }}
th, td {{ padding: 0.3em 0.4em; border-bottom: 1px solid #ccc; vertical-align: top; }}
.left {{ text-align: left; }}
.right {{ text-align: right; }}
img {{ max-width: 100%; display: block; margin: 1em 0; }}
</style>
</head>
<body>
<h1>Comparison of runs</h1>
{table}
{charts}
</body>
</html>
"""


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--published", is_flag=True, help="Add the published results of the original system.")
@click.option("--markdown", "forms", flag_value="markdown", multiple=True, type=str,
              help="Print the table in Markdown.")
@click.option("--csv", "forms", flag_value="csv", multiple=True, type=str,
              help="Print CSV: more columns, all digits, no marks.")
@click.option("--json", "forms", flag_value="json", multiple=True, type=str,
              help="Print one JSON document: the columns of CSV, and the notes.")
@click.option("--html", "html_path", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the table and the charts as one HTML page.")
@click.option("--charts", "charts_dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Also draw charts into this directory: losses, loss over batch, memory.")
@click.option("--to-loss-of", metavar="RUN",
              help="Show after how many tokens each run reached the final validation loss of RUN."
                   "  [default: of the finished run with the highest one]")
@click.option("--usd-per-hour", "prices", multiple=True, metavar="RUN=PRICE",
              help="Price all the time of RUN afterwards; may be repeated.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(runs: tuple[str, ...], published: bool, forms: tuple[str, ...], html_path: Path | None,
            charts_dir: Path | None, to_loss_of: str | None, prices: tuple[str, ...],
            runs_dir: Path) -> None:
    """Compare RUNs, or all runs that have been launched. Works while they train.

    Runs that differ only in random_seed are merged into one row.
    """
    # Imported here so that --help is fast.
    from lab.compare.columns import csv_of, table_of, values_of
    from lab.compare.comparison import compare
    from lab.compare.results import find_results, read_published
    from lab.table import terminal_width

    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude each other; choose one")
    results = find_results(runs_dir, runs)
    if not results and not published:
        raise UserError(f"{runs_dir}: holds no trained run; train one, or add --published")
    comparison = compare(_priced(results + (read_published() if published else []), prices),
                         to_loss_of)
    table, values = table_of(comparison), values_of(comparison)
    if forms == ("json",):
        print_json({"schema": "compare/1", "rows": values, "notes": comparison.notes})
    else:
        click.echo(visible(csv_of(values).rstrip("\n") if forms == ("csv",) else table.markdown()
                           if forms == ("markdown",) else table.terminal(terminal_width())))
    if charts_dir or html_path:
        _draw(comparison.rows, table, charts_dir, html_path)


def _priced(results: list[Result], prices: tuple[str, ...]) -> list[Result]:
    """Price results as if all of their time had cost as much as is given.

    Raises:
        UserError: a price is not one, or of none of the runs.
    """
    by_name = {result.name: result for result in results}
    for text in prices:
        name, _, price = text.rpartition("=")
        if name not in by_name:
            raise UserError(f"--usd-per-hour {text[:60]!r}: wanted RUN=PRICE, with a RUN of the"
                            " comparison")
        usd_per_second, found = USD_PER_HOUR(price) / 3600, by_name[name]
        usd = {target: None if found.figures[key] is None else found.figures[key] * usd_per_second
               for key, target in (("seconds", "usd"), ("validation_seconds", "validation_usd"))}
        by_name[name] = replace(found, figures=found.figures | usd, records=tuple(
            record | {"usd": record["seconds"] * usd_per_second} if "seconds" in record else record
            for record in found.records))
    return list(by_name.values())


def _draw(rows: list, table: Table, charts_dir: Path | None, html_path: Path | None) -> None:
    """Draw charts, and write them and the table as a page. Raises: UserError."""
    from lab.compare.charts import draw_comparison

    option = "--charts"
    with TemporaryDirectory() as aside:
        try:
            charts, missing = draw_comparison(rows, charts_dir or Path(aside))
            if html_path:
                option = "--html"
                images = [f'<img alt="{path.stem}" src="data:image/png;base64,'
                          f'{base64.b64encode(path.read_bytes()).decode()}">' for path in charts]
                html_path.write_text(PAGE.format(table=table.html(), charts="\n".join(images)),
                                     encoding="utf-8")
        except OSError as error:  # some errors, such as a full disk, have no file name
            raise UserError(f"{error.filename or charts_dir or html_path}: cannot be written"
                            f" ({why_not_written(error)}); or set another place with {option}"
                            ) from None
    written = [*(charts if charts_dir else []), *([html_path] if html_path else [])]
    for line in [*missing, *(f"written: {path}" for path in written)]:
        click.echo(visible(line), err=True)  # stdout may be redirected to a file with the table
