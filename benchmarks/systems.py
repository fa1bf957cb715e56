"""The systems that `throughput.py` compares: the same weights, tokens and global batches.

`python -m benchmarks.systems TASK TOKENS` measures one of them: TASK is a `SystemTask` as JSON,
TOKENS the path of a training split. The last line printed is the result as JSON.
"""

import json
import sys

if __name__ == "__main__" and json.loads(sys.argv[1])["system"] == "ours":
    from basics.entry_points import begin_command

    begin_command()  # as ddp_train.py does: OpenMP reads its limit when torch is imported

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from basics.entry_points import keep_freed_memory
from ddp_train import TrainingStep, microbatch_indices
from gpt import GPTModel
from processes.distributed import Process, machine_facts
from run_config import ModelConfig, TrainConfig
from settings.machine import Precision
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatches, read_ahead
from tokens.token_file import TokenFile
from trainer.loss_functions import build_training_state
from trainer.precision import autocast, resolve_for_device
from trainer.weight_formats import gpt2_config, to_gpt2

SEED, LEARNING_RATE, WEIGHT_DECAY = 42, 1e-3, 0.1
WARM_UP_STEPS, NUM_BLOCKS = 4, 3  # the first step may compile, three more follow
NANOGPT_VOCABULARIES = {50257: 50304}  # its default for GPT-2's tokenizer

Loss = Callable[[Tensor, Tensor], Tensor]  # of token ids and targets, (B, T) each
# A function that takes one global step and returns its loss, (); the precision; is it compiled?
System = tuple[Callable[[], Tensor], Precision, bool]


@dataclass(frozen=True)
class SystemTask:
    """A row of the table: what one process measures."""

    name: str
    system: str  # "ours", "whole run" or a key of OTHERS
    changes: dict[str, Any]  # ours: keys of train.json; others: `precision`, `compile`, `folder`
    shape: dict[str, Any]  # model.json
    device: str  # "cuda" or "cpu"
    microbatch_size: int
    global_batch_size: int
    num_steps: int
    # Ours, no keys of train.json: as the trainer does by default on the device, or not at all.
    pads_vocabulary: bool = True
    fuses_adamw: bool = True
    tunes_kernels: bool = False  # as torch.compile's mode "max-autotune-no-cudagraphs"; minutes

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**self.shape)

    @property
    def plan(self) -> BatchPlan:
        return BatchPlan(
            self.microbatch_size,
            self.global_batch_size // self.microbatch_size,
            1,
            self.model.context_length,
            self.num_steps,
        )

    @property
    def train_values(self) -> dict[str, Any]:
        return {
            "dataset": "zipf",
            "microbatch_size": self.microbatch_size,
            "random_seed": SEED,
            "checkpoint_interval": 2**30,
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "decay_norms_and_biases": True,
        } | self.changes


def ours(task: SystemTask, tokens_path: Path, process: Process) -> System:
    """Build this trainer as in a run, except that norms and biases decay."""
    train = resolve_for_device(TrainConfig(**task.train_values), process.device)
    if process.device.type == "cpu":
        keep_freed_memory()  # as ddp_train.py does
    if task.tunes_kernels:
        torch._inductor.config.max_autotune = True
        torch._inductor.config.coordinate_descent_tuning = True
    state = build_training_state(task.model, train, process)
    if not task.pads_vocabulary:
        state.model.options = replace(state.model.options, head_multiple=1)
    if not task.fuses_adamw:
        groups = [group | {"fused": None} for group in state.optimizer.param_groups]
        state = replace(state, optimizer=PlainAdamW(groups))
    step = TrainingStep(state, train, process)
    data = Microbatches(
        TokenFile(tokens_path), task.plan, start_token=0, vocab_size=task.model.vocab_size
    )
    batches = read_ahead(
        data, microbatch_indices(task.plan, 0, first_step=0), device=process.device
    )
    return (
        (
            lambda: step.take(
                batches,
                num_microbatches=task.plan.gradient_accumulation_steps,
                learning_rate=LEARNING_RATE,
            )[0]
        ),
        train.precision,
        bool(train.compile),
    )


class PlainAdamW(torch.optim.AdamW):
    """AdamW as PyTorch computes it unless told otherwise: not fused. It skips no step."""

    found_inf: Tensor  # set by `TrainingStep`

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        del self.found_inf  # only the fused kernel takes it, the others raise an error
        return super().step(closure)


