"""The systems that `throughput.py` compares; each trains one global step per call.

All begin with the same weights, read the same tokens and have the same global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from basics.cpu_settings import keep_freed_memory
from benchmarks.throughput_models import SEED, NaiveGPT, hugging_face_model, initial_model
from benchmarks.throughput_tokens import as_in_a_plain_loop, as_in_a_run
from ddp_train import TrainingStep
from gpt import ForwardOptions
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch
from trainer.compilation import choose_forward_options
from trainer.losses import build_training_state
from trainer.precision import autocast, resolve_for_device

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    system: str  # a key of SYSTEMS, "whole run", "peer" or "matrix product"
    changes: dict[str, Any] = field(default_factory=dict)  # ours: keys of train.json
    forward: dict[str, Any] = field(default_factory=dict)  # ours: fields of ForwardOptions
    num_processes: int = 1
    num_threads: int | None = None  # all cores, if None
    microbatch_size: int | None = None  # of all processes; the bench's, or less, if None


@dataclass(frozen=True)
class RowTask:
    """What a fresh process measures."""

    row: Row
    model: ModelConfig
    microbatch_size: int  # of a process
    global_batch_size: int
    num_steps: int
    device_type: str
    tokens_path: Path

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.model.context_length

    def num_microbatches(self, world_size: int) -> int:
        return self.global_batch_size // (self.microbatch_size * world_size)

    def plan(self, world_size: int) -> BatchPlan:
        """Return the batch plan of a run with the same steps."""
        return BatchPlan(self.microbatch_size, self.num_microbatches(world_size), world_size,
                         self.model.context_length, self.num_steps)


@dataclass(frozen=True)
class System:
    """A training system."""

    step: Callable[[Iterator[Microbatch]], Tensor]  # one global step; returns its loss, ()
    microbatches: Iterator[Microbatch]
    precision: str
    is_compiled: bool = False


def train_values(task: RowTask) -> dict[str, Any]:
    """Return the keys of train.json with which ours trains as the other systems do."""
    return {
        "dataset": "zipf", "microbatch_size": task.microbatch_size, "checkpoint_interval": 2**30,
        "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "random_seed": SEED,
        "decay_norms_and_biases": True,
    } | task.row.changes


def ours(task: RowTask, process: Process) -> System:
    """Build this trainer as in a run, except that norms and biases decay."""
    train = resolve_for_device(TrainConfig(**train_values(task)), process.device)
    if process.device.type == "cpu":
        keep_freed_memory()  # as ddp_train.py does

    def options(*arguments: Any) -> ForwardOptions:
        return replace(choose_forward_options(*arguments), **task.row.forward)

    with patch("trainer.losses.choose_forward_options", options):
        state = build_training_state(task.model, train, process)
    step = TrainingStep(state, train, process)

    def take(batches: Iterator[Microbatch]) -> Tensor:
        return step.take(batches, num_microbatches=task.num_microbatches(process.world_size),
                         learning_rate=LEARNING_RATE)[0]

    microbatches = as_in_a_run(task.tokens_path, task.plan(process.world_size),
                               task.model.vocab_size, process)
    return System(take, microbatches, train.precision, train.compile)


def original(task: RowTask, process: Process) -> System:
    """Build the original system: eager, a mask, norms and GELU in single operations, fp16."""
    model = NaiveGPT(initial_model(task.model)).to(process.device)
    precision = "fp16" if process.device.type == "cuda" else "fp32"
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    # Its scale of 65,536 would skip steps here, and the loss curves could not be compared.
    scaler = GradScaler(process.device.type, init_scale=2.0**10, enabled=precision == "fp16")
    parts = _Plain(model, optimizer, scaler, precision, pins=False)
    return _plain_system(task, process, parts)


def hugging_face(task: RowTask, process: Process) -> System:
    """Build GPT2LMHeadModel of `transformers` with SDPA, compiled, in a well-tuned loop."""
    model = hugging_face_model(initial_model(task.model))
    model.to(process.device).train()
    precision = task.row.changes["precision"]
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
                                  fused=True)

    @torch.compile(dynamic=False)
    def loss_of(token_ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(token_ids).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    parts = _Plain(model, optimizer, GradScaler(enabled=False), precision, loss_of,
                   reads_loss=False)
    return replace(_plain_system(task, process, parts), is_compiled=True)


def plain(task: RowTask, process: Process) -> System:
    """Build our model in a plain loop, for the changes between the original and this trainer."""
    changes = task.row.changes
    if changes.get("keeps_memory") and process.device.type == "cpu":
        keep_freed_memory()
    model = initial_model(task.model).to(process.device)
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY,
                                  fused=changes.get("fused", False))
    precision = changes.get("precision", "fp32")
    parts = _Plain(model, optimizer, GradScaler(enabled=False), precision,
                   reads_loss=changes.get("reads_loss", False))
    return _plain_system(task, process, parts)


SYSTEMS = {"ours": ours, "original": original, "hugging face": hugging_face, "plain": plain}


@dataclass(frozen=True)
class _Plain:
    """The parts of a plain training loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    precision: str
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None  # the model's logits, if None
    reads_loss: bool = True  # after each microbatch, which waits for the device
    pins: bool = True  # copies microbatches from pinned memory, without waiting


def _plain_system(task: RowTask, process: Process, plain: _Plain) -> System:
    microbatches = as_in_a_plain_loop(task.tokens_path, task.plan(process.world_size), process,
                                      pins=plain.pins)
    return System(partial(_plain_step, task, process, plain), microbatches, plain.precision)


def _plain_step(task: RowTask, process: Process, plain: _Plain,
                batches: Iterator[Microbatch]) -> Tensor:
    loss_of = plain.loss_of or (lambda token_ids, targets: F.cross_entropy(
        plain.model(token_ids).flatten(0, 1), targets.flatten()))
    in_low_precision = plain.precision in ("bf16", "fp16")
    num_microbatches, losses = task.num_microbatches(1), []
    plain.optimizer.zero_grad()
    for _ in range(num_microbatches):
        _, token_ids, targets = next(batches)
        with autocast(plain.precision, process.device) if in_low_precision else nullcontext():
            loss = loss_of(token_ids, targets) / num_microbatches
        plain.scaler.scale(loss).backward()
        losses.append(torch.tensor(loss.item()) if plain.reads_loss else loss.detach())
    plain.scaler.step(plain.optimizer)
    plain.scaler.update()
    return torch.stack(losses).sum()
