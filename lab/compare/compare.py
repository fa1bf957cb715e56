"""`lab compare`: one table of runs, also as Markdown, CSV, JSON or a page, and charts."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from basics.cli import RUNS_DIR, print_json
from basics.errors import UserError, cannot_be_written, one_line, print_error, visible
from basics.text import dollars
from lab.bills import PRICES, prices_of, read_bills
from lab.compare.reference import mark_differences, references_of, save_reference
from lab.compare.results import (
    MODEL,
    Result,
    read_models,
    read_published,
    read_result,
    read_searched,
)
from lab.compare.rows import LOSS_NAMES, Comparison, Row, compare
from lab.runs import chosen_runs, launched_runs
from lab.table import UNKNOWN, Column, Table, short_count
from reporting.metrics_file import set_keys
from reporting.reference import Compared, ReferenceCurve
from run_config import plain_name

PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Comparison of runs</title>
<style>
body {{ font-family: sans-serif; margin: 1.5em; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
table, p {{ font-size: clamp(11px, 0.72vw, 14px); }}
p {{ max-width: 100ch; overflow-wrap: anywhere; }}
th, td {{ padding: 0.3em 0.4em; border-bottom: 1px solid #ccc; vertical-align: top; }}
.left {{ text-align: left; }}
.right {{ text-align: right; }}
img {{ max-width: 100%; display: block; margin: 1em 0; }}
</style>
<h1>Comparison of runs</h1>
{table}
{charts}
"""
HIDDEN_FIRST = (  # in a terminal that is too narrow
    "model",
    "setup_seconds",
    "download_seconds",
    "search_seconds",
    "idle_seconds",
    "machine_seconds",
    "machine",
    "microbatch_size",
    "steps",
    "num_gpus",
    "usd_per_hour",
    "usd_without_validation",
    "tokens_per_second",
    "usd_per_megatoken_without_validation",
    "usd_per_megatoken",
    "train_loss",
    "seconds_without_validation",
    "training_pflop",
    "tokens",
    "seconds",
    "tokens_to_loss",
    "reference_difference",
    "machine_usd",
    "usd",
    "validation_loss",
    "global_batch_size",
)
BITS = {"validation_bits_per_byte", "test_bits_per_byte"}
WIDTH = 24  # to which names and settings are wrapped in a terminal
whole = "{:,.0f}".format