def other(task: SystemTask, tokens_path: Path, process: Process) -> System:
    """Build another system's model and optimizer in a plain loop, as its own.

    The original reads the loss of each microbatch and copies without pinned memory, which both wait
    for the device. The others do neither, and nanoGPT clips the gradient.
    """
    device, is_original = process.device, task.system == "original"
    precision = task.changes.get("precision", "fp16" if device.type == "cuda" else "fp32")
    compiles = task.changes.get("compile", False)
    num_microbatches = task.plan.gradient_accumulation_steps
    torch.set_float32_matmul_precision(
        "highest" if precision == "fp32" and not is_original else "high"
    )
    torch.manual_seed(SEED)
    loss_of, optimizer = OTHERS[task.system](task, device)
    if compiles:
        loss_of = torch.compile(loss_of, dynamic=False)
    # The original's scale of 65,536 would skip steps here, and its losses could not be compared.
    scaler = GradScaler(init_scale=2.0**10, enabled=precision == "fp16")
    batches = plain_microbatches(tokens_path, task.plan, device, pins=not is_original)
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]

    def step() -> Tensor:
        losses = []
        optimizer.zero_grad()
        for _ in range(num_microbatches):
            token_ids, targets = next(batches)
            with nullcontext() if precision == "fp32" else autocast(precision, device):
                loss = loss_of(token_ids, targets) / num_microbatches
            scaler.scale(loss).backward()
            losses.append(torch.tensor(loss.item()) if is_original else loss.detach())
        if task.system == "nanogpt":
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return torch.stack(losses).sum()

    return step, precision, compiles


