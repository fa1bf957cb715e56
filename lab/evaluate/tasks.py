"""The scores of a model on tasks, by lm-eval (the extra `tasks`) on a stock GPT-2 in float32."""

import importlib.util
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from basics.errors import UserError, is_out_of_memory, print_error
from basics.text import did_you_mean
from lab.evaluate.losses import Figure, entries, exp, ratio
from lab.publish.export import Extras, write_export
from lab.runs import Record
from preparation.hub import first_line_without_token, hide_progress_bars
from trainer.models import LoadedModel

NAMES = {"acc": "accuracy", "acc_norm": "normalised_accuracy"}  # of lm-eval's figures, and ours


class Tasks(NamedTuple):
    """Names of lm-eval's tasks, or YAML files of tasks, and the index of all that lm-eval has."""

    names: tuple[str, ...]
    manager: Any  # a TaskManager


def find_tasks(names: tuple[str, ...]) -> Tasks:
    """Find tasks by name. Raises: UserError: one is unknown, or lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--task needs the package lm-eval: uv run --extra tasks lab evaluate ...")
    from lm_eval.tasks import TaskManager  # takes seconds

    for package in ("datasets", "evaluate"):  # else they report each use to a server
        config: Any = importlib.import_module(f"{package}.config")
        config.HF_UPDATE_DOWNLOAD_COUNTS = False
    hide_progress_bars()  # they show the names of files as they are
    manager = TaskManager()
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            raise UserError(
                f"--task {name[:60]}: is no task of lm-eval, and no file"
                f"{did_you_mean(name, manager.all_tasks)}; give a YAML file,"
                " or a name that `uv run --extra tasks lm-eval ls tasks` prints"
            )
    return Tasks(names, manager)


def score(target: LoadedModel, tasks: Tasks, microbatch_size: int) -> Iterator[Record]:
    """Score a model, exported as a stock GPT-2, on each task; yield a record of each score.

    Raises: UserError: its tokenizer is not known, or lm-eval cannot score it on a task.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    target.load_tokenizer()  # an export without one is of no use here
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else it warns of each text that is cut
    with TemporaryDirectory() as place:
        directory = write_export(target, Path(place) / "model", Extras(card=""))
        model = HFLM(
            pretrained=str(directory),
            dtype="float32",
            device=str(target.device),
            batch_size=microbatch_size,
        )
        for name in tasks.names:
            try:
                found = simple_evaluate(
                    model, tasks=[name], task_manager=tasks.manager, bootstrap_iters=0
                )
            except Exception as error:  # tasks and their datasets have errors of many packages
                if is_out_of_memory(error):
                    raise
                reason = first_line_without_token(error)
                if isinstance(error, AssertionError):  # lm-eval's have no text, but their line
                    reason = traceback.extract_tb(error.__traceback__)[-1].line
                raise UserError(
                    f"--task {name}: lm-eval cannot score {target.name} ({reason}); its context is"
                    f" {target.model.config.context_length:,} tokens"
                ) from None
            file = None if name in tasks.manager.all_tasks else Path(name)
            yield from records_of(target, found, file)


def records_of(target: LoadedModel, found: Record, file: Path | None) -> Iterator[Record]:
    """Yield a record of each score in lm-eval's results on a task or a group of tasks.

    `file` describes the task, if it is none of lm-eval's. A group has one score if it says how to
    average; else each of its tasks has one.
    """
    groups = [*found["group_subtasks"]]  # the first one contains all others
    if groups and groups[0] in found.get("groups", {}):
        tasks_of = {groups[0]: [*found["samples"]]}
    else:
        tasks_of = {task: [task] for task in found["samples"]}
    for name, tasks in tasks_of.items():
        samples = [sample for task in tasks for sample in found["samples"][task]]
        config = found["configs"][tasks[0]]
        num_cut = _num_cut(target, samples)
        if num_cut:
            print_error(
                f"warning: {name}: {num_cut:,} texts are longer than the context of {target.name}"
                " and lost their beginning"
            )
        record: Record = {
            "benchmark": name,
            "questions": sum(found["n-samples"][task]["effective"] for task in tasks),
            "questions_from": file.name if file else str(config.get("dataset_path")),
            "split": None if file else config.get("test_split") or config.get("validation_split"),
            "cut_texts": num_cut,
            "higher_is_better": {},
        }
        for key, value in found["results"][name].items():
            metric, _, answer_filter = key.partition(",")
            if not answer_filter or metric.endswith("_stderr"):
                continue  # a fact of the task, or the standard error, which is not computed
            figure = NAMES.get(metric, metric)
            if answer_filter != "none":
                figure += "_" + answer_filter.replace("-", "_")
            of_figure = [one for one in samples if one["filter"] == answer_filter and metric in one]
            scores = [sample[metric] for sample in of_figure]
            record |= entries(figure, Figure(value, interval_of(metric, value, scores)))
            is_lower_better = found["higher_is_better"][name].get(metric) is False
            record["higher_is_better"][figure] = not is_lower_better
        yield record


def _num_cut(target: LoadedModel, samples: list[Record]) -> int:
    """Return how many texts, a question and an answer each, do not fit into the context."""
    tokenizer = target.load_tokenizer()
    longest = target.model.config.context_length + 1  # the last token is only a target
    num_cut = 0
    for sample in samples:
        for question, *answer in sample["arguments"]:
            if answer and isinstance(answer[0], str):  # else the model writes the answer
                num_tokens = len(tokenizer.encode_ordinary(question + answer[0]))
                if not question:
                    num_tokens += 1  # the end of text stands for it
                num_cut += num_tokens > longest
    return num_cut


def interval_of(metric: str, value: float, scores: list[Any]) -> tuple[float, float] | None:
    """Return the 95% interval of a figure with this score of each question; None if unknown."""
    if scores and all(np.ndim(score) == 0 and score in (0, 1) for score in scores):  # wrong, right
        from scipy.stats import binomtest

        num_right = round(value * len(scores))
        bounds = binomtest(num_right, len(scores)).proportion_ci(method="wilson")
        return float(bounds.low), float(bounds.high)
    if metric == "perplexity":  # each score is the log probability of the right answer
        return ratio(-np.array(scores), np.ones(len(scores))).through(exp).interval
    return None
