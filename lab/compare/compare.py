"""`lab compare`: one table of runs, also as Markdown, CSV, JSON or a page, and charts."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from basics.cli import RUNS_DIR, USD_PER_HOUR, print_json
from basics.errors import UserError, one_line, print_error, visible, why_not_written
from basics.text import dollars
from lab.runs import chosen_runs
from lab.table import UNKNOWN, Column, Table, short_count

if TYPE_CHECKING:
    from lab.compare.results import Result
    from lab.compare.rows import Comparison, Row

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
HIDDEN_FIRST = (  # in a terminal that is too narrow
    "model", "machine", "microbatch_size", "usd_per_megatoken_without_validation", "ift_score",
    "steps", "num_gpus", "usd_per_hour",
    "usd_without_validation", "tokens_per_second", "usd_per_megatoken", "train_loss",
    "seconds_without_validation", "tokens", "seconds", "tokens_to_loss", "usd", "validation_loss",
    "global_batch_size",
)
WHOLE, PRICE = "{:,.0f}".format, "{:.4f}".format
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {  # head and format of a figure, by key
    "global_batch_size": ("global\nbatch", WHOLE), "microbatch_size": ("micro-\nbatch", WHOLE),
    "tokens": ("tokens", short_count), "steps": ("steps", WHOLE),
    "train_loss": ("train\nloss", PRICE), "validation_loss": ("val.\nloss", PRICE),
    "test_loss": ("test\nloss", PRICE),
    "validation_bits_per_byte": ("val. bits\nper byte", PRICE),
    "test_bits_per_byte": ("test bits\nper byte", PRICE),
    "ift_score": ("IFT", "{:.2f}".format), "seconds": ("seconds", WHOLE),
    "seconds_without_validation": ("seconds,\nno val.", WHOLE),
    "tokens_per_second": ("tokens\nper s", WHOLE), "num_gpus": ("GPUs", WHOLE),
    "usd_per_hour": ("US$ an\nhour", dollars), "usd": ("US$", dollars),
    "usd_without_validation": ("US$,\nno val.", dollars),
    "usd_per_megatoken": ("US$ per\nMtoken", PRICE),
    "usd_per_megatoken_without_validation": ("US$ per\nMtoken,\nno val.", PRICE),
}
LOSSES = ("test_loss", "validation_loss", "train_loss")


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
@RUNS_DIR
def command(runs: tuple[str, ...], published: bool, forms: tuple[str, ...], html_path: Path | None,
            charts_dir: Path | None, to_loss_of: str | None, prices: tuple[str, ...],
            runs_dir: Path) -> None:
    """Compare RUNs, or all runs that have been launched. Works while they train.

    Runs that differ only in random_seed are merged into one row.
    """
    # Imported here so that --help is fast.
    from lab.compare.results import read_published
    from lab.compare.rows import compare

    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude each other; choose one")
    results = find_results(runs_dir, runs)
    if not results and not published:
        raise UserError(f"{runs_dir}: holds no trained run; train one, or add --published")
    comparison = compare(_priced(results, prices) + (read_published() if published else []),
                         to_loss_of)
    table, values = table_of(comparison), values_of(comparison)
    if forms == ("json",):
        print_json({"schema": "compare/1", "rows": values, "notes": comparison.notes})
    else:
        click.echo(visible(csv_of(values) if forms == ("csv",) else table.markdown()
                           if forms == ("markdown",) else table.terminal()))
    if charts_dir or html_path:
        _draw(comparison.rows, table, charts_dir, html_path)


def find_results(runs_dir: Path, names: tuple[str, ...]) -> list[Result]:
    """Read the runs with these names, or all runs that have been launched.

    Where no names are given, a run whose files cannot be read is left out, with a warning.

    Raises:
        UserError: there is no such run, or it has not been launched, or its files cannot be read.
    """
    from lab.compare.results import read_result

    results = []
    for name in chosen_runs(runs_dir, names):
        try:
            results.append(read_result(runs_dir / name))
        except UserError as error:
            if names:
                raise
            print_error(f"warning: left out: {one_line(str(error))}")
    return results


def _priced(results: list[Result], prices: tuple[str, ...]) -> list[Result]:
    """Price runs as if all of their time had cost as much as is given.

    Raises:
        UserError: a price is not one, or of none of the runs.
    """
    by_name = {result.name: result for result in results}
    for text in prices:
        name, _, price = text.rpartition("=")
        if name not in by_name:
            raise UserError(f"--usd-per-hour {text[:60]!r}: wanted RUN=PRICE, with a RUN of the"
                            " comparison")
        usd_per_second, run = USD_PER_HOUR(price) / 3600, by_name[name]
        usd = {target: None if run.figures[key] is None else run.figures[key] * usd_per_second
               for key, target in (("seconds", "usd"), ("validation_seconds", "validation_usd"))}
        by_name[name] = replace(run, figures=run.figures | usd, records=tuple(
            record | {"usd": seconds * usd_per_second} if (seconds := record.get("seconds"))
            else record for record in run.records))
    return list(by_name.values())


def table_of(comparison: Comparison) -> Table:
    """Format a comparison, without columns in which no value is known."""
    columns = [Column("run", "left", 20, "run"), Column("differences", "left", 28, "differs"),
               Column("model", "left", key="model"),
               *(Column(head, "left" if key in LOSSES else "right", key=key)
                 for key, (head, _) in SHOWN.items()), Column("machine", "left", key="machine")]
    notes, sizes = comparison.notes, {row.first.size for row in comparison.rows}
    rows = [{"run": row.name, "differs": row.differs or row.first.notes,
             "model": row.first.size if len(sizes) > 1 else "", "machine": row.first.device or "",
             **{key: _cell(comparison, row, key) for key in SHOWN}} for row in comparison.rows]
    if comparison.reference:
        whole, name = comparison.reference.figures, comparison.reference.short_name
        loss = f"loss {whole['validation_loss']:.4f}"
        columns.append(Column(f"tokens to\n{loss}", key="tokens_to_loss"))
        notes = [*notes, f"tokens to {loss}: until the validation loss was that of {name}, their"
                         " share of its own, and what they cost"]
        for texts, row in zip(rows, comparison.rows, strict=True):
            found = row.reached
            texts["tokens_to_loss"] = "" if found is None or not whole["tokens"] else ", ".join(
                [short_count(found.tokens), f"{found.tokens / whole['tokens']:.0%}",
                 *([] if found.usd is None else [f"${dollars(found.usd)}"])])
    known = [column for column in columns if any(texts[column.key] for texts in rows)]
    return Table(known, [[texts[column.key] or UNKNOWN for column in known] for texts in rows],
                 notes, HIDDEN_FIRST)


def _cell(comparison: Comparison, row: Row, key: str) -> str:
    """Format a figure; a loss with its marks, an instruction score with its interval."""
    value, text = row.figures[key], SHOWN[key][1]
    if value is None or key.endswith("bits_per_byte") and not comparison.mixes_tokenizers:
        return ""  # with one tokenizer, the losses compare the rows as well
    low, high = row.figures["ift_low"], row.figures["ift_high"]
    if key == "ift_score" and len(row.results) == 1 and None not in (low, high):
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    if key not in LOSSES:
        return text(value)
    found = text(value) if value < 1000 else f"{value:.4g}"
    if row.is_published:  # no more digits than were published
        found = found.removesuffix("0")
    if key == comparison.sorted_by:
        if key in row.spread:
            found += f" ± {row.spread[key]:.4f} (n={len(row.results)})"
        found += " ≈" if row.is_within_spread else ""
    return found + (" †" if key == "test_loss" and row.first.is_of_other_slice else "")


def values_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows as values: always the same keys, None for what is not known."""
    return [{
        "run": ", ".join(result.name for result in row.results), "status": row.first.status,
        "differs": row.differs or row.first.notes, "model": row.first.size,
        "num_seeds": len(row.results),
        **{key: row.figures[key] for key in (*SHOWN, "ift_low", "ift_high")},
        "ift_judge": row.first.judge, "machine": row.first.device,
        **{key.replace("loss", "loss_spread"): row.spread.get(key) for key in LOSSES},
        "sorted_by": comparison.sorted_by, "is_within_spread": row.is_within_spread,
        "test_slice": row.first.test_slice,
        "tokens_to_loss": row.reached and row.reached.tokens,
        "usd_to_loss": row.reached and row.reached.usd,
    } for row in comparison.rows]


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Format rows as CSV: numbers with all digits; text that a spreadsheet would run is quoted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@")
                         else value for key, value in row.items()})
    return text.getvalue().rstrip("\n")


def _draw(rows: list[Row], table: Table, charts_dir: Path | None, html_path: Path | None) -> None:
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
