from __future__ import annotations

import json
from pathlib import Path

from run_metrics import read_metrics, remove_metrics_from, to_json


def test_nan_never_enters_json() -> None:
    values = {"a": float("nan"), "b": {"c": float("inf"), "d": 1.5}, "e": 3}
    assert json.loads(to_json(values)) == {"a": None, "b": {"c": None, "d": 1.5}, "e": 3}


def test_steps_that_come_again_are_removed_with_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 4}\n{"global_step": 9}\n{"global_step": 14}\n{"global_st')
    assert len(read_metrics(path)) == 3
    remove_metrics_from(path, 10)
    assert path.read_text() == '{"global_step": 4}\n{"global_step": 9}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