def precise(value: float) -> str:
    return f"{value:.4f}" if value < 1000 else f"{value:.4g}"


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {  # head and format of a figure, by key
    "global_batch_size": ("global\nbatch", whole),
    "microbatch_size": ("micro-\nbatch", whole),
    "tokens": ("tokens", short_count),
    "steps": ("steps", whole),
    "train_loss": ("train\nloss", precise),
    "validation_loss": ("val.\nloss", precise),
    "test_loss": ("test\nloss", precise),
    "validation_bits_per_byte": ("val. bits\nper byte", precise),
    "test_bits_per_byte": ("test bits\nper byte", precise),
    "ift_score": ("IFT", "{:.2f}".format),
    "seconds": ("seconds", whole),
    "seconds_without_validation": ("seconds,\nno val.", whole),
    "tokens_per_second": ("tokens\nper s", whole),
    "training_pflop": ("training\nPFLOP", "{:,.3g}".format),
    "num_gpus": ("GPUs", whole),
    "usd_per_hour": ("US$ an\nhour", dollars),
    "usd": ("US$", dollars),
    "usd_without_validation": ("US$,\nno val.", dollars),
    "usd_per_megatoken": ("US$ per\nMtoken", precise),
    "usd_per_megatoken_without_validation": ("US$ per\nMtoken,\nno val.", precise),
    "setup_seconds": ("set-up\ns", whole),
    "download_seconds": ("down-\nload s", whole),
    "search_seconds": ("search\ns", whole),
    "idle_seconds": ("idle\ns", whole),
    "machine_seconds": ("machine\ns", whole),
    "machine_usd": ("US$ of\nmachine", dollars),
}


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
    "--html",
    "html_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the table and the charts as one HTML page.",
)
@click.option(
    "--charts",
    "charts_dir",
    type=click.Path(path_type=Path),
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
    html_path: Path | None,
    charts_dir: Path | None,
    to_loss_of: str | None,
    prices: tuple[str, ...],
    reference_name: str | None,
    saved_name: str | None,
    runs_dir: Path,
) -> None:
    """Compare RUNs, or all runs that have been launched. Works while they train.

    RUN may also be a model that is no run, by the name under which it was evaluated or judged;
    without RUN all of these are there too.

    Runs that differ only in random_seed are merged into one row.
    """
    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude each other; choose one")
    found = find_results(runs_dir, runs, with_searches=bool(charts_dir or html_path))
    results = {result.name: result for result in found}
    if not results and not published:
        raise UserError(f"{runs_dir}: holds no trained run; train one, or add --published")
    by_run = prices_of(prices, results, runs_dir)
    bills = read_bills(runs_dir, by_run)
    for name, result in results.items():
        priced = result.priced(by_run[name]) if name in by_run else result
        results[name] = replace(priced, figures=priced.figures | bills.get(name, {}))
    if to_loss_of is not None:
        to_loss_of = plain_name(runs_dir, to_loss_of)
    comparison = compare([*results.values(), *(read_published() if published else [])], to_loss_of)
    runs_alone = [result for result in results.values() if result.status != MODEL]
    curves, problems = references_of(runs_alone, reference_name, runs_dir)
    comparison.notes.extend([*mark_differences(comparison.rows, curves), *problems])
    saved_to = save_reference(comparison.rows, saved_name, runs_dir) if saved_name else None
    table = table_of(comparison)
    if forms == ("json",):
        print_json({"schema": "compare/1", "rows": table.values, "notes": table.notes})
    else:
        click.echo(visible(getattr(table, forms[0] if forms else "terminal")()))
    if saved_to:
        print_error(
            f"saved: {saved_to}; compare with it: ddp_train.py RUN --reference {saved_name}"
        )
    if charts_dir or html_path:
        _draw(comparison.rows, curves, table, charts_dir, html_path)


def find_results(
    runs_dir: Path, names: tuple[str, ...], *, with_searches: bool = False
) -> list[Result]:
    """Read the runs and models with these names, or all that can be read.

    `with_searches` adds the runs that were not launched and have a saved search, for the charts.

    Raises: UserError: a named run does not exist, was not launched, or cannot be read.
    """
    launched = launched_runs(runs_dir)
    models = {one.name: one for one in read_models(runs_dir) if one.name not in launched}
    others = dict(models)
    if with_searches:
        others |= {one.name: one for one in read_searched(runs_dir)}
    if names:
        paths = [str(Path(name).resolve()) for name in names]  # of directories of weights
        named = zip(names, paths, strict=True)
        names = tuple(path if path in models else name for name, path in named)
        found = [others[name] for name in dict.fromkeys(names) if name in others]
        of_runs = [name for name in names if name not in others]
        if of_runs:
            chosen = chosen_runs(runs_dir, of_runs, models=models)
            found = [*(read_result(runs_dir / name) for name in chosen), *found]
        return found
    results = []
    for name in launched:
        try:
            results.append(read_result(runs_dir / name))
        except UserError as error:
            print_error(f"warning: left out: {one_line(str(error))}")
    return [*results, *others.values()]


def table_of(comparison: Comparison) -> Table:
    """Format a comparison, without columns in which no value is known."""
    columns = [
        Column("run", "left", WIDTH, "run"),
        Column("differences", "left", WIDTH, "differs"),
        Column("model", "left", key="model"),
        *(
            Column(head, "left" if key in LOSS_NAMES else "right", key=key)
            for key, (head, _) in SHOWN.items()
        ),
        Column("machine", "left", key="machine"),
    ]
    columns += [Column(head, key=key) for key, head in set_heads(comparison.rows).items()]
    names = {row.values["reference"] for row in comparison.rows} - {None}
    if names:
        columns.append(Column(f"to {names.pop()}", key="reference_difference"))
    if comparison.target:
        loss = comparison.target.values["validation_loss"]
        columns.append(Column(f"tokens to\nloss {loss:.4f}", key="tokens_to_loss"))
    rows = [_texts(comparison, row) for row in comparison.rows]
    hidden = {"model"} if len({texts["model"] for texts in rows}) == 1 else set()
    sets = set_heads(comparison.rows)
    if comparison.sorted_by not in BITS and not sets:  # the losses compare the rows as well
        hidden |= BITS
    known = [
        column
        for column in columns
        if column.key not in hidden and any(texts[column.key] for texts in rows)
    ]
    return Table(
        known,
        [[texts[column.key] or UNKNOWN for column in known] for texts in rows],
        comparison.notes,
        (*(key for key in sets if "_loss" not in key), *HIDDEN_FIRST),
        [row.values for row in comparison.rows],
    )


