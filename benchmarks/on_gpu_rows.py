"""The rows of `on_gpu.py` that no other benchmark measures.

`python -m benchmarks.on_gpu_rows NAME DEVICE RESULTS` prints a row's values as JSON, last; on a CPU
it takes tiny shapes. pytest loads this file as a plugin, to write each test's result at once.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from basics.errors import first_line
from benchmarks import throughput_records as records
from benchmarks.checkpoints import measure_stall, meta
from benchmarks.kernel_profile import measure as measure_kernels
from benchmarks.throughput_blocks import time_steps
from checkpointing import SnapshotBuffers, load_checkpoint, save_checkpoint
from ddp_train import TrainingStep, wrap_in_ddp
from gpt import KERNELS, attend
from lab.plan.setting import GPT2_SMALL
from processes.launch import Process, machine_facts
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.losses import build_training_state
from trainer.microbatch_search import find_max_microbatch, try_microbatch
from trainer.microbatch_trial import Trial
from trainer.precision import resolve_for_device

TINY = ModelConfig(vocab_size=257, context_length=16, emb_dim=16, n_heads=2, n_layers=2,
                   drop_rate=0.0, qkv_bias=False)
NUM_RANKS, MICROBATCH_OF_EIGHT = 8, 12
RESULTS = "ON_GPU_RESULTS"  # environment variable: where the plugin writes
Values = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What a row is measured with."""

    device: torch.device
    results: Path
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def model(self) -> ModelConfig:
        return GPT2_SMALL if self.on_gpu else TINY

    def layers(self, count: int) -> ModelConfig:
        return self.model.model_copy(update={"n_layers": count})

    def alone(self) -> Process:
        return Process(0, 0, 1, self.device)

    def train(self, size: int, **changes: Any) -> TrainConfig:
        return resolve_for_device(TrainConfig(**{
            "dataset": "none", "checkpoint_interval": 1, "microbatch_size": size,
            "learning_rate": 1e-3} | changes), self.device)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def rising(model: ModelConfig, size: int, device: torch.device) -> Iterator[Microbatch]:
    """Yield the same sequences on every device; each id is 1 to 3 more than the one before."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rises = torch.randint(1, 4, (size, model.context_length + 1), generator=generator)
        tokens = (rises.cumsum(1) % 257).to(device)
        yield Microbatch(0, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def rank_of_eight(work: Work, optimizer: str) -> Values:
    """Time a rank as it is among eight: layers compiled separately, DDP, its share of Muon's work.

    It is alone in its process group, so that the time of communication is missing.
    """
    process = Process(0, 0, NUM_RANKS, work.device)
    train = work.train(MICROBATCH_OF_EIGHT, optimizer=optimizer, compile=True)
    state = build_training_state(work.model, train, process)

    def wrap(*arguments: Any) -> torch.nn.Module:
        dist.init_process_group("nccl" if work.on_gpu else "gloo", store=dist.HashStore(),
                                rank=0, world_size=1)
        return wrap_in_ddp(*arguments)

    def gather(gathered: Tensor, mine: Tensor, **_: bool) -> MagicMock:
        gathered.view(NUM_RANKS, *mine.shape).copy_(mine)  # not the others' results: same time
        return MagicMock()  # what has ended

    with (patch("torch.distributed.all_gather_into_tensor", gather),
          patch("ddp_train.wrap_in_ddp", wrap)):
        step = TrainingStep(state, train, process)
        batches = itertools.repeat(next(rising(work.model, MICROBATCH_OF_EIGHT, work.device)))
        take = partial(step.take, batches, num_microbatches=1, learning_rate=1e-4)
        timed = time_steps(take, 64 if work.on_gpu else 7, work.wait)
        cpu_seconds = []
        for _ in range(10):
            work.wait()  # a full queue of the device would make the step wait in a loop
            began = time.process_time()
            take()
            cpu_seconds.append(time.process_time() - began)
    del step.parallel_loss
    dist.destroy_process_group()
    tokens = MICROBATCH_OF_EIGHT * work.model.context_length
    return timed.speeds(tokens) | {
        "cpu_ms": statistics.median(cpu_seconds) * 1e3, "precision": train.precision,
        "microbatch_size": MICROBATCH_OF_EIGHT, "is_compiled": True,
        "machine": machine_facts(process, train.precision),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if work.on_gpu else None}


def resumed(work: Work, *, deterministic: bool) -> Values:
    """Compare a run that is stopped and resumed with the same in one go, with flash attention."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic algorithms ask for it
    torch.use_deterministic_algorithms(deterministic)
    whole, loss, step_ms, is_compiled = _train_in_parts(work, work.folder / "whole", (20,))
    parts, other_loss, _, _ = _train_in_parts(work, work.folder / "parts", (10, 10))
    differences = [(whole[name] - parts[name]).abs().max().item() for name in whole]
    return {"is_equal": not any(differences), "largest_difference": max(differences), "step_ms":
            step_ms, "loss_difference": abs(loss - other_loss), "is_compiled": is_compiled}


