"""`lab evaluate`: the loss of models on held-out tokens, and their scores on tasks."""

from __future__ import annotations

from pathlib import Path

import click

from basics.cli import print_json, stdout_to_stderr
from basics.errors import UserError, print_error, visible
from lab.evaluate.tasks import TASKS, read_quiz


@click.command()
@click.argument("targets", nargs=-1, required=True)
@click.option("--checkpoint", "--checkpoints", "checkpoints", default="best", show_default=True,
              metavar="LIST", help="Of runs: latest, best, names of checkpoint directories, several"
                                   " of these separated by commas, or all.")
@click.option("--dataset", help="A dataset in --datasets-dir, or owner/name on the hub."
                                "  [default: the one that the runs were trained on]")
@click.option("--split", type=click.Choice(["validation", "train"]), default="validation",
              show_default=True)
@click.option("--start-token", type=click.IntRange(min=0),
              help="[default: 50,000,000, or 0 if the file is smaller]")
@click.option("--tokens", "num_tokens", type=click.IntRange(min=1),
              help="[default: 19,660,800, or all that follow if there are fewer]")
@click.option("--microbatch-size", type=click.IntRange(min=1), default=8, show_default=True,
              help="Sequences in one forward pass; the results do not depend on it.")
@click.option("--task", "tasks", multiple=True, metavar="NAME[=FILE]",
              help="Score a task instead of the loss, as lm-eval does; may be repeated. NAME:"
                   f" {', '.join(TASKS)}. FILE: JSON lines, parquet, a directory of them, or"
                   " owner/name on the hub.  [default: the task's dataset on the hub]")
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON document instead, for scripts.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
def command(
    targets: tuple[str, ...], checkpoints: str, dataset: str | None, split: str,
    start_token: int | None, num_tokens: int | None, microbatch_size: int,
    tasks: tuple[str, ...], as_json: bool, runs_dir: Path, datasets_dir: Path,
) -> None:
    """Measure models on held-out tokens and print one table, lowest loss first.

    A target is a run, RUN@CHECKPOINT, a directory of GPT-2 weights, or a model on the Hugging Face
    hub (owner/name). The results of a run are added to its evaluations.jsonl; of a run with several
    checkpoints a chart over tokens is drawn in its directory. In brackets are 95% intervals: of
    losses over blocks of 16,384 tokens (Student's t), of accuracies Wilson's.
    """
    # Imported here so that --help does not wait for torch.
    from lab.evaluate.measure import choose_models, datasets_of, measure_all, open_slices
    from lab.evaluate.results import Result, draw_over_tokens, table

    results: list[Result] = []
    failed: UserError | None = None
    with stdout_to_stderr(as_json):
        models = choose_models(targets, checkpoints, runs_dir)
        quizzes = [read_quiz(*text.partition("=")[::2]) for text in tasks]
        slices = {} if quizzes else open_slices(
            datasets_of(models, dataset, runs_dir), datasets_dir, split, start_token, num_tokens)
        try:
            for result in measure_all(models, slices, quizzes, runs_dir, microbatch_size):
                results.append(result)
        except UserError as error:  # loses no result of an earlier model
            failed = error
    if results:
        if as_json:
            print_json({"schema": "evaluate/1", "models": [
                {"name": one.name, "checkpoint": one.checkpoint,
                 "trained_tokens": one.trained_tokens,
                 "loss": None if tasks else one.records[0],
                 "tasks": one.records if tasks else []} for one in results]})
        else:
            click.echo(visible(table(results).terminal()))
        try:
            for path in draw_over_tokens(results):
                print_error(f"chart: {path}")
        except OSError as error:
            print_error(f"warning: no chart: {error}")
    if failed is not None:
        raise failed
