from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist

from basics.json_files import to_json
from reporting.loss_window import LossWindow
from reporting.metrics_file import read_metrics, remove_metrics_from


def test_nan_never_enters_json() -> None:
    values = {"a": float("nan"), "b": {"c": float("inf"), "d": 1.5}, "e": 3}
    assert json.loads(to_json(values)) == {"a": None, "b": {"c": None, "d": 1.5}, "e": 3}


def test_repeated_steps_and_a_partial_line_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 4}\n{"global_step": 9}\n{"global_step": 14}\n{"global_st')
    assert len(read_metrics(path)) == 3
    remove_metrics_from(path, 10)
    assert path.read_text() == '{"global_step": 4}\n{"global_step": 9}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_consecutive_skipped_steps_are_counted_across_reports() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        window, found = LossWindow(torch.device("cpu")), []
        # 1 is a good step; a report after every group
        for group in ("1100", "0000", "0001", "1111", "0010"):
            for step in group:
                window.add(torch.tensor(1.0), torch.tensor(1.0 if step == "1" else math.inf))
            window.summarise()
            found.append(window.longest_skipped)
        assert found == [2, 6, 9, 0, 2]
    finally:
        dist.destroy_process_group()