def _train_in_parts(work: Work, folder: Path,
                    parts: tuple[int, ...]) -> tuple[dict[str, Tensor], float, float, bool]:
    """Train, with a checkpoint after each part that the next one resumes from.

    Returns:
        The weights, the last loss, milliseconds of a step, and whether they were compiled.
    """
    model, size, checkpoint, num_steps = work.layers(4), 16 if work.on_gpu else 2, None, 0
    train, batches = work.train(size, attention="flash"), rising(model, size, work.device)
    for count in parts:
        torch.compiler.reset()  # as in a new process
        state = build_training_state(model, train, work.alone())
        if checkpoint is not None:
            load_checkpoint(checkpoint, state)
        step = TrainingStep(state, train, work.alone())
        timed = time_steps(lambda step=step: step.take(batches, num_microbatches=1,
                                                       learning_rate=1e-3)[0], count, work.wait)
        num_steps += count
        checkpoint = save_checkpoint(folder, SnapshotBuffers().take(state),
                                     meta(num_steps - 1, model))
    weights = {name: tensor.cpu() for name, tensor in state.model.state_dict().items()}
    return weights, timed.results[-1].item(), timed.step_seconds * 1e3, train.compile


def precisions(work: Work) -> Values:
    """Compare the losses of ten steps on this device with those of a CPU in fp32."""
    losses = {}
    for name, device, precision in (("cpu", "cpu", "fp32"), ("fp32", work.device, "fp32"),
                                    ("bf16", work.device, "bf16")):
        where = replace(work, device=torch.device(device))
        model, train = work.layers(2), where.train(4, precision=precision)
        step = TrainingStep(build_training_state(model, train, where.alone()), train,
                            where.alone())
        batches = rising(model, 4, where.device)
        losses[name] = torch.stack([step.take(batches, num_microbatches=1, learning_rate=1e-3)[0]
                                    for _ in range(10)]).cpu()
    return {"first_loss": losses["cpu"][0].item(), "last_loss": losses["cpu"][-1].item()} | {
        f"{name}_largest_difference": (losses[name] - losses["cpu"]).abs().max().item()
        for name in ("fp32", "bf16")}


def attention(work: Work) -> Values:
    """Run each attention kernel on a large microbatch; compare a part with fp32, look for NaN."""
    model, found = work.model, {}
    shape = (64, model.context_length, 3, model.n_heads, model.emb_dim // model.n_heads)
    torch.manual_seed(0)
    qkv = torch.randn(shape, device=work.device)
    expected = _attend(qkv[:1], "math")
    for name in KERNELS:
        try:
            result = _attend(qkv.bfloat16(), name)
        except RuntimeError as error:
            found[name] = {"failed": first_line(error)}
            continue
        off = [(part[:1].float() - right).norm() / right.norm()
               for part, right in zip(result, expected, strict=True)]
        found[name] = {"not finite": sum(int((~part.isfinite()).sum()) for part in result),
                       "output off": off[0].item(), "gradient off": off[1].item()}
    return found


def _attend(qkv: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """Return attention's output and the gradient of `qkv`, (B, T, 3, H, D), for its square."""
    qkv = qkv.clone().requires_grad_()
    output = attend(*qkv.permute(2, 0, 3, 1, 4).unbind(), 0.0, kernel)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), qkv)
    return output.detach(), gradient


def search(work: Work) -> Values:
    """Search for the largest microbatch within a memory limit.

    Each trial is a line at once. Trials of earlier calls are not repeated.
    """
    limit_gib, run_dir = 40.0 if work.on_gpu else 0.2, work.folder / "runs/search"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "model.json").write_text(work.model.model_dump_json())
    (run_dir / "train.json").write_text(json.dumps(
        {"dataset": "none", "checkpoint_interval": 1, "microbatch_size": 1}))
    command = ["ddp_train.py", "search", "--runs-dir", str(run_dir.parent),
               "--find-max-microbatch", "--memory-limit-gib", str(limit_gib)]
    known = {line["trial"]["microbatch_size"]: Trial(**line["trial"])
             for line in records.read(work.results) if "trial" in line}

    def trial_of(size: int) -> Trial:
        if size not in known:
            began = time.monotonic()
            known[size] = try_microbatch(command, size, 1, on_gpu=work.on_gpu)
            write(work.results, f"trial, microbatch {size}", seconds=time.monotonic() - began,
                  trial={key: value for key, value in asdict(known[size]).items()
                         if value == value})  # without NaN
        return known[size]

    fitting = [trial for trial in find_max_microbatch(trial_of) if trial.fits]
    fastest = max(fitting, key=lambda trial: trial.tokens_per_second)
    return {"limit_gib": limit_gib, "trials": len(known),
            "largest": max(trial.microbatch_size for trial in fitting),
            "fastest": fastest.microbatch_size,
            "fastest_tokens_per_second": fastest.tokens_per_second}


def write(results: Path, row: str, **values: Any) -> None:
    records.append(results, {"row": row, "status": records.OK} | values)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of a test: of its call, or of its set-up if that did not pass."""
    if report.when == "call" or not report.passed:
        lines = str(report.longrepr or "").splitlines()
        write(Path(os.environ[RESULTS]), f"test {report.nodeid}", seconds=report.duration,
              status=records.FAILED if report.failed else records.OK, outcome=report.outcome,
              reason=" / ".join(line for line in lines if line.startswith("E "))[:300] or None)


ROWS = {
    "kernels": lambda work: measure_kernels(
        work.model, work.train(64 if work.on_gpu else 2), work.alone(), num_steps=3),
    "stall": lambda work: measure_stall(work.model, work.device, work.folder, rounds=5),
    "adamw": partial(rank_of_eight, optimizer="adamw"),
    "muon": partial(rank_of_eight, optimizer="muon"),
    "resumed": partial(resumed, deterministic=True),
    "resumed-default": partial(resumed, deterministic=False),
    "precisions": precisions, "attention": attention, "search": search}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = ROWS[sys.argv[1]](Work(torch.device(sys.argv[2]), Path(sys.argv[3]), Path(place)))
    print(json.dumps(found))
