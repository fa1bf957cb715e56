"""What a training step costs: `uv run python -m benchmarks.step diagnostics` (or `kernels`).

This trainer's step on random tokens, in one process: GPT-2 small on a GPU, small models on a CPU.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch.profiler import profile

from basics.cpu_settings import keep_freed_memory
from ddp_train import TrainingStep
from lab.plan.setting import GPT2_SMALL
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.diagnostics import Diagnostics
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

SMALL = GPT2_SMALL.model_copy(update={"vocab_size": 257, "context_length": 256, "emb_dim": 128,
                                      "n_heads": 4, "n_layers": 4})
INTERVAL, NUM_PROFILED = 100, 3  # global steps
NUM_KERNELS = 25  # that are named


def config(microbatch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"dataset": "none", "checkpoint_interval": 1,
                          "microbatch_size": microbatch_size} | changes)


def stepping(model: ModelConfig, train: TrainConfig, process: Process
             ) -> tuple[TrainingStep, Callable[..., Any]]:
    """Build a step, and a function that takes it on random tokens. Every rank."""
    train = resolve_for_device(train, process.device)
    step = TrainingStep(build_training_state(model, train, process), train, process)
    shape = train.microbatch_size, model.context_length
    batches = (Microbatch(0, *(torch.randint(model.vocab_size, shape, device=process.device)
                               for _ in range(2))) for _ in itertools.count())
    return step, lambda **options: step.take(
        batches, num_microbatches=train.gradient_accumulation_steps, learning_rate=1e-3, **options)


def timed(take: Callable[[], Any], device: torch.device) -> float:
    """Return the milliseconds of a step that nothing else overlaps with."""
    began = time.perf_counter()
    take()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def profiled(model: ModelConfig, train: TrainConfig, process: Process) -> dict[str, Any]:
    """Return the milliseconds of a step and of all its kernels, and the largest ones by name.

    On a CPU, the operations without the ones that they call.
    """
    step, take = stepping(model, train, process)
    step_ms = statistics.median([timed(take, process.device) for _ in range(6)][3:])
    with profile() as profiler:
        for _ in range(NUM_PROFILED):
            timed(take, process.device)
    times = {event.key: event.self_cpu_time_total / 1e3 / NUM_PROFILED
             for event in profiler.key_averages()}
    if process.device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            times = kernels_of_trace(json.loads(Path(folder, "trace.json").read_text()))
    return {"step_ms": step_ms, "kernel_ms": sum(times.values()),
            "attention_kernel": step.losses.attention_kernel(),
            "largest": dict(sorted(times.items(), key=lambda item: -item[1])[:NUM_KERNELS])}


def kernels_of_trace(trace: dict[str, Any]) -> dict[str, float]:
    """Add up what ran on the device in a trace in Chrome's format: milliseconds of a step."""
    found: dict[str, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]] += event["dur"] / 1e3 / NUM_PROFILED  # from microseconds
    return dict(found)


def kernel_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the rows of a table of what `profiled` found."""
    times = {"a step": found["step_ms"], "its kernels": found["kernel_ms"]} | found["largest"]
    return [{"kernel": name[:100].replace("|", "/"), "ms": f"{milliseconds:,.2f}",
             "share": f"{milliseconds / found['kernel_ms']:.1%}"}
            for name, milliseconds in times.items()]


def diagnostics_rows(process: Process, rounds: int) -> Iterator[dict[str, str]]:
    """Compare steps with and without diagnostics, in turn; raises if anything is compiled again."""
    on_gpu = process.device.type == "cuda"
    for vocab_size, size, compiles in itertools.product(
            (50257,) if on_gpu else (257, 50257), (1, 24 if on_gpu else 8), (False, True)):
        model = (GPT2_SMALL if on_gpu else SMALL).model_copy(update={"vocab_size": vocab_size})
        step, take = stepping(
            model, config(size, compile=compiles, diagnostics_interval=INTERVAL), process)
        diagnostics = Diagnostics(step.train, process)

        def with_diagnostics(take: Any = take, diagnostics: Any = diagnostics) -> None:
            take(probe=diagnostics.probe(INTERVAL - 1))
            list(diagnostics.measured(up_to=10**9))

        take(), with_diagnostics()
        with torch.compiler.set_stance("fail_on_recompile"):
            pairs = [(timed(take, process.device), timed(with_diagnostics, process.device))
                     for _ in range(rounds)]
        without = statistics.median(pair[0] for pair in pairs)
        added = statistics.median(longer - shorter for shorter, longer in pairs)
        yield {"vocabulary": f"{vocab_size:,}", "microbatch": str(size),
               "compiled": "yes" if compiles else "no", "ms a step": f"{without:,.1f}",
               "diagnostics add": f"{added:,.1f}",
               f"of {INTERVAL} steps": f"{added / without / INTERVAL:.2%}"}


@click.command()
@click.argument("what", type=click.Choice(["diagnostics", "kernels"]))
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True,
              help="Pairs of steps with and without diagnostics.")
def main(what: str, rounds: int) -> None:
    """Time what diagnostics add to a step, or where its time goes, by kernel."""
    on_gpu = torch.cuda.is_available()
    process = Process(0, 0, 1, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    if not on_gpu:
        keep_freed_memory()  # as ddp_train.py does
    rows = diagnostics_rows(process, rounds) if what == "diagnostics" else kernel_rows(profiled(
        GPT2_SMALL if on_gpu else SMALL, config(64 if on_gpu else 2), process))
    click.echo(tabulate(rows, "keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
