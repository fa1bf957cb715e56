"""`lab judge`: a language model scores the answers of other models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from basics.checkpoint_files import CHECKPOINT_NAME
from basics.errors import UserError, one_line, visible
from lab.instruct.comparison import Comparison, Judgements, UnusableReplyError, compare
from lab.instruct.instructions import AnswersFile, Entry, load_answers
from lab.runs import append_evaluation, last_judged, read_evaluations

if TYPE_CHECKING:
    from lab.instruct.judging import Judge

NUM_RESAMPLES = 2_000
INTERVAL_PERCENT = (2.5, 97.5)


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True,
                type=click.Path(path_type=Path))
@click.option("--model", required=True, help="The judge's name at its endpoint.")
@click.option("--base-url", envvar="OPENAI_BASE_URL", metavar="URL",
              help="An OpenAI-compatible endpoint: http://localhost:8000/v1.  [default: OpenAI's]")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE",
              help="Save judgements here.  [default: judgements.jsonl beside the first FILE]")
@click.option("--concurrency", type=click.IntRange(1, 64), default=4, show_default=True,
              help="Number of concurrent requests.")
@click.option("--seed", type=click.IntRange(min=0), default=42, show_default=True,
              help="Seed of the order of the answers and of the intervals.")
def command(files: tuple[Path, ...], model: str, base_url: str | None, output: Path | None,
            concurrency: int, seed: int) -> None:
    """Have a judge score the answers in each FILE, as `lab tune` writes them.

    The judge sees all models' answers to a question in one request, in shuffled order and without
    the models' names. The key is read from OPENAI_API_KEY; your own server may need none. Each
    judgement is saved at once: the same command continues where an earlier one stopped, and
    repeats the questions that failed. The score of answers that lie in their run's directory is
    added to its evaluations.jsonl: `lab compare` shows it.
    """
    by_name = _by_name(files)
    comparisons = [compare(question, answers, judge_model=model, seed=seed)
                   for question, answers in _questions(by_name)]
    judgements = Judgements(output or files[0].parent / "judgements.jsonl")
    missing = {c.key: c for c in comparisons if judgements.scores(c) is None}
    reason = ""
    if missing:
        judgements.check_writable()
        judge = _new_judge(base_url, model)
        judge.check_reachable()
        reason = judge_all(judge, missing.values(), judgements, concurrency=concurrency)
    found = _summaries(comparisons, judgements, reason=reason, seed=seed)
    for line in _report(found, len(comparisons), judgements, model=model, reason=reason):
        click.echo(visible(line))
    for one in found:
        _record(one, *by_name[one.model], judge_model=model)


def _new_judge(base_url: str | None, model: str) -> Judge:
    """Return the judge. Raises: UserError: a bad key or address, or no openai package."""
    try:
        from lab.instruct.judging import Judge  # needs an optional package
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise UserError("lab judge needs the openai package: run `uv sync --extra judge`"
                        " (or pip install \"ddp-train[judge]\")") from None
    return Judge(base_url, model)


def _by_name(paths: tuple[Path, ...]) -> dict[str, tuple[Path, AnswersFile]]:
    """Read all files, by model name; by path if several files are of the same model.

    However a path is typed, the file has the same name: it is part of the judgements' keys.
    """
    paths = tuple(Path(os.path.realpath(path)) for path in paths)
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"{twice}: is given twice; give each file once")
    loaded = [(path, load_answers(path)) for path in paths]
    names = [answers.model for _, answers in loaded]
    return {str(path) if names.count(answers.model) > 1 else answers.model: (path, answers)
            for path, answers in loaded}


def _questions(
    files: dict[str, tuple[Path, AnswersFile]]
) -> Iterator[tuple[Entry, dict[str, str]]]:
    """Yield each question with the answers to it, by model.

    Raises:
        UserError: a file has other questions than the first one.
    """
    (first_path, first), *_ = files.values()
    for path, other in files.values():
        if len(other.answers) != len(first.answers):
            raise UserError(f"{path}: has {len(other.answers)} questions, {first_path} has"
                            f" {len(first.answers)}; tune all models on the same data")
    for number, question in enumerate(first.answers):
        for path, other in files.values():
            if _asked(other.answers[number]) != _asked(question):
                raise UserError(f"{path}: question {number + 1} differs from that of {first_path};"
                                " tune all models on the same data")
        yield question, {name: other.answers[number].answer for name, (_, other) in files.items()}


def _asked(entry: Entry) -> tuple[str, str, str]:
    return entry.instruction, entry.input, entry.output


def judge_all(judge: Judge, comparisons: Iterable[Comparison], judgements: Judgements, *,
              concurrency: int) -> str:
    """Judge all comparisons concurrently; return the reason of the first failure, or "".

    Raises:
        UserError: nothing more can be judged. Completed requests and those in flight are saved.
    """
    from tqdm import tqdm

    reason = ""
    pool = ThreadPoolExecutor(concurrency)
    asked = {pool.submit(judge.score, comparison): comparison for comparison in comparisons}
    try:
        for future in tqdm(as_completed(asked), total=len(asked), unit="question",
                           desc="judging", disable=None, leave=False):
            try:
                judgements.add(asked[future], future.result(), judge_model=judge.model)
            except UnusableReplyError as error:
                reason = reason or str(error)
            del asked[future]
    finally:  # after an error or Ctrl-C, send no more requests
        judge.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        _save_rest(asked, judgements, judge)
    return reason


def _save_rest(asked: dict[Future, Comparison], judgements: Judgements, judge: Judge) -> None:
    """Save the replies that arrive after an early stop: they are paid for."""
    rest = [future for future in asked if not future.cancelled()]
    if num_missing := sum(not future.done() for future in rest):
        click.echo(f"waiting for {num_missing} requests in flight", err=True)
    for future in as_completed(rest):
        if future.exception() is None:
            judgements.add(asked[future], future.result(), judge_model=judge.model)


@dataclass(frozen=True)
class Scored:
    """A model's result; the interval is None for a single question."""

    model: str
    mean: float
    interval: tuple[float, float] | None
    num_questions: int


