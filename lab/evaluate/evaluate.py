"""`lab evaluate`: the loss of models on held-out tokens, and their scores on tasks."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.cli import DATASETS_DIR, RUNS_DIR, print_json, stdout_to_stderr
from basics.errors import UserError, print_error, visible
from basics.text import counted
from lab.runs import Record
from lab.table import Column, Table
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = ("target", "checkpoint", "global_step", "trained_tokens")  # of what a record is
OF_THE_LOSS = ("perplexity", "bits_per_byte")  # functions of it, whose intervals say no more
SLICE = "{num_tokens:,} tokens of {dataset} {split} from token {start_token:,}"
DECIMALS = {"loss": 6, "perplexity": 3, "bits_per_byte": 6}  # of figures; of others 4


@click.command()
@click.argument("targets", nargs=-1, required=True)
@click.option(
    "--checkpoint",
    "--checkpoints",
    "checkpoints",
    default="best",
    show_default=True,
    metavar="LIST",
    help="Of runs: latest, best, names of checkpoint directories, several"
    " of these separated by commas, or all.",
)
@click.option(
    "--dataset",
    help="A dataset in --datasets-dir, or owner/name on the hub."
    "  [default: the one that the runs were trained on]",
)
@click.option(
    "--split", type=click.Choice(["validation", "train"]), default="validation", show_default=True
)
@click.option(
    "--start-token",
    type=click.IntRange(min=0),
    help="[default: 50,000,000, or 0 if the file is smaller]",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(min=1),
    help="[default: 19,660,800, or all that follow if there are fewer]",
)
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Sequences in one forward pass; the results do not depend on it.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME",
    help="Score a task of lm-eval instead of the loss; may be repeated. NAME: hellaswag,"
    " lambada_openai, arc_easy, piqa, blimp or any other, or a YAML file of a task. Needs the"
    " extra tasks: uv run --extra tasks lab evaluate ...",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
@RUNS_DIR
@DATASETS_DIR
def command(
    targets: tuple[str, ...],
    checkpoints: str,
    dataset: str | None,
    microbatch_size: int,
    tasks: tuple[str, ...],
    as_json: bool,
    runs_dir: Path,
    **which_tokens: Any,
) -> None:
    """Measure models on held-out tokens and print one table, lowest loss first.

    A target is a run, RUN@CHECKPOINT, a directory of GPT-2 weights, or a model on the Hugging Face
    hub (owner/name). The results of a run are added to its evaluations.jsonl, those of other models
    to the one in --runs-dir: `lab compare` shows them. Of a run with several checkpoints a chart
    over tokens is drawn in its directory. In brackets are 95% intervals: of
    losses over blocks of up to 16,384 tokens (Student's t; from 8 blocks on), of accuracies
    Wilson's. A task is scored on an export of the model, a stock GPT-2.
    """
    from trainer.model_names import check_before_torch

    check_before_torch(targets, runs_dir)
    # Imported here so that --help and a wrong name do not wait for torch.
    from lab.evaluate.measure import choose_models, measure_all, open_slices
    from lab.evaluate.tasks import find_tasks

    records = []
    failed = None
    with stdout_to_stderr(as_json or bool(tasks)):  # lm-eval prints more than its results
        models = choose_models(targets, checkpoints, dataset, runs_dir)
        found_tasks = find_tasks(tasks) if tasks else None
        slices = {} if tasks else open_slices(models, **which_tokens)
        try:
            for record in measure_all(models, slices, found_tasks, runs_dir, microbatch_size):
                records.append(record)
        except UserError as error:  # loses no result of an earlier model
            failed = error
    if records and as_json:
        print_json(as_document(records))
    elif records:
        click.echo(visible(table(records).terminal()))
    try:
        for path in draw_over_tokens(records, runs_dir):
            print_error(f"chart: {path}")
    except OSError as error:
        print_error(f"warning: no chart: {error}")
    if failed is not None:
        raise failed


def table(records: list[Record]) -> Table:
    """Return the table of losses, the lowest first, or of tasks in their order, the best first.

    Losses of several datasets do not compare: then the fewest bits per byte come first.
    """
    tasks = list(dict.fromkeys(record.get("benchmark") for record in records))
    by_bits = len({record.get("dataset") for record in records}) > 1

    def rank(record: Record) -> tuple[int, bool, float]:
        key = "bits_per_byte" if by_bits else _main_key(record)
        value = math.nan if record[key] is None else record[key]
        is_higher_better = "loss" not in record and record["higher_is_better"][key]
        return (
            tasks.index(record.get("benchmark")),
            math.isnan(value),  # NaN comes last
            -value if is_higher_better else value,
        )

    keys = list(dict.fromkeys(key for record in records for key in _figures(record)))
    columns = {  # by head, the format of a cell
        f"{key.replace('_', ' ')}{'' if key in OF_THE_LOSS else ' [95%]'}": f"{{{key}}}"
        for key in keys
    }
    notes = []
    if tasks != [None]:
        columns = {"task": "{benchmark}"} | columns | {"questions": "{questions:,}"}
    else:
        measured = {SLICE.format(**record) for record in records}
        if len(measured) > 1:
            columns["measured on"] = SLICE
        else:
            notes.append(f"measured on {measured.pop()}")
    rows = []
    for record in sorted(records, key=rank):
        model = record["target"]
        if record["checkpoint"]:
            model += f" ({record['checkpoint']})"
        shown = record | {key: _cell(record, key) for key in keys}
        rows.append([model, *(text.format(**shown) for text in columns.values())])
    # A narrow terminal breaks the name of a model before its checkpoint.
    min_width = max((len(part) for row in rows for part in row[0].split()), default=0)
    return Table(
        [Column("model", "left", min_width=min_width), *map(Column, columns)],
        rows,
        notes=notes + _notes(records),
        hidden_first=("perplexity",),
    )


def _notes(records: list[Record]) -> list[str]:
    """Return what an interval is of, or why losses have none, for each number of tokens."""
    short = {
        (record["num_tokens"], record["blocks"])
        for record in records
        if record.get("loss") is not None and record["loss_interval"] is None
    }
    found = []
    if any(record["checkpoint"] and "loss" in record for record in records):
        found.append(
            "this is not the run's own validation loss, which is of the tokens that its train.json"
            " names and in its precision; here all is float32"
        )
    if any(record.get("loss_interval") for record in records):
        found.append(
            "[95%]: how much the loss of this model depends on the choice of the text; how much it"
            " depends on the seed of the training, lab sweep --seeds shows"
        )
    return found + [
        f"no interval: {num_tokens:,} tokens are {counted(blocks, 'block')} of neighbouring"
        " documents, too few to show how much the loss would vary; measure on more text"
        for num_tokens, blocks in sorted(short)
    ]


def _cell(record: Record, key: str) -> str:
    if record.get(key) is None:
        return "-"
    decimals = DECIMALS.get(key, 4)
    text = f"{record[key]:.{decimals}f}"
    if key not in OF_THE_LOSS and (interval := record[f"{key}_interval"]):
        of_bounds = min(decimals, 4)
        text += f" [{interval[0]:.{of_bounds}f}, {interval[1]:.{of_bounds}f}]"
    return text


def _figures(record: Record) -> list[str]:
    """Return the names of a record's figures, in its order."""
    return [key for key in record if f"{key}_interval" in record]


def _main_key(record: Record) -> str:
    """Return the name of the figure by which models are sorted, and that is drawn."""
    names = _figures(record)
    return next((key for key in ("normalised_accuracy", "accuracy") if key in names), names[0])


def as_document(records: list[Record]) -> Record:
    """Return the document of --json: the models in the order in which they were measured."""
    models: dict[Any, Record] = {}  # by target and checkpoint
    for record in records:
        figures = {key: value for key, value in record.items() if key not in ABOUT}
        new = {
            "name": record["target"],
            "checkpoint": record["checkpoint"],
            "trained_tokens": record["trained_tokens"],
            "loss": None,
            "tasks": [],
        }
        model = models.setdefault((record["target"], record["checkpoint"]), new)
        if "loss" in record:
            model["loss"] = figures
        else:
            model["tasks"].append(figures)
    return {"schema": "evaluate/1", "models": list(models.values())}


def draw_over_tokens(records: list[Record], runs_dir: Path) -> list[Path]:
    """Draw a chart in the directory of each run with several checkpoints. Raises: OSError."""
    paths = []
    for name in dict.fromkeys(record["target"] for record in records):
        found = [record for record in records if record["target"] == name]
        if len({record["trained_tokens"] for record in found}) > 1:
            path = runs_dir / name / "evaluations-chart.png"
            paths.append(draw_by_hand(path, partial(_plot, records=found)))
    return paths


def _plot(chart: "Figure", records: list[Record]) -> None:
    """Plot the main figure of each task, or the loss, and its intervals as vertical lines."""
    from matplotlib.ticker import EngFormatter

    axes = chart.subplots()
    for place, task in enumerate(dict.fromkeys(record.get("benchmark") for record in records)):
        found = [record for record in records if record.get("benchmark") == task]
        found.sort(key=lambda record: record["trained_tokens"])
        key = _main_key(found[0])
        if key == "loss":
            color = "tab:red"
            label = "held-out loss, 95% intervals"
            axes.set_ylabel("loss (nats per token)")
        else:
            color = f"C{place}"
            label = f"{task}, {key.replace('_', ' ')}"
            axes.set_ylabel("score")
        tokens = [record["trained_tokens"] for record in found]
        values = [record[key] for record in found]
        axes.plot(tokens, values, color=color, marker="o", markersize=5, label=label)
        for x, record in zip(tokens, found, strict=True):
            if (bounds := record[f"{key}_interval"]) is not None:
                axes.plot([x, x], bounds, color=color, linewidth=1.5)
    chart.suptitle(records[0]["target"].replace("$", r"\$"))
    axes.set_xlabel("tokens of training")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False, fontsize="small")
