"""The rows of `on_gpu.py` that are no speeds of `throughput.py`; on a CPU with tiny shapes.

`python -m benchmarks.on_gpu_rows NAME DEVICE` prints a row's values as JSON, last. pytest loads
this file as a plugin, to write each test's result at once.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from basics.errors import first_line
from benchmarks.systems import time_steps
from benchmarks.throughput import Line, append
from ddp_train import TrainingStep, wrap_in_ddp
from gpt import KERNELS, attend
from lab.plan.memory import GPT2_SMALL
from processes.launch import Process, machine_facts
from run_config import ModelConfig, TrainConfig
from trainer.losses import build_training_state
from trainer.microbatch_trial import random_microbatches
from trainer.precision import attention_kernel, resolve_for_device

TINY = ModelConfig(vocab_size=257, context_length=16, emb_dim=16, n_heads=2, n_layers=2,
                   drop_rate=0.0, qkv_bias=False)
NUM_RANKS, MICROBATCH_OF_EIGHT = 8, 12
NUM_PROFILED, NUM_KERNELS = 3, 25  # steps that are profiled, kernels that are named
RESULTS = "ON_GPU_RESULTS"  # environment variable: where the plugin writes


def config(microbatch_size: int, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"dataset": "none", "checkpoint_interval": 1,
                          "microbatch_size": microbatch_size} | changes)


def stepping(model: ModelConfig, train: TrainConfig, process: Process
             ) -> tuple[TrainingStep, Callable[..., Any]]:
    """Build a step, and a function that takes it on random tokens. Every rank."""
    train = resolve_for_device(train, process.device)
    step = TrainingStep(build_training_state(model, train, process), train, process)
    batches = random_microbatches(model, train.microbatch_size, process.device)
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
            "attention_kernel": attention_kernel(step.state.model, step.config, process.device),
            "largest": dict(sorted(times.items(), key=lambda item: -item[1])[:NUM_KERNELS])}


def kernels_of_trace(trace: dict[str, Any]) -> dict[str, float]:
    """Add up what ran on the device in a trace in Chrome's format: milliseconds of a step."""
    found: dict[str, float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]] += event["dur"] / 1e3 / NUM_PROFILED  # from microseconds
    return dict(found)


def kernel_rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a table of what `profiled` found."""
    times = {"a step": found["step_ms"], "its kernels": found["kernel_ms"]} | found["largest"]
    return [[name[:100], f"{milliseconds:,.2f}", f"{milliseconds / found['kernel_ms']:.1%}"]
            for name, milliseconds in times.items()]


def model_on(device: torch.device) -> ModelConfig:
    return GPT2_SMALL if device.type == "cuda" else TINY


def rank_of_eight(device: torch.device, optimizer: str) -> Line:
    """Time a rank as it is among eight: layers compiled separately, DDP, its share of Muon's work.

    It is alone in its process group, so that the time of communication is missing.
    """
    process, on_gpu = Process(0, 0, NUM_RANKS, device), device.type == "cuda"
    model = model_on(device)

    def wrap(*arguments: Any) -> torch.nn.Module:
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0,
                                world_size=1)
        return wrap_in_ddp(*arguments)

    def gather(gathered: Tensor, mine: Tensor, **_: bool) -> MagicMock:
        gathered.view(NUM_RANKS, *mine.shape).copy_(mine)  # not the others' results: same time
        return MagicMock()  # what has ended

    with (patch("torch.distributed.all_gather_into_tensor", gather),
          patch("ddp_train.wrap_in_ddp", wrap)):
        step, take = stepping(model, config(MICROBATCH_OF_EIGHT, optimizer=optimizer, compile=True),
                              process)
        _, speed = time_steps(take, 64 if on_gpu else 7,
                              MICROBATCH_OF_EIGHT * model.context_length, device)
        cpu_seconds = []
        for _ in range(10):
            if on_gpu:
                torch.cuda.synchronize()  # a full queue would make the step wait in a loop
            began = time.process_time()
            take()
            cpu_seconds.append(time.process_time() - began)
    del step.parallel_loss
    dist.destroy_process_group()
    return speed | {
        "cpu_ms": statistics.median(cpu_seconds) * 1e3, "precision": step.config.precision,
        "microbatch_size": MICROBATCH_OF_EIGHT, "machine": machine_facts(
            process, step.config.precision), "losses": [], "compile_seconds": None,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None}


def attention(device: torch.device) -> Line:
    """Run each attention kernel on a large microbatch.

    Returns how far the outputs and the gradients of the first sequence are from fp32, and how many
    of all are not finite.
    """
    model, found = model_on(device), {}
    torch.manual_seed(0)
    qkv = torch.randn(64, model.context_length, 3, model.n_heads, model.emb_dim // model.n_heads,
                      device=device)

    def run(qkv: Tensor, kernel: str) -> list[Tensor]:
        qkv = qkv.clone().requires_grad_()  # (B, T, 3, H, D)
        output = attend(*qkv.permute(2, 0, 3, 1, 4).unbind(), 0.0, kernel)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), qkv)]

    expected = run(qkv[:1], "math")
    for name in KERNELS:
        try:
            parts = run(qkv.bfloat16(), name)
        except RuntimeError as error:
            found[name] = first_line(error)
            continue
        found[name] = [((part[:1].float() - right).norm() / right.norm()).item()
                       for part, right in zip(parts, expected, strict=True)]
        found[name].append(sum(int((~part.isfinite()).sum()) for part in parts))
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of a test: of its call, or of its set-up if that did not pass."""
    if report.when == "call" or not report.passed:
        errors = [line for line in str(report.longrepr or "").splitlines() if line[:2] == "E "]
        append(Path(os.environ[RESULTS]), {
            "row": f"test {report.nodeid}", "status": "failed" if report.failed else "ok",
            "outcome": report.outcome, "reason": " / ".join(errors)[:300] or None})


ROWS: dict[str, Callable[[torch.device], Line]] = {
    "kernels": lambda device: profiled(
        model_on(device), config(64 if device.type == "cuda" else 2), Process(0, 0, 1, device)),
    "one of eight, AdamW": partial(rank_of_eight, optimizer="adamw"),
    "one of eight, Muon": partial(rank_of_eight, optimizer="muon"),
    "attention": attention}

if __name__ == "__main__":
    print(json.dumps(ROWS[sys.argv[1]](torch.device(sys.argv[2]))))
