"""One row of `throughput.py`, measured in a process of its own: an order in, a result out."""

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

from benchmarks.throughput_rows import SYSTEMS, Order, Row, microbatches
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
    """Read an order, train, and write what was seen. Under torchrun every rank, rank 0 writes."""
    order_path, result_path = map(Path, sys.argv[1:3])
    order = read_order(order_path)
    process = Process(0, 0, 1, torch.device(order.device_type, 0)
                      if order.device_type == "cuda" else torch.device("cpu"))
    if started_by_torchrun():
        process = this_process()
        join_process_group(process, open_store("benchmark"), timeout=timedelta(hours=1))
    result = measure(order, process)
    if process.is_main:
        result_path.write_text(json.dumps(result))


def read_order(path: Path) -> Order:
    values = json.loads(path.read_text())
    values["row"], values["model"] = Row(**values["row"]), ModelConfig(**values["model"])
    return Order(**values)


def write_order(path: Path, order: Order) -> None:
    values = {name: getattr(order, name) for name in Order.__dataclass_fields__}
    path.write_text(json.dumps(
        values | {"row": asdict(order.row), "model": order.model.model_dump()}))


def measure(order: Order, process: Process) -> dict[str, object]:
    """Take the steps; seconds are those of a step when all is warm.

    On a GPU they are timed as one block, as a run takes them: nobody waits after each. On a CPU
    each by itself, and the median is taken: other programs get in the way there.
    """
    on_gpu, seconds = process.device.type == "cuda", []
    import torch._inductor.compile_fx  # seconds of imports, which are not to count as compiling
    from transformers import GPT2LMHeadModel  # noqa: F401
    began = time.perf_counter()
    system = SYSTEMS[order.row.system](order, process)
    if order.row.num_threads is not None:
        torch.set_num_threads(order.row.num_threads)
    batches, losses = iter(list(microbatches(order, process))), []
    for number in range(order.num_steps):
        if not on_gpu or number == WARM_UP_STEPS:
            seconds.append(_now(on_gpu))
        losses.append(system.step(batches))
        if number == 0:
            first_seconds = _now(on_gpu) - began
    seconds.append(_now(on_gpu))
    step_seconds = ((seconds[1] - seconds[0]) / (order.num_steps - WARM_UP_STEPS) if on_gpu else
                    statistics.median(late - early for early, late
                                      in zip(seconds[WARM_UP_STEPS:], seconds[WARM_UP_STEPS + 1:],
                                             strict=False)))
    mean_losses = torch.stack([loss.cpu().float() for loss in losses])
    if process.world_size > 1:
        torch.distributed.all_reduce(mean_losses)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(
        resource.RUSAGE_SELF).ru_maxrss
    tokens = order.global_batch_size * order.model.context_length
    return {
        "tokens_per_second": tokens / step_seconds,
        "step_ms": step_seconds * 1e3,
        "compile_seconds": max(0.0, first_seconds - step_seconds) if system.is_compiled else 0.0,
        "peak_mib": peak / 2**20,
        "precision": system.precision,
        "is_compiled": system.is_compiled,
        "microbatch_size": order.microbatch_size,
        "losses": (mean_losses / process.world_size).tolist(),
        "machine": machine_facts(process, system.precision),
    }


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
