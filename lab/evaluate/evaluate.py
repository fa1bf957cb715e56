"""`lab evaluate`: the loss of models on held-out tokens, or their score on HellaSwag."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.errors import UserError

if TYPE_CHECKING:
    from lab.evaluate.held_out import Slice
    from lab.evaluate.hellaswag import Question
    from lab.evaluate.sharing import Share
    from lab.targets import Target
    from tokens.token_file import TokenFile


@dataclass(frozen=True)
class Request:
    """What was typed."""

    targets: tuple[str, ...]
    checkpoint: str
    dataset: str | None
    split: str
    start_token: int | None
    num_tokens: int | None
    microbatch_size: int
    benchmark: tuple[str, str] | None
    runs_dir: Path
    datasets_dir: Path


@click.command()
@click.argument("targets", nargs=-1, required=True)
@click.option("--checkpoint", default="best", show_default=True,
              help="Of runs: latest, best or a checkpoint directory's name.")
@click.option("--dataset", help="In --datasets-dir, or owner/name on the hub.  [default: the"
                                " runs']")
@click.option("--split", type=click.Choice(["validation", "train"]), default="validation",
              show_default=True)
@click.option("--start-token", type=click.IntRange(min=0),
              help="[default: 50,000,000, or 0 where the file is smaller]")
@click.option("--tokens", "num_tokens", type=click.IntRange(min=1),
              help="[default: 19,660,800, or what there is]")
@click.option("--microbatch-size", type=click.IntRange(min=1), default=8, show_default=True,
              help="Sequences at a time; the figures do not depend on it.")
@click.option("--benchmark", type=(click.Choice(["hellaswag"]), str), metavar="NAME FILE",
              help="Score a benchmark instead: hellaswag, from a local file or a hub dataset.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
def command(**typed: Any) -> None:
    """Measure models on tokens that none of them was trained on; one table, lowest loss first.

    A target is a run, a directory of GPT-2 weights, or a model on the Hugging Face hub
    (owner/name). Under torchrun (torchrun --nproc_per_node=8 -m lab evaluate ...) the processes
    share the work. What is measured of a run goes into its evaluations.jsonl.
    """
    from lab.evaluate.sharing import sharing, speaks

    request = Request(**typed)
    with sharing() as share:
        rows = _score_all(request, share) if request.benchmark else _evaluate_all(request, share)
    if speaks():
        from tabulate import tabulate

        click.echo(tabulate(rows, headers="keys", disable_numparse=True,
                            colalign=["left"] + ["right"] * (len(rows[0]) - 1)))


def _evaluate_all(request: Request, share: Share) -> list[dict[str, str]]:
    """Give the table's rows, lowest loss first."""
    from lab.evaluate.held_out import choose_slice

    dataset = share.on(lambda: _dataset(request))
    file = share.one_by_one(lambda: _open(request, dataset))
    stretch = share.on(lambda: choose_slice(
        file, dataset, start_token=request.start_token, num_tokens=request.num_tokens))
    found = [_evaluate_one(request, name, file, stretch, share) for name in request.targets]
    return _sorted(found)


def _evaluate_one(request: Request, name: str, file: TokenFile, stretch: Slice,
                  share: Share) -> tuple[float, dict[str, str]]:
    """Give what a target is sorted by and its row. It is gone before the next one is loaded."""
    from lab.evaluate.held_out import check_tokenizer, evaluate

    target = share.one_by_one(lambda: _load(request, name, share))
    share.on(lambda: check_tokenizer(target, file))
    measured = evaluate(target, file, stretch, microbatch_size=request.microbatch_size,
                        share=share)
    _record(target, measured.as_record(), share)
    bits = measured.bits_per_byte
    return measured.loss, {
        "model": _title(target), "loss": f"{measured.loss:.6f}",
        "perplexity": f"{measured.perplexity:.3f}",
        "bits a byte": "-" if bits is None else f"{bits:.6f}",
        "tokens": f"{stretch.num_tokens:,}", "from": f"{stretch.start_token:,}",
        "of": f"{stretch.dataset} {stretch.split}",
    }


