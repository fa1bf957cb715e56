"""The tasks of `lab evaluate`: where their questions are, and what a record of them means.

Prompts, choices and figures are those of lm-eval's tasks of the same names (LAMBADA is its
lambada_openai, and BLiMP all files that are given, as one task).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.evaluate.scoring import Figure, Question, Score

Record = dict[str, Any]
Figures = dict[str, Callable[[Score], Figure]]

BY_LENGTH: Figures = {"accuracy": lambda score: score.share("num_right"),
                      "normalised_accuracy": lambda score: score.share("num_right_normalised")}
OF_PAIRS: Figures = {"accuracy": lambda score: score.share("num_right")}
OF_WORDS: Figures = {"accuracy": lambda score: score.share("num_greedy"),
                     "perplexity": Score.perplexity}


@dataclass(frozen=True)
class Task:
    """A kind of questions.

    Attributes:
        title: as its authors write it.
        columns: of a record, as the error about a wrong file lists them.
        hub_name: of the dataset that is asked for without a file.
        hub_files: a pattern of the files with the questions in a dataset on the hub.
        split: that the published figures are of.
        read: turns a record into a question. Raises: LookupError, TypeError, ValueError
        figures: what is reported; the best model has the highest of the last accuracy.
    """

    title: str
    columns: str
    hub_name: str
    hub_files: str
    split: str
    read: Callable[[Record], Question]
    figures: Figures

    @property
    def main_figure(self) -> str:
        return "normalised_accuracy" if "normalised_accuracy" in self.figures else "accuracy"


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