def _summaries(comparisons: list[Comparison], judgements: Judgements, *, reason: str,
               seed: int) -> list[Scored]:
    """Return the models' results, the best first. Raises: UserError if no question was judged."""
    judged = [scores for c in comparisons if (scores := judgements.scores(c)) is not None]
    if not judged:
        raise UserError(f"none of {len(comparisons)} questions was judged; the first failure:"
                        f" {reason}")
    found = [summarise(model, [scores[model] for scores in judged], seed=seed)
             for model in judged[0]]
    return sorted(found, key=lambda one: (-one.mean, one.model))


def _report(found: list[Scored], num_asked: int, judgements: Judgements, *, model: str,
            reason: str) -> Iterator[str]:
    """Yield the lines to print."""
    from tabulate import tabulate

    rows = [(one_line(one.model), one.mean,
             "{:.2f} to {:.2f}".format(*one.interval) if one.interval else "-") for one in found]
    yield tabulate(rows, headers=["model", "mean score", "95% interval"], floatfmt=".2f",
                   disable_numparse=[0, 2])
    yield ""
    num_judged = found[0].num_questions
    yield (f"{num_judged} of {num_asked} questions judged by {model},"
           f" {num_asked - num_judged} failed; judgements in {judgements.path}")
    if reason:
        yield f"first failure: {one_line(reason)}; run the same command to repeat it"


def _record(found: Scored, path: Path, answers: AnswersFile, *, judge_model: str) -> None:
    """Add a score to its run's records, if the answers are in its directory; once."""
    run_dir = path.parent
    if run_dir.name != answers.model or not (run_dir / "model.json").is_file():
        return
    named = CHECKPOINT_NAME.fullmatch(answers.checkpoint or "")
    step = {"global_step": int(named[1])} if named else {}  # a launch drops those of later steps
    record = step | {
        "target": answers.model, "checkpoint": answers.checkpoint, "judge": judge_model,
        "score": found.mean, "score_interval": found.interval and [*found.interval],
        "questions": found.num_questions}
    known = last_judged(read_evaluations(run_dir))
    if any(known.get(key) != value for key, value in record.items()):
        append_evaluation(run_dir / "evaluations.jsonl", record)


def summarise(model: str, scores: list[float], *, seed: int) -> Scored:
    """Return the mean and its 95% bootstrap confidence interval.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3.
    """
    import numpy as np

    if len(scores) < 2:
        return Scored(model, scores[0], None, 1)
    generator = np.random.default_rng(seed)  # the same questions are drawn for every model
    values = np.asarray(scores)
    means = [generator.choice(values, len(values)).mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(means, INTERVAL_PERCENT)
    return Scored(model, float(values.mean()), (float(low), float(high)), len(scores))