def set_heads(rows: list[Row]) -> dict[str, str]:
    """Return the heads of the columns of validation sets with names, by key."""
    values = rows[0].values if rows else {}
    heads = {"validation_perplexity": "val. per-\nplexity"}
    units = {"loss": "\nloss", "perplexity": " per-\nplexity", "bits_per_byte": " bits\nper byte"}
    for key, (metric, name) in set_keys(values).items():
        heads[key] = name + units[metric.removeprefix("validation_")]
    return heads if "validation_perplexity" in values else {}


def _texts(comparison: Comparison, row: Row) -> dict[str, str]:
    """Return the cells of a row by key, empty where nothing is known; losses with their marks."""
    values = row.values
    texts = {"run": row.name}
    texts |= {key: values[key] or "" for key in ("differs", "model", "machine")}
    for key, (_, form) in SHOWN.items():
        texts[key] = "" if values[key] is None else form(values[key])
    for key in set_heads([row]):
        texts[key] = "" if values[key] is None else precise(values[key])
    if row.is_published:  # no more digits than were published
        texts |= {key: texts[key].removesuffix("0") for key in LOSS_NAMES}
    if len(row.results) == 1 and None not in (values["ift_spread"], values["ift_tunings"]):
        texts["ift_score"] += " ± {ift_spread:.2f} (n={ift_tunings:.0f})".format_map(values)
    elif len(row.results) == 1 and None not in (values["ift_low"], values["ift_high"]):
        texts["ift_score"] += " ({ift_low:.2f} to {ift_high:.2f})".format_map(values)
    kind, spread = comparison.sorted_by, values.get(f"{comparison.sorted_by}_spread")
    if spread is not None:
        texts[kind] += f" ± {spread:.4f} (n={values['num_seeds']})"
    texts[kind] += " ≈" * values["is_within_spread"]
    texts["test_loss"] += " †" * row.is_of_other_text
    tokens, usd = values["tokens_to_loss"], values["usd_to_loss"]
    texts["tokens_to_loss"] = ""
    if tokens is not None:
        share = tokens / comparison.target.values["tokens"]
        texts["tokens_to_loss"] = f"{short_count(tokens)}, {share:.0%}"
        if usd is not None:
            texts["tokens_to_loss"] += f", ${dollars(usd)}"
    texts["reference_difference"] = ""
    if values["reference_difference"] is not None:
        compared = Compared(values["reference_difference"], values["reference_tokens_ahead"])
        texts["reference_difference"] = str(compared)
    return texts


def _draw(
    rows: list[Row],
    curves: dict[str, ReferenceCurve],
    table: Table,
    charts_dir: Path | None,
    html_path: Path | None,
) -> None:
    """Draw charts, and write them and the table as a page. Raises: UserError."""
    from lab.compare.charts import draw_comparison  # not above: matplotlib takes a second

    with TemporaryDirectory() as aside:
        try:
            charts, missing = draw_comparison(rows, charts_dir or Path(aside), curves)
            if html_path:
                images = [
                    f'<img alt="{path.stem}" src="data:image/png;base64,'
                    f'{base64.b64encode(path.read_bytes()).decode()}">'
                    for path in charts
                ]
                html_path.write_text(
                    PAGE.format(table=table.html(), charts="\n".join(images)), encoding="utf-8"
                )
        except OSError as error:  # some errors, such as a full disk, have no file name
            raise cannot_be_written(error.filename or charts_dir or html_path, error) from None
    written = [*(charts if charts_dir else []), *([html_path] if html_path else [])]
    for line in [*missing, *(f"written: {path}" for path in written)]:
        click.echo(visible(line), err=True)  # stdout may be redirected to a file with the table
