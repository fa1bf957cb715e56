"""`lab evaluate`: the loss of models on held-out tokens, or their score on HellaSwag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from basics.errors import visible


@click.command()
@click.argument("targets", nargs=-1, required=True)
@click.option("--checkpoint", default="best", show_default=True,
              help="Of runs: latest, best or the name of a checkpoint directory.")
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
@click.option("--benchmark", type=(click.Choice(["hellaswag"]), str), metavar="NAME FILE",
              help="Score a benchmark instead: hellaswag, from a local file or a hub dataset.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
def command(**options: Any) -> None:
    """Measure models on held-out tokens and print one table, lowest loss first.

    A target is a run, a directory of GPT-2 weights, or a model on the Hugging Face hub
    (owner/name). Under torchrun (torchrun --nproc_per_node=8 -m lab evaluate ...) the processes
    share the work. The results of a run are added to its evaluations.jsonl.
    """
    # Imported here so that --help does not wait for torch.
    from tabulate import tabulate

    from lab.evaluate.measure import Request, evaluate_all, score_all
    from lab.evaluate.sharing import join_processes

    request, share = Request(**options), join_processes()
    rows = score_all(request, share) if request.benchmark else evaluate_all(request, share)
    if share.process.is_main:
        click.echo(visible(tabulate(rows, headers="keys", disable_numparse=True,
                                    colalign=["left"] + ["right"] * (len(rows[0]) - 1))))