def _score_all(request: Request, share: Share) -> list[dict[str, str]]:
    """Give the table's rows, highest normalised accuracy first."""
    from lab.evaluate.hellaswag import read_questions

    share.on(lambda: _check_names(request))
    questions = share.one_by_one(lambda: read_questions(request.benchmark[1]))
    return _sorted([_score_one(request, name, questions, share) for name in request.targets])


def _score_one(request: Request, name: str, questions: list[Question],
               share: Share) -> tuple[float, dict[str, str]]:
    """Give what a target is sorted by and its row. It is gone before the next one is loaded."""
    from lab.evaluate.hellaswag import score

    target = share.one_by_one(lambda: _load(request, name, share))
    scored = score(target, questions, microbatch_size=request.microbatch_size, share=share)
    numbers = {"accuracy": scored.accuracy, "normalised_accuracy": scored.normalised_accuracy}
    _record(target, {"benchmark": request.benchmark[0], "questions": len(questions)} | numbers,
            share)
    return -scored.normalised_accuracy, {
        "model": _title(target),
        **{key.removesuffix("_accuracy"): f"{value:.4f} ± {scored.error_of(value):.4f}"
           for key, value in numbers.items()},
        "questions": f"{len(questions):,}",
    }


def _sorted(found: list[tuple[float, dict[str, str]]]) -> list[dict[str, str]]:
    """Put rows in order, those without a finite number last."""
    return [row for _, row in sorted(found, key=lambda item: (math.isnan(item[0]), item[0]))]


def _load(request: Request, name: str, share: Share) -> Target:
    from lab.targets import load_target

    return load_target(name, runs_dir=request.runs_dir, checkpoint_name=request.checkpoint,
                       device=share.process.device)


def _check_names(request: Request) -> None:
    """Refuse a mistyped target before the first one is measured."""
    from lab.targets import check_name

    for name in request.targets:
        check_name(name, request.runs_dir)


def _dataset(request: Request) -> str:
    _check_names(request)
    return request.dataset or _dataset_of_runs(request)


def _dataset_of_runs(request: Request) -> str:
    """Find the dataset that all runs among the targets were trained on. Raises: UserError."""
    from lab.targets import is_run
    from run_config import load_run

    found = {load_run(request.runs_dir, name).train.dataset: name
             for name in request.targets if is_run(name, request.runs_dir)}
    if len(found) != 1:
        which = " and ".join(f"{run} on {dataset}" for dataset, run in found.items())
        raise UserError(f"--dataset: name the tokens to evaluate on ({which or 'no run'} among the"
                        " targets says which); one for all, so that they can be compared")
    return next(iter(found))


def _open(request: Request, dataset: str) -> TokenFile:
    """Open the token file, fetched or made first where it is missing."""
    import re

    from preparation.ensure_dataset import provide_dataset
    from run_config import DATASET_NAME, check_inside
    from tokens.token_file import TokenFile

    if not re.fullmatch(DATASET_NAME, dataset):
        raise UserError(f"--dataset: {dataset[:60]!r} is not a plain name, or owner/name")
    dataset_dir = request.datasets_dir / dataset
    check_inside(dataset_dir, request.datasets_dir, "--datasets-dir")
    provide_dataset(dataset_dir, dataset)
    return TokenFile(dataset_dir / f"{request.split}.safetensors")


def _title(target: Target) -> str:
    return f"{target.name} ({target.checkpoint.name})" if target.checkpoint else target.name


def _record(target: Target, measured: dict[str, object], share: Share) -> None:
    """Keep what was measured of a run in its directory. Rank 0 writes."""
    if target.run is None or not share.process.is_main:
        return
    from basics.files import append_whole
    from basics.json_files import to_json

    record = {"target": target.name, "checkpoint": target.checkpoint.name,
              "global_step": target.checkpoint.meta.global_step} | measured
    record["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        append_whole(target.run.evaluations_path, to_json(record) + "\n")
    except OSError as error:
        click.echo(f"warning: not kept in {target.run.evaluations_path}:"
                   f" {error.strerror or error}", err=True)
