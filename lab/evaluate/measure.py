"""Choose the models of `lab evaluate`, load each of them, measure it and record the results."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from basics.checkpoint_files import directory_of, named_as_checkpoints
from basics.errors import UserError, one_line, print_error
from checkpointing import find_checkpoint, open_checkpoint
from lab.evaluate.held_out import Options, Slice, evaluate, open_held_out
from lab.evaluate.results import Measurement, Result
from lab.evaluate.scoring import encode_questions, score
from lab.evaluate.tasks import Quiz, parse_task, read_quiz
from lab.runs import append_evaluation
from run_config import load_run
from trainer.models import LoadedModel, check_name, is_run, load_model


@dataclass(frozen=True)
class Chosen:
    """A target by its name, and of a run one of its checkpoints: `latest`, `best` or its name.

    Attributes:
        is_optional: it is one of all, so that it may be missing or damaged.
    """

    name: str
    checkpoint: str = ""
    is_optional: bool = False


def measure_all(targets: tuple[str, ...], options: Options) -> Iterator[Result]:
    """Measure every model, which is freed before the next one is loaded.

    Raises:
        UserError: a target, the tokens or the questions cannot be used. Before the first result,
            nothing was measured; later the results so far are good.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("lab evaluate uses one process: start it without torchrun; of several GPUs"
                        " give each its own targets, with CUDA_VISIBLE_DEVICES")
    runs_dir = options.runs_dir
    models = choose_models(targets, options.checkpoints, runs_dir)
    wanted = [parse_task(text) for text in options.tasks]
    names = list(dict.fromkeys(model.name for model in models))
    slices = open_held_out(options, names) if options.with_loss or not wanted else {}
    quizzes = [read_quiz(name, source) for name, source in wanted]
    quiz_names = [quiz.name for quiz in quizzes]
    if twice := [name for name in quiz_names if quiz_names.count(name) > 1]:
        raise UserError(f"--task: {twice[0]} is there twice; give it once")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    done: set[tuple[str, str | None]] = set()
    for model in models:
        try:
            target = load_model(model.name, runs_dir=runs_dir, checkpoint_name=model.checkpoint,
                                device=device)
        except UserError as error:
            if not model.is_optional:
                raise
            _warn_of_skipped(error)
            continue
        result = _result_of(target)
        if (result.name, result.checkpoint) not in done:
            done.add((result.name, result.checkpoint))
            _measure(target, result, slices.get(model.name), quizzes, options.microbatch_size)
            yield result
        del target
    if not done:
        raise UserError("no checkpoint could be read")


def choose_models(names: tuple[str, ...], checkpoints: str, runs_dir: Path) -> list[Chosen]:
    """Return all models that are asked for; warn about damaged checkpoints of all.

    Args:
        names: targets; RUN@CHECKPOINT chooses this run's own checkpoints.
        checkpoints: of runs: `all`, or names separated by commas.

    Raises:
        UserError: one does not exist, or is damaged.
    """
    found: list[Chosen] = []
    for text in names:
        name, _, own = text.partition("@")
        if not own or is_run(text, runs_dir) or directory_of(Path(text)).is_dir():
            name, own = text, ""  # a directory may have an @ in its name
        check_name(name, runs_dir)
        if is_run(name, runs_dir):
            run = load_run(runs_dir, name)
            found += _checkpoints(name, own or checkpoints, run.checkpoints_dir)
        elif own:
            raise UserError(f"{text}: {name} is no run, so it has no checkpoints; give"
                            f" {name} alone")
        else:
            found.append(Chosen(name))
    return found


def _checkpoints(run_name: str, wanted: str, directory: Path) -> list[Chosen]:
    """Open the checkpoints of a run; those of `all` only quickly. Raises: UserError."""
    found = []
    if wanted == "all":
        for path in named_as_checkpoints(directory):
            try:
                found.append(Chosen(run_name, open_checkpoint(path).name, is_optional=True))
            except UserError as error:
                _warn_of_skipped(error)
    else:
        found = [Chosen(run_name, name) for name in wanted.split(",")
                 if find_checkpoint(directory, name)]
    if not found:
        raise UserError(f"{directory}: no checkpoint yet; train the run first")
    return found


def _warn_of_skipped(error: UserError) -> None:
    print_error(f"warning: left out: {one_line(str(error))}")


def _result_of(target: LoadedModel) -> Result:
    """Return a result without figures."""
    run, checkpoint = target.run, target.checkpoint
    return Result(target.name, checkpoint and checkpoint.name, run and run.run_dir,
                  checkpoint and checkpoint.meta.tokens)


def _measure(target: LoadedModel, result: Result, part: Slice | None, quizzes: list[Quiz],
             microbatch_size: int) -> None:
    """Measure the loss, if a slice is given, and the tasks; record what is measured of a run."""
    # Errors of the questions come before any work.
    texts = [encode_questions(target, quiz.questions) for quiz in quizzes]
    if part is not None:
        result.loss = evaluate(target, part, microbatch_size=microbatch_size)
        _record(target, result.loss.as_record() | {
            "tokenizer": target.tokenizer_name, "text": part.text_identity()})
    for quiz, encoded in zip(quizzes, texts, strict=True):
        answers = score(target, quiz.questions, encoded, microbatch_size=microbatch_size)
        num_cut = sum(text.is_cut for of_one in encoded for text in of_one)
        result.tasks.append(Measurement(
            {"benchmark": quiz.name, "questions": len(quiz.questions),
             "questions_from": quiz.source, "split": quiz.split, "cut_texts": num_cut},
            {key: figure(answers) for key, figure in quiz.task.figures.items()}))
        if num_cut:
            print_error(f"warning: {quiz.name}: {num_cut:,} texts are longer than the context of"
                        f" {target.name} and lost their beginning, as in lm-eval")
        _record(target, result.tasks[-1].as_record())


def _record(target: LoadedModel, measured: dict[str, Any]) -> None:
    """Append a run's results to its evaluations.jsonl."""
    if target.run is None:
        return
    record = {"target": target.name, "checkpoint": target.checkpoint.name,
              "global_step": target.checkpoint.meta.global_step,
              "trained_tokens": target.checkpoint.meta.tokens} | measured
    append_evaluation(target.run.evaluations_path, record)
