"""The systems that `throughput.py` compares; each trains one global step per call.

All begin with the same weights, read the same tokens and have the same global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from basics.memory_meters import keep_freed_memory
from ddp_train import wrap_in_ddp
from gpt import ForwardOptions, GPTModel
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.compilation import choose_forward_options
from trainer.precision import autocast, resolve_for_device
from trainer.step import TrainingStep, build_training_state

LEARNING_RATE, WEIGHT_DECAY, SEED = 1e-3, 0.1, 42
MAX_TOKEN_IDS = 257  # of any vocabulary, so that the loss falls within a few steps


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    system: str  # a key of SYSTEMS
    changes: dict[str, Any] = field(default_factory=dict)  # ours: keys of train.json
    forward: dict[str, Any] = field(default_factory=dict)  # ours: fields of ForwardOptions
    num_processes: int = 1
    num_threads: int | None = None  # all cores, if None


@dataclass(frozen=True)
class RowTask:
    """What a fresh process measures."""

    row: Row
    model: ModelConfig
    microbatch_size: int  # of a process
    global_batch_size: int
    num_steps: int
    device_type: str

    def num_microbatches(self, world_size: int) -> int:
        return self.global_batch_size // (self.microbatch_size * world_size)


@dataclass(frozen=True)
class System:
    """A training system."""

    step: Callable[[Iterator[Microbatch]], Tensor]  # one global step; returns its loss, ()
    precision: str
    is_compiled: bool = False


def microbatches(task: RowTask, process: Process) -> Iterator[Microbatch]:
    """Yield a process's microbatches: sequences that rise by 1 to 3, which a model can learn."""
    model, size = task.model, task.microbatch_size
    for step in range(task.num_steps):
        generator = torch.Generator().manual_seed(step)
        steps = torch.randint(1, 4, (task.global_batch_size, model.context_length + 1),
                              generator=generator)
        num_ids = min(model.vocab_size, MAX_TOKEN_IDS)
        steps[:, 0] = torch.randint(num_ids, (task.global_batch_size,), generator=generator)
        tokens = (steps.cumsum(1) % num_ids).to(process.device)
        for part in tokens.split(size)[process.rank :: process.world_size]:
            yield Microbatch(step, part[:, :-1].contiguous(), part[:, 1:].contiguous())


def ours(task: RowTask, process: Process) -> System:
    """Build this trainer as in a run, except that norms and biases decay."""
    train = TrainConfig(**{
        "dataset": "none", "microbatch_size": task.microbatch_size, "checkpoint_interval": 1,
        "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "random_seed": SEED,
        "decay_norms_and_biases": True,
    } | task.row.changes)
    train = resolve_for_device(train, process.device)
    if process.device.type == "cpu":
        keep_freed_memory()  # as ddp_train.py does

    def options(*arguments: Any) -> ForwardOptions:
        return replace(choose_forward_options(*arguments), **task.row.forward)

    with patch("trainer.step.choose_forward_options", options):
        state = build_training_state(task.model, train, process)
    step = TrainingStep(state, train, process, wrap=wrap_in_ddp)

    def take(batches: Iterator[Microbatch]) -> Tensor:
        return step.take(batches, num_microbatches=task.num_microbatches(process.world_size),
                         learning_rate=LEARNING_RATE)[0]

    return System(take, step.precision, step.is_compiled)


def original(task: RowTask, process: Process) -> System:
    """Build the original system: eager, a mask, norms and GELU in single operations, fp16."""
    model = NaiveGPT(initial_model(task.model)).to(process.device)
    precision = "fp16" if process.device.type == "cuda" else "fp32"
    torch.set_float32_matmul_precision("high")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    # Its scale of 65,536 would skip steps here, and the loss curves could not be compared.
    scaler = GradScaler(process.device.type, init_scale=2.0**10, enabled=precision == "fp16")
    return System(_plain_step(task, process, _Plain(model, optimizer, scaler, precision)),
                  precision)