def plain_microbatches(
    tokens_path: Path, plan: BatchPlan, device: torch.device, *, pins: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield token ids and targets, (B, T) each, widened to int64 on the host, then copied."""
    file, pins = TokenFile(tokens_path), pins and device.type == "cuda"
    for index in microbatch_indices(plan, 0, first_step=0):
        first = index * plan.tokens_per_microbatch
        flat = file.read(first, first + plan.tokens_per_microbatch + 1).astype(np.int64)
        token_ids, targets = (
            torch.from_numpy(part).view(-1, plan.context_length) for part in (flat[:-1], flat[1:])
        )
        if pins:
            token_ids, targets = token_ids.pin_memory(), targets.pin_memory()
        yield token_ids.to(device, non_blocking=pins), targets.to(device, non_blocking=pins)


def original(task: SystemTask, device: torch.device) -> tuple[Loss, torch.optim.Optimizer]:
    model = NaiveGPT(GPTModel(task.model)).to(device)
    return _with_adamw(model, model)


def hugging_face(task: SystemTask, device: torch.device) -> tuple[Loss, torch.optim.Optimizer]:
    from transformers import GPT2Config, GPT2LMHeadModel

    weights = to_gpt2(GPTModel(task.model).state_dict(), task.model)
    model = GPT2LMHeadModel(
        GPT2Config.from_dict(
            gpt2_config(task.model, None) | {"use_cache": False}, attn_implementation="sdpa"
        )
    )
    model.load_state_dict(weights)
    model.to(device).train()  # type: ignore[arg-type]
    return _with_adamw(model, lambda token_ids: model(token_ids).logits, fused=True)


def nanogpt(task: SystemTask, device: torch.device) -> tuple[Loss, torch.optim.Optimizer]:
    """Build those of nanoGPT in `folder`: own weights, a tied head; biases, no dropout, as here."""
    sys.path.insert(0, task.changes["folder"])
    from model import GPT, GPTConfig

    shape = task.model
    model = GPT(
        GPTConfig(
            block_size=shape.context_length,
            n_layer=shape.n_layers,
            n_head=shape.n_heads,
            vocab_size=NANOGPT_VOCABULARIES.get(shape.vocab_size, shape.vocab_size),
            n_embd=shape.emb_dim,
            dropout=0.0,
            bias=True,
        )
    ).to(device)
    return lambda token_ids, targets: model(token_ids, targets)[1], model.configure_optimizers(
        WEIGHT_DECAY, LEARNING_RATE, (0.9, 0.95), device.type
    )


OTHERS = {"original": original, "hugging face": hugging_face, "nanogpt": nanogpt}


def _with_adamw(
    model: nn.Module, logits_of: Callable[[Tensor], Tensor], **options: Any
) -> tuple[Loss, torch.optim.Optimizer]:
    def loss_of(token_ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(token_ids).flatten(0, 1).float(), targets.flatten())

    return loss_of, torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, **options
    )


class NaiveGPT(nn.Module):
    """A `GPTModel` as the original computes it: in single operations, three projections, a mask."""

    projections: Any
    mask: Tensor

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model, T = model, model.config.context_length
        self.register_buffer("mask", torch.triu(torch.ones(T, T), diagonal=1))
        self.projections = nn.ModuleList()
        for block in model.blocks:
            parts = block.attention.qkv.weight.detach().chunk(3)
            self.projections.append(nn.ParameterList(nn.Parameter(part.clone()) for part in parts))
            del block.attention.qkv

    def forward(self, token_ids: Tensor) -> Tensor:
        (B, T), model, C = token_ids.shape, self.model, self.model.config.emb_dim
        x = model.token_embedding(token_ids) + model.position_embedding(
            torch.arange(T, device=token_ids.device)
        )
        heads = B, T, model.config.n_heads, C // model.config.n_heads
        for block, projections in zip(model.blocks, self.projections, strict=True):
            y = _naive_norm(x, block.attention_norm)
            q, k, v = (F.linear(y, weight).view(heads).transpose(1, 2) for weight in projections)
            scores = q @ k.transpose(2, 3)  # (B, H, T, T)
            scores.masked_fill_(self.mask.bool()[:T, :T], -torch.inf)
            weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
            x = x + block.attention.output((weights @ v).transpose(1, 2).reshape(B, T, C))
            y = block.mlp.up(_naive_norm(x, block.mlp_norm))
            inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (y + 0.044715 * torch.pow(y, 3))
            x = x + block.mlp.output(0.5 * y * (1 + torch.tanh(inner)))
        return model.head(_naive_norm(x, model.final_norm))  # (B, T, V)


def _naive_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    variance = x.var(dim=-1, keepdim=True, unbiased=False)
    return norm.weight * ((x - mean) / torch.sqrt(variance + 1e-5)) + norm.bias


def time_steps(
    step: Callable[[], Any], num_steps: int, tokens_per_step: int, device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Take all steps; time the last ones as blocks of equal length; return results and speeds.

    Within a block nothing waits for the device, as in a run.
    """
    length = max(1, (num_steps - WARM_UP_STEPS) // NUM_BLOCKS)
    ends = {num_steps - length * blocks for blocks in range(NUM_BLOCKS + 1)}
    results, times = [], [time.perf_counter()]
    for number in range(1, num_steps + 1):
        results.append(step())
        if number == 1 or number in ends:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
    speeds = [length * tokens_per_step / seconds for seconds in np.diff(times[2:])]
    speed = statistics.median(speeds)
    return results, {
        "tokens_per_second": speed,
        "step_ms": tokens_per_step / speed * 1e3,
        "blocks": speeds,
        "first_step_seconds": times[1] - times[0],
    }


def measure(task: SystemTask, tokens_path: Path) -> dict[str, Any]:
    import torch._inductor.compile_fx  # its import takes seconds: not compiling

    process = Process(0, 0, 1, torch.device("cuda:0" if task.device == "cuda" else "cpu"))
    started = time.perf_counter()
    build = ours if task.system == "ours" else other
    step, precision, is_compiled = build(task, tokens_path, process)
    built_seconds = time.perf_counter() - started
    results, speed = time_steps(step, task.num_steps, task.plan.tokens_per_step, process.device)
    peak = (
        torch.cuda.max_memory_allocated()
        if task.device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    compiling = built_seconds + speed["first_step_seconds"] - speed["step_ms"] / 1e3
    return speed | {
        "precision": precision,
        "compile_seconds": max(0.0, compiling) if is_compiled else 0.0,
        "microbatch_size": task.microbatch_size,
        "peak_mib": peak / 2**20,
        # Other weights or another optimizer have another curve.
        "losses": (
            []
            if task.system == "nanogpt" or task.changes.get("optimizer") == "muon"
            else [loss.item() for loss in results]
        ),
        "machine": machine_facts(process, precision),
    }


if __name__ == "__main__":
    print(json.dumps(measure(SystemTask(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
