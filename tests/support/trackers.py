"""Runs to be tracked, and what the trackers have kept of them."""

import importlib.util
import json
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from basics.json_files import to_json
from processes.background import BackgroundProcess
from reporting.summary import read_summary
from reporting.tracker import begin_tracking, tracker_process
from run_config import Run, load_run
from tests.support.workplace import Workplace

Values = dict[str, list[tuple[int, float]]]  # steps and values by metric
BLOCK_BYTES, HEADER_BYTES = 2**15, 7  # of wandb's files


def tracked_run(workplace: Workplace, tracker: str) -> Run:
    """Write a run with a tracker; nothing has been trained yet. Without its package: skip."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"needs {tracker}")
    run_dir = workplace.add_run(train={"tracker": tracker})
    return load_run(workplace.runs_dir, run_dir.name)


def add_records(run: Run, *steps: int, **values: Any) -> None:
    with run.metrics_path.open("a") as file:
        for step in steps:
            file.write(to_json({"global_step": step, "train_loss": 10.0 - step} | values) + "\n")


def add_summary(run: Run, global_step: int) -> None:
    run.summary_path.write_text(
        json.dumps(
            {
                "status": "finished",
                "global_step": global_step,
                "tokens": 100,
                "train_loss": 1.5,
                "seconds": {"training": 2.0, "chart": 1.0},
                "usd": None,
                "best": {"loss": 1.25},
            }
        )
    )


def started(run: Run, *, starts_over: bool = False) -> BackgroundProcess:
    """Start the process of a run's tracker, as at the start of a launch."""
    run.summary_path.write_text('{"status": "running"}')
    begin_tracking(run, starts_over=starts_over)
    process = tracker_process(run)
    process.start()
    assert process.pop_failure() == ""
    return process


def track(run: Run, *, starts_over: bool = False) -> str:
    """Have a process send what there is, as at the end of a launch; return its failure."""
    return end(run, started(run, starts_over=starts_over))


def end(run: Run, process: BackgroundProcess) -> str:
    if read_summary(run)["status"] == "running":
        run.summary_path.unlink()
    until = time.monotonic() + 150
    return process.finish(lambda: until)


def in_tensorboard(place: Path) -> Values:
    """Read the event files of one tracked run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def in_trackio(place: Path) -> Values:
    """Read the only run of Trackio's only database."""
    (database,) = place.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        found = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert len({name for name, _, _ in found}) == 1
    values: Values = {}
    for _, step, metrics in found:
        for key, value in metrics.items():
            values.setdefault(key, []).append((step, value))
    return values


def in_wandb(place: Path) -> tuple[set[str], Values, dict[str, Any], dict[str, Any]]:
    """Read all offline runs in a directory: their ids, metrics, config and summary."""
    ids, values, config, summary = set(), {}, {}, {}
    for path in sorted(place.glob("offline-run-*/*.wandb")):
        for record in _wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config |= _items(record.run.config.update)
            elif kind == "summary":
                summary |= _items(record.summary.update)
            elif kind == "history":
                metrics = _items(record.history.item)
                for key in metrics.keys() - {"step"}:
                    values.setdefault(key, []).append((metrics["step"], metrics[key]))
    return ids, values, config, summary


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a log in LevelDB's format, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        position += HEADER_BYTES
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
