"""The tasks of `lab evaluate`. Prompts, choices and figures are those of lm-eval's tasks of the
same names (LAMBADA is its lambada_openai, and BLiMP all files that are given, as one task)."""

import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ValidationError

from basics.errors import UserError, first_line
from basics.json_files import describe

KINDS = (".jsonl", ".parquet")
# After the name of a split: its file, the numbers of its files, or the files in its folder.
FILE = r"(-[\dof-]*)?(/[^/]*)?\.(parquet|jsonl)$"


class Question(NamedTuple):
    """A context, texts that may follow it, the index of the right one, and the kind of a pair."""

    context: str
    choices: list[str]
    right: int
    kind: str = ""


class TaskRecord(BaseModel):
    """A record of a task's dataset. A subclass is a task, with its columns."""

    name: ClassVar[str]
    hub_name: ClassVar[str]  # the dataset that is asked for without a file
    split: ClassVar[str] = "validation"  # that the published figures are of
    hub_files: ClassVar[str] = rf"val(id|idation)?{FILE}"  # with the questions, on the hub
    figures: ClassVar[tuple[str, ...]] = ("accuracy", "normalised_accuracy")  # of `score`

    @abstractmethod
    def as_question(self) -> Question:
        """Return what the record asks. Raises: ValueError, LookupError."""


class HellaSwag(TaskRecord):
    """How a description of everyday life goes on."""

    name = "hellaswag"
    hub_name = "Rowan/hellaswag"

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int

    def as_question(self) -> Question:
        context = f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}"
        return Question(_without_markup(context), [*map(_without_markup, self.endings)], self.label)


def _without_markup(text: str) -> str:
    """Remove the markup that WikiHow's texts still contain."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


class LAMBADA(TaskRecord):
    """The last word of a passage."""

    name = "lambada"
    hub_name = "EleutherAI/lambada_openai"
    split = "test"
    hub_files = rf"(^|^default/|^data/)(lambada_)?test{FILE}"
    figures = ("accuracy", "perplexity")

    text: str

    def as_question(self) -> Question:
        context, _, word = self.text.rpartition(" ")
        return Question(context, [word], 0)


class ARC(TaskRecord):
    """Questions of science lessons, with choices."""

    name = "arc_easy"
    hub_name = "allenai/ai2_arc"
    split = "test"
    hub_files = rf"ARC-Easy/(ARC-Easy-)?test{FILE}"

    question: str
    choices: dict[str, list[str]]  # `text` and `label`
    answerKey: str

    def as_question(self) -> Question:
        return Question(
            f"Question: {self.question}\nAnswer:",
            self.choices["text"],
            self.choices["label"].index(self.answerKey),
        )


class PIQA(TaskRecord):
    """Two ways to a goal in the physical world."""

    name = "piqa"
    hub_name = "baber/piqa"

    goal: str
    sol1: str
    sol2: str
    label: int

    def as_question(self) -> Question:
        return Question(f"Question: {self.goal}\nAnswer:", [self.sol1, self.sol2], self.label)


class BLiMP(TaskRecord):
    """A sentence with good grammar, and one without."""

    name = "blimp"
    hub_name = "nyu-mll/blimp"
    split = "train"
    hub_files = r"\.(parquet|jsonl)$"
    figures = ("accuracy",)

    sentence_good: str
    sentence_bad: str
    UID: str = ""

    def as_question(self) -> Question:
        return Question("", [self.sentence_good, self.sentence_bad], 0, self.UID)


TASKS: dict[str, type[TaskRecord]] = {
    task.name: task for task in (HellaSwag, LAMBADA, ARC, PIQA, BLiMP)
}


class Quiz(NamedTuple):
    """A task with its questions."""

    name: str  # the task's; of minimal pairs that are all of one kind, `blimp_` and that kind
    figures: tuple[str, ...]
    questions: list[Question]
    source: str  # the name of the file, of the directory or of the dataset on the hub
    split: str | None  # of the task's own dataset; None of any other, whose split is not known


def read_quiz(name: str, source: str = "") -> Quiz:
    """Read a local file (JSON lines or parquet), a directory of them, or a dataset on the hub.

    If `source` is empty, it is the task's own dataset. Raises: UserError.
    """
    from trainer.models import HUB_NAME  # not for --help

    if name not in TASKS:
        raise UserError(
            f"--task {name[:60]}: is unknown; wanted {', '.join(TASKS)}, or one of them with =FILE"
        )
    task = TASKS[name]
    place = Path(source or task.hub_name)
    title = place.resolve().name
    paths = [place]
    split = None
    if place.is_dir():
        paths = sorted(file for file in place.iterdir() if file.suffix in KINDS and file.is_file())
    elif not place.exists() and HUB_NAME.fullmatch(str(place)):
        title = str(place)
        paths = _download(str(place), task)
        split = task.split if title == task.hub_name else None
    questions = [question for path in paths for question in _questions(path, task)]
    if not questions:
        raise UserError(
            f"{place}: has no questions; give a .jsonl or .parquet file with {task.__name__}'s"
        )
    kinds = {question.kind for question in questions}
    if len(kinds) == 1 and re.fullmatch(r"\w{1,80}", kind := kinds.pop()):
        name = f"{name}_{kind}"
    return Quiz(name, task.figures, questions, title, split)


def _questions(path: Path, task: type[TaskRecord]) -> Iterator[Question]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            records = pyarrow.parquet.read_table(path).to_pylist()
        else:
            lines = path.read_text(encoding="utf-8").split("\n")
            records = (json.loads(line) for line in lines if line.strip())
        for record in records:
            question = task.model_validate(record).as_question()
            if not (0 <= question.right < len(question.choices) and all(question.choices)):
                raise ValueError(
                    f"choice {question.right} of {len(question.choices)} is right, or one is empty"
                )
            yield question
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        if isinstance(error, ValidationError):
            reason = describe(error)
        raise UserError(
            f"{path}: not {task.__name__}'s questions ({reason}); each needs"
            f" {', '.join(task.model_fields)}"
        ) from None


def _download(repository: str, task: type[TaskRecord]) -> list[Path]:
    """Download the files with the questions into the hub client's cache, unless they are there."""
    from huggingface_hub import HfApi, hf_hub_download

    from preparation.hub import ask_hub, check_names, hide_progress_bars

    info = ask_hub(repository, lambda: HfApi().dataset_info(repository))
    present = [file.rfilename for file in info.siblings or ()]
    names = [name for name in present if re.search(task.hub_files, name)]
    check_names(repository, names)
    hide_progress_bars()
    if not names:
        raise UserError(
            f"{repository} on the Hugging Face hub: has no file of {task.__name__}'s"
            f" questions; give {task.hub_name} or a local file"
        )
    tables = [name for name in names if name.endswith(".parquet")]
    download = partial(hf_hub_download, repository, revision=info.sha, repo_type="dataset")
    return [Path(ask_hub(repository, partial(download, name))) for name in sorted(tables or names)]
