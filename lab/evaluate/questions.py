"""Read a task's questions from local files, or from a dataset on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from basics.errors import UserError
from lab.evaluate.scoring import Question
from lab.evaluate.tasks import TASKS, Task
from preparation.hub import ask_hub, check_names, hide_progress_bars
from trainer.models import HUB_NAME

LONGEST_LINE = 2**20
KINDS = (".jsonl", ".parquet")
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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
    source: str = ""
    split: str | None = None


def parse_task(text: str) -> tuple[str, str]:
    """Split NAME or NAME=FILE into the task's name and its file or dataset. Raises: UserError."""
    name, _, source = text.partition("=")
    if name not in TASKS:
        raise UserError(f"--task {text[:60]}: is unknown; wanted {', '.join(TASKS)}, or one of"
                        " them with =FILE")
    return name, source or TASKS[name].hub_name


def read_quizzes(wanted: list[tuple[str, str]]) -> list[Quiz]:
    """Read the questions of all tasks. Raises: UserError."""
    quizzes = [read_quiz(name, source) for name, source in wanted]
    names = [quiz.name for quiz in quizzes]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--task: {name} is there twice; give it once")
    return quizzes


def read_quiz(name: str, source: str) -> Quiz:
    """Read a local file (JSON lines or parquet), a directory of them, or a dataset on the hub.

    Raises:
        UserError: there is no such file, or it does not hold the task's questions.
    """
    task, records = TASKS[name], []
    paths = _local_files(Path(source), task)
    is_on_hub = not paths and bool(HUB_NAME.fullmatch(source))
    if is_on_hub:
        paths = _download(source, task)
    if not paths:
        raise UserError(f"{source}: no such file, and not the owner/name of a dataset on the hub;"
                        f" give a file with {task.title}'s questions, or {task.hub_name}")
    questions: list[Question] = []
    for path in paths:
        for number, record in enumerate(_records(path, task), start=1):
            question = _question(record, path, task)
            questions.append(replace(question, place=f"{name}, {path.name}, question {number}"))
            records.append(record.get("UID") if name == "blimp" else None)
    if not questions:
        raise UserError(f"{source}: has no questions; give a file with {task.title}'s")
    kind = records[0] if len(set(map(str, records))) == 1 else None
    is_kind = isinstance(kind, str) and re.fullmatch(r"\w{1,80}", kind)
    is_own = source == task.hub_name and not Path(source).exists()
    return Quiz(f"{name}_{kind}" if is_kind else name, task, questions,
                source if is_on_hub else Path(source).resolve().name,
                task.split if is_own else None)


def _question(record: Any, path: Path, task: Task) -> Question:
    try:
        question = task.read(record)
        if not (0 <= question.right < len(question.choices) and all(question.choices)):
            raise ValueError(f"choice {question.right} of {len(question.choices)} is right, or"
                             " one is empty")
    except UNREADABLE as error:
        raise _not_questions(path, task, error) from None
    return question


def _not_questions(path: Path, task: Task, error: Exception) -> UserError:
    return UserError(f"{path}: not {task.title}'s questions ({type(error).__name__}:"
                     f" {str(error)[:60]}); each needs {task.columns}")


def _records(path: Path, task: Task) -> Iterator[Any]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(path).to_pylist()
            return
        labels = _labels_beside(path)
        with path.open(encoding="utf-8") as file:
            while line := file.readline(LONGEST_LINE):
                if line.strip():
                    record = json.loads(line)
                    yield record | {"label": next(labels)} if labels else record
    except StopIteration:
        raise UserError(f"{_labels_path(path)}: has fewer lines than {path.name}; copy both files"
                        " again") from None
    except UNREADABLE as error:
        raise _not_questions(path, task, error) from None


def _labels_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-labels.lst")


def _labels_beside(path: Path) -> Iterator[str] | None:
    """Return the lines of a file of labels, as PIQA's authors publish them; None without one."""
    labels = _labels_path(path)
    return iter(labels.read_text(encoding="utf-8").split()) if labels.is_file() else None


def _local_files(path: Path, task: Task) -> list[Path]:
    if not path.is_dir():  # reading a pipe could block forever
        return [path] if path.is_file() else []
    found = sorted(file for file in path.iterdir() if file.suffix in KINDS and file.is_file())
    if not found:
        raise UserError(f"{path}: has no .jsonl or .parquet file; give a file with {task.title}'s"
                        " questions")
    return found


def _download(repository: str, task: Task) -> list[Path]:
    """Download the files with the questions into the hub client's cache, unless they are there."""
    from huggingface_hub import HfApi, hf_hub_download

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
