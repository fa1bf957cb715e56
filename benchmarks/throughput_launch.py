"""Measure a row of `throughput.py` in processes of its own, which a time limit ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from basics.errors import one_line
from basics.out_of_memory import says_out_of_memory
from benchmarks.throughput_benches import Bench
from benchmarks.throughput_child import write_task
from benchmarks.throughput_rows import Row, RowTask
from benchmarks.throughput_run import RunFailed, prepare_run, read_run

PROJECT_DIR = Path(__file__).parents[1]
KILL_SECONDS = 10  # that processes have after SIGTERM
ERROR_LINE = re.compile(r"^(\[rank\d+\]: ?)?([\w.]*(Error|Exception|Interrupt|Exit)\b.*)")


class RowFailed(Exception):
    """A row has no speed; the message is the reason."""

    def __init__(self, reason: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.is_out_of_memory = is_out_of_memory


@dataclass(frozen=True)
class Place:
    """Where and until when a row is measured."""

    device: str
    tokens_path: Path  # of the training split of the bench's dataset
    cache_dir: Path  # of the row's compiled code, so that its first round compiles
    deadline: float  # of time.monotonic()

    def task(self, bench: Bench, row: Row, size: int) -> RowTask:
        return RowTask(row, bench.model, size, bench.global_batch_size, bench.num_steps,
                       self.device, self.tokens_path)

    def run(self, command: list[str], folder: Path, **environment: str) -> str:
        """Run a command; return its stdout. Raises: RowFailed."""
        return run_command(command, folder, deadline=self.deadline, environment={
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache_dir), **environment})


def measure_row(bench: Bench, row: Row, place: Place) -> dict[str, Any]:
    """Measure a row; halve the microbatch while it runs out of memory, unless the row names one.

    Raises:
        RowFailed: it has no speed.
    """
    attempts: dict[str, Callable[[RowTask, Place, Path], dict[str, Any]]] = {
        "peer": _measure_peer, "whole run": _measure_run}
    attempt = attempts.get(row.system, _measure_child)
    size = (row.microbatch_size or bench.microbatch_size) // row.num_processes
    while True:
        try:
            with tempfile.TemporaryDirectory() as folder:
                return attempt(place.task(bench, row, size), place, Path(folder))
        except RowFailed as error:
            if not error.is_out_of_memory:
                raise
            if row.microbatch_size or row.system == "peer" or size == 1:
                raise RowFailed(f"out of memory at microbatch {size}") from None
        size //= 2


def _measure_child(task: RowTask, place: Place, folder: Path) -> dict[str, Any]:
    """Measure a row in a fresh process, or several."""
    task_path, result_path = folder / "task.json", folder / "result.json"
    write_task(task_path, task)
    launcher = ["-m", "torch.distributed.run", "--standalone",
                f"--nproc_per_node={task.row.num_processes}"] if task.row.num_processes > 1 else []
    try:
        place.run([sys.executable, *launcher, "-m", "benchmarks.throughput_child",
                   str(task_path), str(result_path)], folder)
        return json.loads(result_path.read_text())
    except RowFailed:
        if not result_path.exists():
            raise
        told = json.loads(result_path.read_text())
        if "reason" not in told:
            raise
        raise RowFailed(told["reason"], is_out_of_memory=told["is_out_of_memory"]) from None


def _measure_run(task: RowTask, place: Place, folder: Path) -> dict[str, Any]:
    """Train a whole run with ddp_train.py."""
    arguments = prepare_run(task, folder)
    place.run([sys.executable, str(PROJECT_DIR / "ddp_train.py"), *arguments], folder)
    try:
        return read_run(task, folder)
    except RunFailed as error:
        raise RowFailed(str(error)) from None


def _measure_peer(task: RowTask, place: Place, folder: Path) -> dict[str, Any]:
    """Run another script, and read what it prints last: a JSON object or a speed."""
    shape = task.model.model_dump() | {
        "batch_size": task.global_batch_size, "microbatch_size": task.microbatch_size,
        "num_steps": task.num_steps, "tokens_path": str(task.tokens_path)}
    printed = place.run([sys.executable, *shlex.split(task.row.changes["path"])], folder,
                        THROUGHPUT_SHAPE=json.dumps(shape))
    objects = [line for line in printed.splitlines() if line.startswith("{")]
    if objects:
        return json.loads(objects[-1])
    found = re.findall(r"([\d,.]+) *tok", printed)
    if not found:
        raise RowFailed("printed no speed")
    speed = float(found[-1].replace(",", ""))
    return {"tokens_per_second": speed, "step_ms": task.tokens_per_step / speed * 1e3,
            "blocks": [speed]}


def run_command(command: list[str], folder: Path, *, deadline: float,
                environment: dict[str, str]) -> str:
    """Run a command until a deadline of time.monotonic(); return its stdout.

    Raises:
        RowFailed: it failed, or ran out of time; nothing that it has started still runs.
    """
    paths, began = (folder / "stdout", folder / "stderr"), time.monotonic()
    old_path = os.environ.get("PYTHONPATH")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT_DIR), old_path))),
                   "PYTHONUNBUFFERED": "1"} | environment
    with paths[0].open("wb") as stdout, paths[1].open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr,
                                   env=os.environ | environment)
        try:
            process.wait(max(0.1, deadline - began))
        except subprocess.TimeoutExpired:
            raise RowFailed(f"ran out of time after {deadline - began:,.0f} s") from None
        finally:
            stop_with_descendants(process)
    printed, said = (path.read_text(errors="replace") for path in paths)
    if process.returncode:
        raise RowFailed(last_error(said) or f"ended with status {process.returncode}",
                        is_out_of_memory=says_out_of_memory(said))
    return printed


def last_error(text: str) -> str:
    """Return the last line that names an error, else the last line; one line of limited length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [found[2] for line in lines if (found := ERROR_LINE.match(line))
              and "ChildFailedError" not in line]
    return one_line((errors or lines or [""])[-1])


def stop_with_descendants(process: subprocess.Popen) -> None:
    """End a process that still runs, and all that it has started; torchrun's have own groups."""
    if process.poll() is not None:
        return
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    process.terminate()
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(descendants, KILL_SECONDS)  # the device's memory is free only then
