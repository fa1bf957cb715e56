"""lm-eval's own tasks, with random questions in local files instead of those on the hub."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lab.evaluate.tasks import TASKS

NUM_QUESTIONS = 40
WORDS = "the a man dog opens his é water  then 😀 naïve".split(" ")
LAST_WORDS = ["the", "the", "naïve", "then\nthe", '"the"', "  the"]
# By our name: lm-eval's file, and the suffix of our file.
FILES = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "jsonl"),
    "lambada": ("lambada/lambada_openai.yaml", "jsonl"),
    "arc_easy": ("arc/arc_easy.yaml", "parquet"),
    "piqa": ("piqa/piqa.yaml", "jsonl"),
    "blimp": ("blimp/anaphor_gender_agreement.yaml", "parquet"),
}
TASK = """include: {original}
task: local_{name}
dataset_path: {kind}
dataset_name: null
dataset_kwargs:
  data_files:
    {split}: {path}
training_split: {training}
validation_split: {validation}
test_split: {test}
"""


def tasks_dir() -> Path:
    """Return the directory of lm-eval's tasks; a test is skipped without it."""
    found = importlib.util.find_spec("lm_eval")
    if found is None:
        pytest.skip("needs lm_eval")
    return Path(found.origin).parent / "tasks"


def write_tasks(directory: Path) -> dict[str, Path]:
    """Write each task's questions and its `local_NAME` for lm-eval; return the questions' files."""
    directory.mkdir()
    written = {}
    for name, (original, suffix) in FILES.items():
        path, split = directory / f"{name}.{suffix}", TASKS[name].split
        written[name] = path
        write_records(path, records_of(name))
        splits = {"training": "null", "validation": "null", "test": "null"}
        splits["validation" if split == "train" else split] = split  # BLiMP validates on `train`
        (directory / f"{name}.yaml").write_text(
            TASK.format(
                original=tasks_dir() / original,
                name=name,
                split=split,
                path=path,
                kind="json" if suffix == "jsonl" else suffix,
                **splits,
            )
        )
    return written


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write JSON lines or parquet, by the path's suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def records_of(name: str, num_records: int = NUM_QUESTIONS) -> list[dict[str, Any]]:
    """Return random questions in the format in which the task's dataset is published."""
    random = np.random.default_rng(0)

    def text(most: int) -> str:
        return " ".join(random.choice(WORDS, size=random.integers(1, most)))

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "hellaswag": lambda: {
            "ind": 0,
            "activity_label": text(3),
            "ctx_a": text(20) + " [title] x [step]",
            "ctx_b": text(4),
            "endings": [text(8) + "." for _ in range(4)],
            "label": str(random.integers(4)),
        },
        "lambada": lambda: {
            "text": " ".join([*[text(12)] * bool(random.integers(6)), random.choice(LAST_WORDS)])
        },
        "arc_easy": lambda: {
            "id": "x",
            "question": text(9) + "?",
            "answerKey": "BD"[random.integers(2)],
            "choices": {"text": [text(5) + "." for _ in range(4)], "label": list("ABCD")},
        },
        "piqa": lambda: {
            "goal": text(9),
            "sol1": text(6) + ".",
            "sol2": text(6) + ".",
            "label": int(random.integers(2)),
        },
        "blimp": lambda: {
            "sentence_good": text(8) + ".",
            "sentence_bad": text(8) + ".",
            "field": "morphology",
            "UID": "anaphor_gender_agreement",
        },
    }
    return [makers[name]() for _ in range(num_records)]
