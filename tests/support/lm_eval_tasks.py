"""Tasks of lm-eval with questions in local files: its own tasks with random ones, and a new one."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

NUM_QUESTIONS = 40
WORDS = "the a man dog opens his é water  then 😀 naïve".split(" ")
LAST_WORDS = ["the", "the", "naïve", "then\nthe", '"the"', "  the"]
# By name: lm-eval's file, the split that it measures, and the suffix of our file.
FILES = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", "jsonl"),
    "lambada": ("lambada/lambada_openai.yaml", "test", "jsonl"),
    "arc_easy": ("arc/arc_easy.yaml", "test", "parquet"),
    "piqa": ("piqa/piqa.yaml", "validation", "jsonl"),
    "blimp": ("blimp/anaphor_gender_agreement.yaml", "validation", "parquet"),
}


def tasks_dir() -> Path:
    """Return the directory of lm-eval's tasks; a test is skipped without it."""
    found = importlib.util.find_spec("lm_eval")
    if found is None:
        pytest.skip("needs lm_eval")
    return Path(found.origin).parent / "tasks"


def write_tasks(directory: Path) -> list[Path]:
    """Write a YAML file for each of `FILES`, which is called `local_NAME`, and its questions."""
    written = []
    for name, (original, split, suffix) in FILES.items():
        questions = directory / f"{name}.{suffix}"
        write_records(questions, records_of(name))
        splits = dict.fromkeys(("training_split", "validation_split", "test_split"))
        task = {
            "include": str(tasks_dir() / original),
            "task": f"local_{name}",
            "dataset_path": "json" if suffix == "jsonl" else suffix,
            "dataset_name": None,
            "dataset_kwargs": local_data(split, questions),
            **splits,
            f"{split}_split": split,
        }
        written.append(directory / f"{name}.yaml")
        written[-1].write_text(json.dumps(task))  # JSON is YAML
    return written


def write_own_task(directory: Path, questions: list[dict[str, Any]]) -> Path:
    """Write the YAML file of a task; a question has `choices` and the number of the `right` one."""
    path = directory / "capitals.jsonl"
    write_records(path, questions)
    task = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": local_data("test", path),
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (directory / "capitals.yaml").write_text(json.dumps(task))
    return directory / "capitals.yaml"


def local_data(split: str, path: Path) -> dict[str, Any]:
    """Return the arguments with which the package datasets reads a file, and keeps nothing else."""
    return {"data_files": {split: str(path)}, "cache_dir": str(path.parent / "cache")}


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
