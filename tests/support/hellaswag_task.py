"""A HellaSwag task for lm-eval whose questions are a local file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np

TASK = """task: local_hellaswag
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
output_type: multiple_choice
validation_split: validation
process_docs: !function utils.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write_hellaswag_task(directory: Path) -> str:
    """Write lm-eval's own HellaSwag task with random questions; return the task's name."""
    random = np.random.default_rng(0)
    words = "the a man dog [title] opens his é water  then".split(" ")

    def text(most: int) -> str:
        return " ".join(random.choice(words, size=random.integers(1, most)))

    directory.mkdir()
    (directory / "val.jsonl").write_text("".join(json.dumps({
        "ind": number, "activity_label": text(3), "ctx_a": text(20), "ctx_b": text(4),
        "endings": [text(8) + "." for _ in range(4)], "label": int(random.integers(4)),
    }) + "\n" for number in range(40)))
    lm_eval = Path(importlib.util.find_spec("lm_eval").origin).parent
    (directory / "utils.py").write_text((lm_eval / "tasks/hellaswag/utils.py").read_text())
    (directory / "local.yaml").write_text(TASK.format(path=directory / "val.jsonl"))
    return "local_hellaswag"
