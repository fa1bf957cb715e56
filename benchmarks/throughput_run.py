"""The row "ours, whole run": a run that `ddp_train.py` trains, to see what its loop costs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.throughput_benches import RUN_STEPS
from benchmarks.throughput_rows import RowTask, train_values
from reporting.metrics_file import read_metrics

NAME = "whole-run"


class RunFailed(Exception):
    """A run ended without the speed that was to be measured."""


def prepare_run(task: RowTask, folder: Path) -> list[str]:
    """Write a run directory with one checkpoint, at its end; return the arguments to train it."""
    run_dir = folder / "runs" / NAME
    run_dir.mkdir(parents=True)
    train = train_values(task) | {
        "dataset": task.tokens_path.parent.name, "checkpoint_interval": RUN_STEPS,
        "gradient_accumulation_steps": task.num_microbatches(1),
        "min_train_tokens": RUN_STEPS * task.tokens_per_step}
    (run_dir / "model.json").write_text(json.dumps(task.model.model_dump()))
    (run_dir / "train.json").write_text(json.dumps(train))
    return [NAME, "--runs-dir", str(folder / "runs"), "--nproc-per-node", "1",
            "--datasets-dir", str(task.tokens_path.parents[1])]


def read_run(task: RowTask, folder: Path) -> dict[str, Any]:
    """Return the speed in training of all reports but the first, and where the time went.

    Raises:
        RunFailed: there are too few reports.
    """
    run_dir = folder / "runs" / NAME
    summary = json.loads((run_dir / "summary.json").read_text())
    reports = [record for record in read_metrics(run_dir / "metrics.jsonl")
               if record.get("tokens_per_second")]
    if summary["status"] != "finished" or len(reports) < 2:
        raise RunFailed(f"the run is {summary['status']}, with {len(reports)} reports")
    machine = summary["machine"]
    blocks = [report["tokens_per_second"] for report in reports[1:]]
    speed = statistics.median(blocks)
    return {
        "tokens_per_second": speed, "step_ms": task.tokens_per_step / speed * 1e3,
        "blocks": blocks, "microbatch_size": task.microbatch_size,
        "precision": machine["precision"], "is_compiled": machine["compiled"],
        "peak_mib": machine["peak_memory_gib"] * 2**10, "machine": machine,
        "compile_seconds": summary["seconds"]["compile"] if machine["compiled"] else 0.0,
        "report_losses": [report["train_loss"] for report in reports],
        "seconds_by_phase": summary["seconds"],
    }
