"""Load each target of `lab evaluate`, measure it, record the results, return the tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from basics.errors import UserError, print_error
from lab.evaluate.charts import draw_over_tokens
from lab.evaluate.held_out import Evaluation, check_tokenizer, evaluate, text_identity
from lab.evaluate.held_out_files import HeldOut, Tokens, open_held_out
from lab.evaluate.models import Chosen, choose_models, warn_of_skipped
from lab.evaluate.questions import Quiz, parse_task, read_quizzes
from lab.evaluate.results import Result, Row, TaskResult, loss_rows, task_rows
from lab.evaluate.scoring import encode_questions, score
from lab.runs import append_evaluation
from run_config import load_run
from trainer.models import LoadedModel, is_run, load_model


@dataclass(frozen=True)
class Request:
    """The command line's arguments and options.

    Attributes:
        checkpoints: of runs: `all`, or names separated by commas.
        tasks: NAME or NAME=FILE each.
    """

    targets: tuple[str, ...]
    checkpoints: str
    tasks: tuple[str, ...]
    measures_loss: bool
    microbatch_size: int
    tokens: Tokens


@dataclass(frozen=True)
class Work:
    """What to measure of each model."""

    held_out: HeldOut | None  # the loss
    quizzes: list[Quiz]
    microbatch_size: int


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        error: what ended the work early, None if nothing did.
    """

    results: list[Result]
    work: Work
    error: UserError | None = None

    def tables(self) -> list[list[Row]]:
        """Return the table of losses, that of the tasks, or both; none without results."""
        held_out, quizzes = self.work.held_out, self.work.quizzes
        tables = [loss_rows(self.results, by_bits=held_out.differ)] if held_out else []
        tables += [task_rows(self.results, quizzes)] if quizzes else []
        return [table for table in tables if table]

    def document(self) -> dict[str, object]:
        """Return the results for scripts, in the order of the command line."""
        return {"schema": "evaluate/1", "models": [one.as_document() for one in self.results]}


def measure_all(request: Request) -> Measured:
    """Measure every model; an error ends the work, but loses no result.

    Raises:
        UserError: a target, the tokens or the questions cannot be used; nothing was measured.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("lab evaluate uses one process: start it without torchrun; of several GPUs"
                        " give each its own targets, with CUDA_VISIBLE_DEVICES")
    runs_dir = request.tokens.runs_dir
    models = choose_models(request.targets, request.checkpoints, runs_dir)
    wanted = [parse_task(text) for text in request.tasks]
    names = list(dict.fromkeys(model.name for model in models))
    work = Work(open_held_out(request.tokens, names) if request.measures_loss else None,
                read_quizzes(wanted), request.microbatch_size)
    results: list[Result] = []
    for model in models:
        try:
            results += _measure(model, runs_dir, work)
        except UserError as error:
            return Measured(results, work, error)
    return Measured(results, work, None if results else UserError("no checkpoint could be read"))


def _measure(model: Chosen, runs_dir: Path, work: Work) -> list[Result]:
    """Measure one model, which is freed before the next one is loaded.

    Returns no result if it is one of all checkpoints, and cannot be loaded.
    """
    try:
        target = _load(model, runs_dir)
    except UserError as error:
        if not model.is_optional:
            raise
        warn_of_skipped(error)
        return []
    result = _describe(target)
    # Errors of the questions come before any work.
    texts = [encode_questions(target, quiz.questions) for quiz in work.quizzes]
    if work.held_out:
        result.evaluation = _evaluate(target, work)
    for quiz, encoded in zip(work.quizzes, texts, strict=True):
        scored = score(target, quiz.questions, encoded, microbatch_size=work.microbatch_size)
        found = result.tasks[quiz.name] = TaskResult.of(quiz, scored)
        if scored.num_cut:
            print_error(f"warning: {quiz.name}: {scored.num_cut:,} texts are longer than the"
                        f" context of {target.name} and lost their beginning, as in lm-eval")
        _record(target, found.as_record())
    return [result]


def _load(model: Chosen, runs_dir: Path) -> LoadedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = model.checkpoint
    if is_run(model.name, runs_dir):
        directory = load_run(runs_dir, model.name).checkpoints_dir
        checkpoint = checkpoint if (directory / checkpoint).is_dir() else model.asked_for
    return load_model(model.name, runs_dir=runs_dir, checkpoint_name=checkpoint, device=device)


def _describe(target: LoadedModel) -> Result:
    """Return a result without figures."""
    checkpoint = target.checkpoint
    title = f"{target.name} ({checkpoint.name})" if checkpoint else target.name
    return Result(target.name, title, target.run.run_dir if target.run else None,
                  checkpoint.meta.tokens if checkpoint else 0,
                  checkpoint=checkpoint and checkpoint.name)


def _evaluate(target: LoadedModel, work: Work) -> Evaluation:
    file, token_slice = work.held_out.of(target.name)
    check_tokenizer(target, file)
    measured = evaluate(target, file, token_slice, microbatch_size=work.microbatch_size)
    _record(target, measured.as_record() | {
        "tokenizer": target.tokenizer_name, "text": text_identity(file, token_slice)})
    return measured


def _record(target: LoadedModel, measured: dict[str, object]) -> None:
    """Append a run's results to its evaluations.jsonl."""
    if target.run is None:
        return
    record = {"target": target.name, "checkpoint": target.checkpoint.name,
              "global_step": target.checkpoint.meta.global_step,
              "trained_tokens": target.checkpoint.meta.tokens} | measured
    append_evaluation(target.run.evaluations_path, record)


def draw(results: list[Result]) -> None:
    """Draw the charts of runs with several results; a failure is only a warning."""
    try:
        for path in draw_over_tokens(results):
            print_error(f"chart: {path}")
    except OSError as error:
        print_error(f"warning: no chart: {error}")
