"""Load each target of `lab evaluate`, measure it, record the result, return the table."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass
from pathlib import Path

import click

from basics.errors import UserError
from basics.files import append_whole
from basics.json_files import to_json
from lab.evaluate.held_out import Slice, check_tokenizer, choose_slice, evaluate
from lab.evaluate.hellaswag import Question, read_questions, score
from lab.evaluate.sharing import Share
from lab.targets import Target, check_name, is_run, load_target
from preparation.ensure_dataset import provide_dataset
from run_config import DATASET_NAME, check_inside, load_run
from tokens.token_file import TokenFile

Row = dict[str, str]  # of the table: cells by heading


@dataclass(frozen=True)
class Request:
    """The command line's arguments and options."""

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


def evaluate_all(request: Request, share: Share) -> list[Row]:
    """Measure the loss of every target; return the table, lowest loss first. Every rank."""
    share.run(lambda: _check_names(request))
    dataset = share.run(lambda: request.dataset or _dataset_of_runs(request))
    file = share.run_first_on_each_node(lambda: _open(request, dataset))
    token_slice = share.run(lambda: choose_slice(
        file, dataset, start_token=request.start_token, num_tokens=request.num_tokens))
    return _sorted([_evaluate_one(request, name, file=file, token_slice=token_slice, share=share)
                    for name in request.targets])


def score_all(request: Request, share: Share) -> list[Row]:
    """Score every target on the benchmark; return the table, best score first. Every rank."""
    share.run(lambda: _check_names(request))
    questions = share.run_first_on_each_node(lambda: read_questions(request.benchmark[1]))
    return _sorted([_score_one(request, name, questions=questions, share=share)
                    for name in request.targets])


def _evaluate_one(request: Request, name: str, *, file: TokenFile, token_slice: Slice,
                  share: Share) -> tuple[float, Row]:
    """Return a sort key and the row. The model is freed before the next one is loaded."""
    target = _load(request, name, share)
    share.run(lambda: check_tokenizer(target, file))
    measured = evaluate(target, file, token_slice, microbatch_size=request.microbatch_size,
                        share=share)
    _record(target, measured.as_record(), share)
    bits = measured.bits_per_byte
    return measured.loss, {
        "model": _title(target), "loss": f"{measured.loss:.6f}",
        "perplexity": f"{measured.perplexity:.3f}",
        "bits per byte": "-" if bits is None else f"{bits:.6f}",
        "tokens": f"{token_slice.num_tokens:,}", "start token": f"{token_slice.start_token:,}",
        "dataset": f"{token_slice.dataset} {token_slice.split}",
    }


def _score_one(request: Request, name: str, *, questions: list[Question],
               share: Share) -> tuple[float, Row]:
    """Return a sort key and the row. The model is freed before the next one is loaded."""
    target = _load(request, name, share)
    scored = score(target, questions, microbatch_size=request.microbatch_size, share=share)
    numbers = {"accuracy": scored.accuracy, "normalised_accuracy": scored.normalised_accuracy}
    _record(target, {"benchmark": request.benchmark[0], "questions": len(questions)} | numbers,
            share)
    return -scored.normalised_accuracy, {
        "model": _title(target),
        **{key.replace("_", " "): f"{value:.4f} ± {scored.standard_error(value):.4f}"
           for key, value in numbers.items()},
        "questions": f"{len(questions):,}",
    }


def _sorted(found: list[tuple[float, Row]]) -> list[Row]:
    """Sort the rows by their keys, NaN last."""
    return [row for _, row in sorted(found, key=lambda item: (math.isnan(item[0]), item[0]))]


def _load(request: Request, name: str, share: Share) -> Target:
    return share.run_first_on_each_node(lambda: load_target(
        name, runs_dir=request.runs_dir, checkpoint_name=request.checkpoint,
        device=share.process.device))


def _check_names(request: Request) -> None:
    """Refuse a target that does not exist before the first one is measured."""
    for name in request.targets:
        check_name(name, request.runs_dir)


def _dataset_of_runs(request: Request) -> str:
    """Find the dataset that all runs among the targets were trained on. Raises: UserError."""
    found = {load_run(request.runs_dir, name).train.dataset: name
             for name in request.targets if is_run(name, request.runs_dir)}
    if len(found) != 1:
        which = " and ".join(f"{run} on {dataset}" for dataset, run in found.items())
        which = f"the targets were trained on different ones: {which}" if which else (
            "no target is a run")
        raise UserError(f"--dataset: name the dataset to evaluate all targets on ({which})")
    return next(iter(found))


def _open(request: Request, dataset: str) -> TokenFile:
    """Open the token file; download or prepare it first if it is missing."""
    if not re.fullmatch(DATASET_NAME, dataset):
        raise UserError(f"--dataset: {dataset[:60]!r} is not a plain name, or owner/name")
    dataset_dir = request.datasets_dir / dataset
    check_inside(dataset_dir, request.datasets_dir, "--datasets-dir")
    provide_dataset(dataset_dir, dataset)
    return TokenFile(dataset_dir / f"{request.split}.safetensors")


def _title(target: Target) -> str:
    return f"{target.name} ({target.checkpoint.name})" if target.checkpoint else target.name


def _record(target: Target, measured: dict[str, object], share: Share) -> None:
    """Append a run's results to its evaluations.jsonl. Rank 0 writes."""
    if target.run is None or not share.process.is_main:
        return
    record = {"target": target.name, "checkpoint": target.checkpoint.name,
              "global_step": target.checkpoint.meta.global_step} | measured
    record["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        append_whole(target.run.evaluations_path, to_json(record) + "\n")
    except OSError as error:
        click.echo(f"warning: result not saved: {target.run.evaluations_path}:"
                   f" {error.strerror or error}", err=True)
