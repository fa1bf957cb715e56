"""The tasks of `lab evaluate`: where their questions are, and what a record of them means.

Prompts, choices and figures are those of lm-eval's tasks of the same names (LAMBADA is its
lambada_openai, and BLiMP all files that are given, as one task).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from basics.errors import UserError
from lab.evaluate.intervals import Figure, exp, ratio, share

LONGEST_LINE = 2**20
KINDS = (".jsonl", ".parquet")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
Record = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A context, texts that may follow it, and the index of the right one.

    Attributes:
        place: the task, the file and the number in it, for errors.
    """

    context: str
    choices: list[str]
    right: int
    place: str = field(default="a question", compare=False)


class Answers(NamedTuple):
    """A model's answers to all questions of a task, (N,) each.

    Attributes:
        right: whether the right choice has the highest log probability of all.
        normalised: the same, of log probabilities divided by the characters of the choice.
        greedy: whether each token of the right choice is the likeliest of all tokens.
        log_probability: of the right choice.
    """

    right: np.ndarray
    normalised: np.ndarray
    greedy: np.ndarray
    log_probability: np.ndarray

    def perplexity(self) -> Figure:
        """Return e to the mean negative log probability of the right choices (not of tokens)."""
        return ratio(-self.log_probability, np.ones(len(self.log_probability))).through(exp)


Figures = dict[str, Callable[[Answers], Figure]]
BY_LENGTH: Figures = {"accuracy": lambda answers: share(answers.right),
                      "normalised_accuracy": lambda answers: share(answers.normalised)}
OF_PAIRS: Figures = {"accuracy": lambda answers: share(answers.right)}
OF_WORDS: Figures = {"accuracy": lambda answers: share(answers.greedy),
                     "perplexity": Answers.perplexity}


@dataclass(frozen=True)
class Task:
    """A kind of questions.

    Attributes:
        title: as its authors write it.
        columns: of a record, as the error about a wrong file lists them.
        hub_name: of the dataset that is asked for without a file.
        hub_files: a pattern of the files with the questions in a dataset on the hub.
        split: that the published figures are of.
        read: turns a record into a question. Raises: one of `UNREADABLE`.
        figures: what is reported.
    """

    title: str
    columns: str
    hub_name: str
    hub_files: str
    split: str
    read: Callable[[Record], Question]
    figures: Figures


def _text(record: Record, key: str) -> str:
    if not isinstance(record[key], str):
        raise TypeError(f"{key} is not a text")
    return record[key]


def _hellaswag(record: Record) -> Question:
    head, first, second = (_text(record, key) for key in ("activity_label", "ctx_a", "ctx_b"))
    if not isinstance(record["endings"], list):
        raise TypeError("endings is not a list")
    return Question(_without_markup(f"{head}: {first} {second.capitalize()}"),
                    [_without_markup(ending) for ending in record["endings"]],
                    int(record["label"]))


def _without_markup(text: str) -> str:
    """Remove the markup that WikiHow's texts still contain."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _lambada(record: Record) -> Question:
    context, _, word = _text(record, "text").rpartition(" ")
    return Question(context, [word], 0)


def _arc(record: Record) -> Question:
    """Read a record of the hub's files, or of AI2's own, in which the question is an object."""
    question = record["question"]
    if isinstance(question, dict):
        text, choices = _text(question, "stem"), question["choices"]
        texts = [_text(choice, "text") for choice in choices]
        labels = [choice["label"] for choice in choices]
    else:
        text, texts, labels = _text(record, "question"), *(
            list(record["choices"][key]) for key in ("text", "label"))
    return Question(f"Question: {text}\nAnswer:", texts, labels.index(record["answerKey"]))


def _piqa(record: Record) -> Question:
    return Question(f"Question: {_text(record, 'goal')}\nAnswer:",
                    [_text(record, "sol1"), _text(record, "sol2")], int(record["label"]))


def _blimp(record: Record) -> Question:
    return Question("", [_text(record, "sentence_good"), _text(record, "sentence_bad")], 0)


# After the name of a split: its file, the numbers of its files, or the files in its folder.
FILE = r"(-[\dof-]*)?(/[^/]*)?\.(parquet|jsonl)$"

TASKS = {
    "hellaswag": Task(
        title="HellaSwag", columns="activity_label, ctx_a, ctx_b, endings, label",
        hub_name="Rowan/hellaswag", hub_files=rf"val(id|idation)?{FILE}", split="validation",
        read=_hellaswag, figures=BY_LENGTH),
    "lambada": Task(
        title="LAMBADA", columns="text", hub_name="EleutherAI/lambada_openai",
        hub_files=rf"(^|^default/|^data/)(lambada_)?test{FILE}", split="test",
        read=_lambada, figures=OF_WORDS),
    "arc_easy": Task(
        title="ARC", columns="question, choices, answerKey", hub_name="allenai/ai2_arc",
        hub_files=rf"ARC-Easy/(ARC-Easy-)?test{FILE}", split="test",
        read=_arc, figures=BY_LENGTH),
    "piqa": Task(
        title="PIQA", columns="goal, sol1, sol2, label", hub_name="baber/piqa",
        hub_files=rf"val(id|idation)?{FILE}", split="validation", read=_piqa, figures=BY_LENGTH),
    "blimp": Task(
        title="BLiMP", columns="sentence_good, sentence_bad", hub_name="nyu-mll/blimp",
        hub_files=r"\.(parquet|jsonl)$", split="train", read=_blimp, figures=OF_PAIRS),
}


@dataclass(frozen=True)
class Quiz:
    """A task with its questions.

    Attributes:
        name: the task's; of minimal pairs that are all of one kind, `blimp_` and that kind.
        source: the name of the file, of the directory or of the dataset on the hub.
        split: of the task's own dataset; None of any other, whose split is not known.
    """

    name: str
    task: Task
    questions: list[Question]
    source: str
    split: str | None


def parse_task(text: str) -> tuple[str, str]:
    """Split NAME or NAME=FILE into the task's name and its file or dataset. Raises: UserError."""
    name, _, source = text.partition("=")
    if name not in TASKS:
        raise UserError(f"--task {text[:60]}: is unknown; wanted {', '.join(TASKS)}, or one of"
                        " them with =FILE")
    return name, source or TASKS[name].hub_name


