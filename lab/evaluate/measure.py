"""Load each target of `lab evaluate`, measure it, record the results, return the tables."""

from __future__ import annotations

import datetime
from dataclasses import astuple, dataclass

from basics.errors import print_error
from basics.files import append_whole
from basics.json_files import to_json
from lab.evaluate.charts import draw_over_tokens
from lab.evaluate.held_out import Evaluation, check_tokenizer, evaluate, text_identity
from lab.evaluate.held_out_files import HeldOut, Tokens, open_held_out
from lab.evaluate.models import Chosen, choose_models
from lab.evaluate.questions import Quiz, parse_task, read_quizzes
from lab.evaluate.results import Result, Row, TaskResult, loss_rows, task_rows
from lab.evaluate.scoring import score
from lab.evaluate.sharing import Share
from trainer.targets import Target, load_target


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


def measure_all(request: Request, share: Share) -> list[list[Row]]:
    """Measure every model; return the table of losses, that of the tasks, or both. Every rank."""
    runs_dir = request.tokens.runs_dir
    models = [Chosen(*facts) for facts in share.from_rank_0(lambda: [
        astuple(one) for one in choose_models(request.targets, request.checkpoints, runs_dir)])]
    wanted = share.run(lambda: [parse_task(text) for text in request.tasks])
    work = Work(
        open_held_out(request.tokens, list(dict.fromkeys(model.name for model in models)), share)
        if request.measures_loss else None,
        share.run_first_on_each_node(lambda: read_quizzes(wanted)), request.microbatch_size)
    results = [_measure(share.run_first_on_each_node(lambda model=model: load_target(
        model.name, runs_dir=runs_dir, checkpoint_name=model.checkpoint,
        device=share.process.device)), work, share) for model in models]
    if share.process.is_main:
        _draw(results)
    tables = [task_rows(results, work.quizzes)] if work.quizzes else []
    if work.held_out:
        tables.insert(0, loss_rows(results, by_bits=work.held_out.differ))
    return tables


def _measure(target: Target, work: Work, share: Share) -> Result:
    """Measure one model, which is freed before the next one is loaded. Every rank."""
    result = _describe(target)
    if work.held_out:
        result.evaluation = _evaluate(target, work, share)
    for quiz in work.quizzes:
        scored = score(target, quiz.questions, microbatch_size=work.microbatch_size, share=share)
        found = result.tasks[quiz.name] = TaskResult.of(quiz, scored)
        if scored.num_cut and share.process.is_main:
            print_error(f"warning: {quiz.name}: {scored.num_cut:,} texts are longer than the"
                        f" context of {target.name} and lost their beginning, as in lm-eval")
        _record(target, found.as_record(), share)
    return result


def _describe(target: Target) -> Result:
    """Return a result without figures."""
    checkpoint = target.checkpoint
    title = f"{target.name} ({checkpoint.name})" if checkpoint else target.name
    return Result(target.name, title, target.run.run_dir if target.run else None,
                  checkpoint.meta.tokens if checkpoint else 0)


def _evaluate(target: Target, work: Work, share: Share) -> Evaluation:
    file, token_slice = work.held_out.of(target.name)
    share.run(lambda: check_tokenizer(target, file))
    measured = evaluate(target, file, token_slice, microbatch_size=work.microbatch_size,
                        share=share)
    _record(target, measured.as_record() | {
        "tokenizer": target.tokenizer_name, "text": text_identity(file, token_slice)}, share)
    return measured


def _record(target: Target, measured: dict[str, object], share: Share) -> None:
    """Append a run's results to its evaluations.jsonl. Rank 0 writes."""
    if target.run is None or not share.process.is_main:
        return
    record = {"target": target.name, "checkpoint": target.checkpoint.name,
              "global_step": target.checkpoint.meta.global_step,
              "trained_tokens": target.checkpoint.meta.tokens} | measured
    record["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        append_whole(target.run.evaluations_path, to_json(record) + "\n")
    except OSError as error:
        print_error(f"warning: result not saved: {target.run.evaluations_path}:"
                    f" {error.strerror or error}")


def _draw(results: list[Result]) -> None:
    """Draw the charts of runs with several results; a failure is only a warning."""
    try:
        for path in draw_over_tokens(results):
            print_error(f"chart: {path}")
    except OSError as error:
        print_error(f"warning: no chart: {error}")
