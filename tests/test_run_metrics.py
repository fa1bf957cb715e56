from __future__ import annotations

import json
import time
from pathlib import Path

from run_metrics import PhaseClock, read_metrics, remove_metrics_from, to_json


def test_a_phase_is_booked_to_itself_and_earlier_starts_count() -> None:
    clock = PhaseClock({"training": 100.0})
    with clock.phase("validation") as validation:
        time.sleep(0.05)
    time.sleep(0.02)
    seconds = clock.read()
    assert validation.seconds == seconds["validation"] >= 0.05
    assert 100.02 <= seconds["training"] < 101
    assert seconds["checkpoint"] == 0


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