def read_quiz(name: str, source: str) -> Quiz:
    """Read a local file (JSON lines or parquet), a directory of them, or a dataset on the hub.

    Raises:
        UserError: there is no such file, or it does not hold the task's questions.
    """
    from trainer.models import HUB_NAME  # not for --help

    task, place = TASKS[name], Path(source)
    paths = [place] if place.is_file() else []
    if is_on_hub := not place.exists() and bool(HUB_NAME.fullmatch(source)):
        paths = _download(source, task)
    elif place.is_dir():
        paths = sorted(file for file in place.iterdir() if file.suffix in KINDS and file.is_file())
        if not paths:
            raise UserError(f"{place}: has no .jsonl or .parquet file; give a file with"
                            f" {task.title}'s questions")
    if not paths:
        raise UserError(f"{source}: no such file, and not the owner/name of a dataset on the hub;"
                        f" give a file with {task.title}'s questions, or {task.hub_name}")
    questions: list[Question] = []
    kinds: set[str] = set()
    for path in paths:
        try:
            for number, record in enumerate(_records(path), start=1):
                question = task.read(record)
                if not (0 <= question.right < len(question.choices) and all(question.choices)):
                    raise ValueError(f"choice {question.right} of {len(question.choices)} is"
                                     " right, or one is empty")
                kinds.add(str(record.get("UID", "")))
                questions.append(Question(question.context, question.choices, question.right,
                                          f"{name}, {path.name}, question {number}"))
        except UNREADABLE as error:
            raise UserError(f"{path}: not {task.title}'s questions ({type(error).__name__}:"
                            f" {str(error)[:60]}); each needs {task.columns}") from None
    if not questions:
        raise UserError(f"{source}: has no questions; give a file with {task.title}'s")
    kind = kinds.pop() if len(kinds) == 1 else ""
    is_kind = name == "blimp" and re.fullmatch(r"\w{1,80}", kind)
    return Quiz(f"{name}_{kind}" if is_kind else name, task, questions,
                source if is_on_hub else place.resolve().name,
                task.split if is_on_hub and source == task.hub_name else None)


def _records(path: Path) -> Iterator[Record]:
    """Read the records of a file. Raises: one of `UNREADABLE`."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
        return
    beside = path.with_name(f"{path.stem}-labels.lst")  # as PIQA's authors publish them
    labels = iter(beside.read_text(encoding="utf-8").split()) if beside.is_file() else None
    with path.open(encoding="utf-8") as file:
        while line := file.readline(LONGEST_LINE):
            if line.strip():
                record = json.loads(line)
                yield record | {"label": next(labels, None)} if labels else record


def _download(repository: str, task: Task) -> list[Path]:
    """Download the files with the questions into the hub client's cache, unless they are there."""
    from huggingface_hub import HfApi, hf_hub_download

    from preparation.hub import ask_hub, check_names, hide_progress_bars

    info = ask_hub(repository, lambda: HfApi().dataset_info(repository))
    names = [file.rfilename for file in info.siblings or ()
             if re.search(task.hub_files, file.rfilename)]
    check_names(repository, names)
    hide_progress_bars()
    tables = [name for name in names if name.endswith(".parquet")]
    if not names:
        raise UserError(f"{repository} on the Hugging Face hub: has no file of {task.title}'s"
                        f" questions; give {task.hub_name} or a local file")
    return [Path(ask_hub(repository, lambda name=name: hf_hub_download(
        repository, name, revision=info.sha, repo_type="dataset")))
        for name in sorted(tables or names)]
