"""`lab judge`: a language model scores the answers of other models."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import click
import numpy as np
from pydantic import TypeAdapter
from tqdm import tqdm

from basics.checkpoint_files import CHECKPOINT_NAME
from basics.cli import PLACE, RUNS_DIR
from basics.errors import UserError, one_line, visible, writing_to
from basics.files import append_whole
from basics.json_files import parsed_object
from basics.text import counted
from lab.instruct.instructions import AnswersFile, check_writable, read_entries
from lab.instruct.judge_endpoint import Judge, JudgedQuestion, UnusableReplyError, compare
from lab.runs import EVALUATIONS, Record, append_evaluation, is_launched
from lab.table import Column, Table

LINE_START = b'{"key":"'  # of every line of a file of judgements
NUM_RESAMPLES = 2_000
INTERVAL_PERCENT = (2.5, 97.5)
Judgements = dict[str, dict[str, float]]  # each model's score, by the key of the comparison
Score = tuple[float, tuple[float, float] | None]  # the mean and its interval


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=PLACE)
@click.option("--model", required=True, help="The judge's name at its endpoint.")
@click.option(
    "--base-url",
    envvar="OPENAI_BASE_URL",
    metavar="URL",
    help="An OpenAI-compatible endpoint: http://localhost:8000/v1.  [default: OpenAI's]",
)
@click.option(
    "--output",
    type=PLACE,
    metavar="FILE",
    help="Save judgements here.  [default: judgements.jsonl beside the first FILE]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Number of concurrent requests.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=42,
    show_default=True,
    help="Seed of the order of the answers and of the intervals.",
)
@RUNS_DIR
def command(
    files: tuple[Path, ...],
    model: str,
    base_url: str | None,
    output: Path | None,
    concurrency: int,
    seed: int,
    runs_dir: Path,
) -> None:
    """Have a judge score the answers in each FILE, as `lab tune` writes them.

    Needs the extra judge: uv run --extra judge lab judge ...

    The judge sees all models' answers to a question in one request, in shuffled order and without
    the models' names. The key is read from OPENAI_API_KEY; your own server may need none. Each
    judgement is saved at once: the same command continues where an earlier one stopped, and
    repeats the questions that failed. The score of a run is added to its evaluations.jsonl, that of
    another model to the one in --runs-dir: `lab compare` shows it.
    """
    by_name = _by_name(files)
    comparisons = _comparisons(by_name, judge_model=model, seed=seed)
    path = output or files[0].parent / "judgements.jsonl"
    known = read_judgements(path)

    # A question that occurs twice, with the same answers, has one key and is judged once.
    missing = {each.key: each for each in comparisons if each.key not in known}
    first_failure = ""
    if missing:
        check_writable(path)  # before any request is paid for
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):  # a kill has cut it short
            append_whole(path, "\n")
        judge = Judge(base_url, model)
        waiting = list(missing.values())
        first_failure = judge_all(judge, waiting, path, known, concurrency=concurrency)

    judged = [known[each.key] for each in comparisons if each.key in known]
    num_judged, num_questions = len(judged), len(comparisons)
    if not judged:
        raise UserError(
            f"none of {counted(num_questions, 'question')} was judged; the first"
            f" failure: {first_failure}"
        )
    scores = {name: summarise([one[name] for one in judged], seed=seed) for name in by_name}
    counts = (
        f"{num_judged} of {num_questions} questions judged by {model},"
        f" {num_questions - num_judged} failed; judgements in {path}"
    )
    click.echo(visible(f"{_table(scores).terminal()}\n\n{counts}"))
    if first_failure:
        click.echo(f"first failure: {one_line(first_failure)}; run the same command to repeat it")

    for name, (answers_path, file) in by_name.items():
        evaluations = _evaluations_of(answers_path, file, runs_dir)
        is_of_run = evaluations != runs_dir / EVALUATIONS
        score, interval = scores[name]
        record: Record = {
            "target": file.model if is_of_run else name,
            "checkpoint": file.checkpoint,
            "judge": model,
            "score": score,
            "score_interval": interval,
            "questions": num_judged,
        }
        if step := CHECKPOINT_NAME.fullmatch(file.checkpoint or ""):
            record["global_step"] = int(step[1])  # a launch drops records of later steps
        append_evaluation(evaluations, record)


def _comparisons(
    by_name: dict[str, tuple[Path, AnswersFile]], *, judge_model: str, seed: int
) -> list[JudgedQuestion]:
    """Return what is to be judged: each question with the answers of all files to it."""
    _, first = next(iter(by_name.values()))
    comparisons = []
    for number, question in enumerate(first.answers):
        answers = {name: file.answers[number].answer for name, (_, file) in by_name.items()}
        comparisons.append(compare(question, answers, judge_model=judge_model, seed=seed))
    return comparisons


def _evaluations_of(answers_path: Path, file: AnswersFile, runs_dir: Path) -> Path:
    """Return the file of the run that gave the answers; of a model that is no run, of all runs."""
    directory = answers_path.parent
    if directory.name == file.model and (directory / "model.json").is_file():
        return directory / EVALUATIONS
    if is_launched(runs_dir, file.model):
        return runs_dir / file.model / EVALUATIONS
    return runs_dir / EVALUATIONS


def _table(scores: dict[str, Score]) -> Table:
    """Return the table of scores, the best first; of equal means by name."""
    rows = []
    for name, (mean, interval) in sorted(scores.items(), key=lambda item: (-item[1][0], item[0])):
        shown = "{:.2f} to {:.2f}".format(*interval) if interval else "-"
        rows.append([one_line(name), f"{mean:.2f}", shown])
    columns = [Column("model", "left"), Column("mean score"), Column("95% interval", "left")]
    return Table(columns, rows)


def _by_name(paths: tuple[Path, ...]) -> dict[str, tuple[Path, AnswersFile]]:
    """Read all files, by model name; by path if several files are of the same model.

    However a path is typed, the file has the same name: it is part of the judgements' keys.
    """
    loaded = {
        path: read_entries(path, TypeAdapter(AnswersFile))[1]
        for path in dict.fromkeys(Path(os.path.realpath(path)) for path in paths)
    }
    names = [answers.model for answers in loaded.values()]
    questions = {
        path: [entry.model_dump(exclude={"answer"}) for entry in answers.answers]
        for path, answers in loaded.items()
    }
    first_path, first = next(iter(questions.items()))
    for path, asked in questions.items():
        if asked != first:
            raise UserError(
                f"{path}: its {len(asked)} questions are not the {len(first)} of"
                f" {first_path}; tune all models on the same data"
            )
    return {
        str(path) if names.count(answers.model) > 1 else answers.model: (path, answers)
        for path, answers in loaded.items()
    }


def read_judgements(path: Path) -> Judgements:
    """Return the judgements in a file; skip a line that a kill has cut short. Raises: UserError."""
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; name another file with --output"
        ) from None
    if not LINE_START.startswith(content[: len(LINE_START)]):
        raise UserError(f"{path}: line 1 is not a judgement; name another file with --output")
    lines = map(parsed_object, content.decode(errors="replace").split("\n"))
    return {line["key"]: line["scores"] for line in lines if line.keys() >= {"key", "scores"}}


def judge_all(
    judge: Judge,
    comparisons: list[JudgedQuestion],
    path: Path,
    known: Judgements,
    *,
    concurrency: int,
) -> str:
    """Judge all comparisons concurrently; return the reason of the first failure, or "".

    Each judgement is added to `known` and to its file at once, also of requests in flight when an
    error or Ctrl-C ends the others: no question is paid for twice. Raises: UserError.
    """
    one_writer = threading.Lock()
    reason = ""

    def work(comparison: JudgedQuestion) -> None:
        if judge.stopped.is_set():
            return
        try:
            scores = judge.score(comparison)
        except UserError:  # it ends all: without this the thread sends the next request first
            judge.stopped.set()
            raise
        line = {
            "key": comparison.key,
            "judge": judge.model,
            "order": [*comparison.labels.values()],
            "instruction": comparison.question.instruction,
            "scores": scores,
        }
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
        with writing_to(path), one_writer:
            append_whole(path, text)
        known[comparison.key] = scores

    pool = ThreadPoolExecutor(concurrency)
    asked = [pool.submit(work, comparison) for comparison in comparisons]
    try:
        for future in tqdm(
            as_completed(asked),
            total=len(asked),
            unit="question",
            desc="judging",
            disable=None,
            leave=False,
        ):
            try:
                future.result()
            except UnusableReplyError as error:
                reason = reason or str(error)
    finally:  # send no more requests, but save the replies that are paid
        judge.stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        if num_left := sum(not future.done() for future in asked):
            click.echo(f"waiting for {num_left} requests in flight", err=True)
        pool.shutdown()
    return reason


def summarise(scores: list[float], *, seed: int) -> Score:
    """Return the mean and its 95% bootstrap interval; None of a single question.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3.
    """
    values = np.asarray(scores)
    generator = np.random.default_rng(seed)
    if len(scores) < 2:
        return scores[0], None
    # The same seed draws the same questions for every model.
    means = [generator.choice(values, len(values)).mean() for _ in range(NUM_RESAMPLES)]
    low, high = np.percentile(means, INTERVAL_PERCENT)
    return float(values.mean()), (float(low), float(high))
