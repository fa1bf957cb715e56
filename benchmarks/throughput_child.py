"""Measure one row of `throughput.py` in this process: reads a task file, writes a result file."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from benchmarks.throughput_rows import SYSTEMS, Row, RowTask, microbatches
from processes.launch import (
    Process,
    join_process_group,
    machine_facts,
    started_by_torchrun,
    this_process,
)
from processes.startup_agreement import open_store
from run_config import ModelConfig

WARM_UP_STEPS = 3


def main() -> None:
    """Read a task, train, and write the result. Under torchrun every rank; rank 0 writes."""
    task_path, result_path = map(Path, sys.argv[1:3])
    task = read_task(task_path)
    process = Process(0, 0, 1, torch.device(task.device_type, 0)
                      if task.device_type == "cuda" else torch.device("cpu"))
    if started_by_torchrun():
        process = this_process()
        join_process_group(process, open_store("benchmark"), timeout=timedelta(hours=1))
    result = measure(task, process)
    if process.is_main:
        result_path.write_text(json.dumps(result))


def read_task(path: Path) -> RowTask:
    values = json.loads(path.read_text())
    values["row"], values["model"] = Row(**values["row"]), ModelConfig(**values["model"])
    return RowTask(**values)


def write_task(path: Path, task: RowTask) -> None:
    values = {name: getattr(task, name) for name in RowTask.__dataclass_fields__}
    path.write_text(json.dumps(
        values | {"row": asdict(task.row), "model": task.model.model_dump()}))


def measure(task: RowTask, process: Process) -> dict[str, object]:
    """Train, and measure the time of a step after the warm-up.

    On a GPU all steps are timed together, without waiting for the device in between, as in a run.
    On a CPU each step is timed, and the median is used, because other programs disturb some.
    """
    on_gpu, seconds = process.device.type == "cuda", []
    import torch._inductor.compile_fx  # its import takes seconds: not compiling
    from transformers import GPT2LMHeadModel  # noqa: F401
    started = time.perf_counter()
    system = SYSTEMS[task.row.system](task, process)
    if task.row.num_threads is not None:
        torch.set_num_threads(task.row.num_threads)
    batches, losses = iter(list(microbatches(task, process))), []
    for number in range(task.num_steps):
        if not on_gpu or number == WARM_UP_STEPS:
            seconds.append(_now(on_gpu))
        losses.append(system.step(batches))
        if number == 0:
            first_seconds = _now(on_gpu) - started
    seconds.append(_now(on_gpu))
    step_seconds = ((seconds[1] - seconds[0]) / (task.num_steps - WARM_UP_STEPS) if on_gpu else
                    statistics.median(late - early for early, late
                                      in zip(seconds[WARM_UP_STEPS:], seconds[WARM_UP_STEPS + 1:],
                                             strict=False)))
    mean_losses = torch.stack([loss.cpu().float() for loss in losses])
    if process.world_size > 1:
        torch.distributed.all_reduce(mean_losses)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(
        resource.RUSAGE_SELF).ru_maxrss
    tokens = task.global_batch_size * task.model.context_length
    return {
        "tokens_per_second": tokens / step_seconds,
        "step_ms": step_seconds * 1e3,
        "compile_seconds": max(0.0, first_seconds - step_seconds) if system.is_compiled else 0.0,
        "peak_mib": peak / 2**20,
        "precision": system.precision,
        "is_compiled": system.is_compiled,
        "microbatch_size": task.microbatch_size,
        "losses": (mean_losses / process.world_size).tolist(),
        "machine": machine_facts(process, system.precision),
    }


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