def hugging_face(task: RowTask, process: Process) -> System:
    """Build GPT2LMHeadModel of `transformers` with SDPA, compiled, in a well-tuned loop."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(hugging_face_config(task.model))
    model.load_state_dict(hugging_face_weights(initial_model(task.model)))
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
    return System(_plain_step(task, process, parts), precision, is_compiled=True)


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
    return System(_plain_step(task, process, parts), precision)


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


def _plain_step(task: RowTask, process: Process,
                plain: _Plain) -> Callable[[Iterator[Microbatch]], Tensor]:
    loss_of = plain.loss_of or (lambda token_ids, targets: F.cross_entropy(
        plain.model(token_ids).flatten(0, 1), targets.flatten()))
    in_low_precision = plain.precision in ("bf16", "fp16")

    def step(batches: Iterator[Microbatch]) -> Tensor:
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

    return step


def initial_model(config: ModelConfig) -> GPTModel:
    """Build the model whose weights all systems begin with."""
    torch.manual_seed(SEED)
    return GPTModel(config)


def hugging_face_config(model: ModelConfig) -> Any:
    """Return the `transformers.GPT2Config` of a model without dropout."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=model.vocab_size, n_positions=model.context_length, n_embd=model.emb_dim,
        n_layer=model.n_layers, n_head=model.n_heads, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=False, use_cache=False,
        bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )


def hugging_face_weights(model: GPTModel) -> dict[str, Tensor]:
    """Rename a model's weights for `transformers`, whose matrices are transposed."""
    weights = {
        "transformer.wte.weight": model.token_embedding.weight,
        "transformer.wpe.weight": model.position_embedding.weight,
        "transformer.ln_f.weight": model.final_norm.weight,
        "transformer.ln_f.bias": model.final_norm.bias,
        "lm_head.weight": model.head_weight,
    }
    for number, block in enumerate(model.blocks):
        qkv = block.attention.qkv
        parts = {
            "ln_1": (block.attention_norm.weight, block.attention_norm.bias),
            "attn.c_attn": (qkv.weight.T, torch.zeros(len(qkv.weight))),
            "attn.c_proj": (block.attention.output.weight.T, block.attention.output.bias),
            "ln_2": (block.mlp_norm.weight, block.mlp_norm.bias),
            "mlp.c_fc": (block.mlp.up.weight.T, block.mlp.up.bias),
            "mlp.c_proj": (block.mlp.output.weight.T, block.mlp.output.bias),
        }
        for name, (weight, bias) in parts.items():
            weights[f"transformer.h.{number}.{name}.weight"] = weight
            weights[f"transformer.h.{number}.{name}.bias"] = bias
    return weights


class NaiveNorm(nn.Module):
    """Layer norm in single operations."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.scale, self.shift = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class NaiveBlock(nn.Module):
    """A layer with three projections, attention in single operations, and a stored mask."""

    def __init__(self, block: nn.Module, context_length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(NaiveNorm(n) for n in (block.attention_norm, block.mlp_norm))
        parts = block.attention.qkv.weight.detach().chunk(3)
        self.projections = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)
        self.n_heads, self.output = block.attention.n_heads, block.attention.output
        self.up, self.down = block.mlp.up, block.mlp.output
        mask = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        y = self.up(self.norms[1](x))
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (y + 0.044715 * torch.pow(y, 3))
        return x + self.down(0.5 * y * (1 + torch.tanh(inner)))

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_heads, C // self.n_heads)
        q, k, v = (F.linear(x, weight).view(heads).transpose(1, 2) for weight in self.projections)
        scores = q @ k.transpose(2, 3)  # (B, H, T, T)
        scores.masked_fill_(self.mask.bool()[:T, :T], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return self.output((weights @ v).transpose(1, 2).contiguous().view(B, T, C))


class NaiveGPT(nn.Module):
    """The same network and weights as `GPTModel`, computed as in the original system."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = (model.token_embedding,
                                                         model.position_embedding)
        self.blocks = nn.Sequential(*(NaiveBlock(block, model.config.context_length)
                                      for block in model.blocks))
        self.final_norm, self.head = NaiveNorm(model.final_norm), model.head

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.token_embedding(token_ids) + self.position_embedding(positions)
        return self.head(self.final_norm(self.blocks(x)))  # (B, T, V)
