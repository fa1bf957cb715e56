"""Load each target of `lab evaluate`, measure it, record the result, return the table."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass
from pathlib import Path

from basics.errors import UserError, print_error
from basics.files import append_whole
from basics.json_files import to_json
from lab.evaluate.held_out import (
    Evaluation,
    Slice,
    check_tokenizer,
    choose_slice,
    evaluate,
    text_identity,
)
from lab.evaluate.hellaswag import Question, read_questions, score
from lab.evaluate.sharing import Share
from preparation.ensure_dataset import provide_dataset
from run_config import DATASET_NAME, check_inside, load_run
from tokens.token_file import TokenFile
from trainer.targets import Target, check_name, is_run, load_target

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
    """Measure the loss of every target; return the table, lowest loss first. Every rank.

    Runs whose datasets are the same text in other tokens are measured on all of it, each on its
    own dataset; the fewest bits per byte come first.
    """
    share.run(lambda: _check_names(request))
    datasets = share.run(lambda: _datasets(request))  # of each target
    files = {dataset: share.run_first_on_each_node(lambda name=dataset: _open(request, name))
             for dataset in dict.fromkeys(datasets)}
    slices = share.run(lambda: _slices(request, files))
    found = [
        _evaluate_one(request, name, file=files[dataset], token_slice=slices[dataset], share=share)
        for name, dataset in zip(request.targets, datasets, strict=True)]
    return _sorted([(measured.loss if len(files) == 1 else measured.bits_per_byte or math.nan, row)
                    for measured, row in found])


def _slices(request: Request, files: dict[str, TokenFile]) -> dict[str, Slice]:
    """Choose the tokens of each dataset. Raises: UserError: they would not be the same text."""
    start_token, num_tokens = request.start_token, request.num_tokens
    if len(files) == 1:
        return {dataset: choose_slice(file, dataset, start_token=start_token,
                                      num_tokens=num_tokens) for dataset, file in files.items()}
    facts = [file.metadata for file in files.values()]
    if not _are_of_same_text(facts) or len({f.get("tokenizer") for f in facts}) < len(facts):
        raise _different_datasets(" and ".join(files))
    if start_token is not None or num_tokens is not None:
        raise UserError("--start-token and --tokens would choose different text in the datasets of"
                        " these runs; leave them out, or name one with --dataset")
    return {dataset: choose_slice(file, dataset, start_token=0, num_tokens=file.num_tokens - 1)
            for dataset, file in files.items()}


def _are_of_same_text(facts: list[dict[str, str]]) -> bool:
    """Return whether token files, by their metadata, are the same text in different tokens.

    Files that an earlier version wrote do not tell their bytes of text.
    """
    texts = {tuple(fact.get(key) for key in ("source", "revision", "num_documents"))
             for fact in facts}
    return len(texts) == 1 and len({fact["num_text_bytes"] for fact in facts
                                    if "num_text_bytes" in fact}) <= 1


def score_all(request: Request, share: Share) -> list[Row]:
    """Score every target on the benchmark; return the table, best score first. Every rank."""
    share.run(lambda: _check_names(request))
    questions = share.run_first_on_each_node(lambda: read_questions(request.benchmark[1]))
    return _sorted([_score_one(request, name, questions=questions, share=share)
                    for name in request.targets])


def _evaluate_one(request: Request, name: str, *, file: TokenFile, token_slice: Slice,
                  share: Share) -> tuple[Evaluation, Row]:
    """Return the result and its row. The model is freed before the next one is loaded."""
    target = _load(request, name, share)
    share.run(lambda: check_tokenizer(target, file))
    measured = evaluate(target, file, token_slice, microbatch_size=request.microbatch_size,
                        share=share)
    _record(target, measured.as_record() | {
        "tokenizer": target.tokenizer_name, "text": text_identity(file, token_slice)}, share)
    bits = measured.bits_per_byte
    return measured, {
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


def _datasets(request: Request) -> list[str]:
    """Return the dataset of each target: the one of its run, or of all runs. Raises: UserError."""
    names = request.targets
    if request.dataset:
        return [request.dataset] * len(names)
    own = [load_run(request.runs_dir, name).train.dataset if is_run(name, request.runs_dir)
           else None for name in names]
    found = set(own) - {None}
    if not found:
        raise UserError("--dataset: name the dataset to evaluate all targets on (no target is a"
                        " run)")
    if len(found) > 1 and None in own:
        raise _different_datasets(" and ".join(sorted(found)))
    return [dataset or next(iter(found)) for dataset in own]


def _different_datasets(which: str) -> UserError:
    return UserError("--dataset: name the dataset to evaluate all targets on (the targets were"
                     f" trained on different ones: {which})")


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
        print_error(f"warning: result not saved: {target.run.evaluations_path}:"
                    f" {error.strerror or error}")
