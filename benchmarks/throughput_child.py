"""Measure one row of `throughput.py` in this process: reads a task file, writes a result file."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from basics.errors import UserError, one_line
from basics.out_of_memory import is_out_of_memory
from benchmarks.throughput_blocks import time_steps
from benchmarks.throughput_rows import SYSTEMS, Row, RowTask
from processes.launch import (
    Process,
    join_process_group,
    machine_facts,
    started_by_torchrun,
    this_process,
)
from processes.startup_agreement import open_store
from run_config import ModelConfig


def main() -> None:
    """Read a task, train, and write the result. Under torchrun every rank; rank 0 writes.

    A failure is a result too: its reason, and whether memory ran out.
    """
    task_path, result_path = map(Path, sys.argv[1:3])
    task = read_task(task_path)
    process = Process(0, 0, 1, torch.device(task.device_type, 0)
                      if task.device_type == "cuda" else torch.device("cpu"))
    if started_by_torchrun():
        process = this_process()
        join_process_group(process, open_store("benchmark"), timeout=timedelta(hours=1))
    try:
        result = (measure_ceiling if task.row.system == "matrix product" else measure)(
            task, process)
    except Exception as error:
        result_path.write_text(json.dumps(reason_of(error)))
        raise
    if process.is_main:
        result_path.write_text(json.dumps(result))


def reason_of(error: Exception) -> dict[str, Any]:
    """Say in one line why a row has failed."""
    said = one_line(str(error)) or "no message"
    is_known = isinstance(error, UserError)
    return {"reason": said if is_known else f"{type(error).__name__}: {said}",
            "is_out_of_memory": is_out_of_memory(error)}


def read_task(path: Path) -> RowTask:
    values = json.loads(path.read_text())
    values["row"], values["model"] = Row(**values["row"]), ModelConfig(**values["model"])
    values["tokens_path"] = Path(values["tokens_path"])
    return RowTask(**values)


def write_task(path: Path, task: RowTask) -> None:
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    path.write_text(json.dumps(values | {
        "row": asdict(task.row), "model": task.model.model_dump(),
        "tokens_path": str(task.tokens_path)}))


def measure(task: RowTask, process: Process) -> dict[str, Any]:
    """Train, and measure the time of a step after the warm-up."""
    on_gpu = process.device.type == "cuda"
    import torch._inductor.compile_fx  # its import takes seconds: not compiling
    if task.row.system == "hugging face":
        from transformers import GPT2LMHeadModel  # noqa: F401
    started = time.perf_counter()
    system = SYSTEMS[task.row.system](task, process)
    if task.row.num_threads is not None:
        torch.set_num_threads(task.row.num_threads)
    built_seconds = time.perf_counter() - started
    timed = time_steps(lambda: system.step(system.microbatches), task.num_steps,
                       torch.cuda.synchronize if on_gpu else lambda: None)
    losses = torch.stack([loss.float() for loss in timed.results])  # NCCL reduces no others
    if process.world_size > 1:
        torch.distributed.all_reduce(losses)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(
        resource.RUSAGE_SELF).ru_maxrss
    compiling = built_seconds + timed.seconds_to_first - timed.step_seconds
    return timed.speeds(task.tokens_per_step) | {
        "compile_seconds": max(0.0, compiling) if system.is_compiled else 0.0,
        "peak_mib": peak / 2**20,
        "precision": system.precision,
        "is_compiled": system.is_compiled,
        "microbatch_size": task.microbatch_size,
        "losses": (losses / process.world_size).tolist(),
        "machine": machine_facts(process, system.precision),
    }


def measure_ceiling(task: RowTask, process: Process) -> dict[str, Any]:
    """Measure the FLOP/s of one large matrix product, by dtype."""
    on_gpu, ceiling = process.device.type == "cuda", {}
    size = 8192 if on_gpu else 2048
    torch.set_float32_matmul_precision("highest")
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size, device=process.device, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            a @ b
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        ceiling[name] = 2 * size**3 / statistics.median(seconds[2:])
    return {"ceiling_flops": ceiling, "machine": machine_facts(process, "bf16")}


if __name__ == "__main__":
    main()
