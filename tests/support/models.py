"""Small tokenizers, models with random weights, steps of training and checkpoints."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.amp import GradScaler
from torch.profiler import ProfilerActivity, profile

from checkpointing import (
    Checkpoint,
    CheckpointMeta,
    LossScale,
    SnapshotBuffers,
    TrainingState,
    renew_links,
    save_checkpoint,
)
from ddp_train import TrainingStep
from gpt import GPTModel
from lab.tokenizer import train_tokenizer
from optim import build_optimizer
from processes.distributed import Process
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import TINY_MODEL, TINY_TRAIN, Workplace, write_tokens
from tokens.batches import Microbatch
from tokens.tokenizer import choose_tokenizer
from trainer.loss_functions import build_training_state
from trainer.precision import resolve_for_device
from trainer.weight_formats import gpt2_config, to_gpt2

TEXTS = [
    "the cat sat on the mat, and the hat",
    "naïve café, naïve 🎉🎉",
    "def f(x):\n    return x\n",
    "它是它的, 它是它的",
    "aaaa bbbb 1234 1234\n\n\t it's we'll",
] * 3


def write_tokenizer(
    directory: Path, *, vocab_size: int = 300, texts: list[str] | None = None, **changes: Any
) -> Path:
    """Train a tokenizer and write its tokenizer.json, with some parts of it changed."""
    content, _ = train_tokenizer(texts or TEXTS, vocab_size=vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(content) | changes))
    return directory


# Parts of tokenizers that put a space in front of each text.
WITH_A_SPACE: dict[str, dict[str, Any]] = {
    "add_prefix_space": {
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    },
    "Metaspace": {
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "split": True,
            "prepend_scheme": "always",
        }
    },
    "Prepend": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    },
}


def write_tokenizer_with_a_space(directory: Path, kind: str) -> Path:
    """Write a tokenizer.json of a kind of `WITH_A_SPACE`, as GPT-2's or as Llama's."""
    if kind == "add_prefix_space":
        return write_tokenizer(directory, **WITH_A_SPACE[kind])
    tokens = [
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *map(chr, range(97, 123)),
        "th",
        "▁th",
        "▁the",
        "▁a",
        "at",
    ]
    merges = [["t", "h"], ["▁", "th"], ["▁th", "e"], ["▁", "a"], ["a", "t"]]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    parts = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "merges": merges,
            "vocab": {token: place for place, token in enumerate(tokens)},
        },
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(parts | WITH_A_SPACE[kind]))
    return directory


SHAPE = {
    "vocab_size": 61,
    "context_length": 12,
    "emb_dim": 24,
    "n_heads": 3,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": False,
}


def random_model(**changes: Any) -> GPTModel:
    """Return a model none of whose weights has its initial value, so that any mix-up shows."""
    torch.manual_seed(0)
    model = GPTModel(ModelConfig(**SHAPE | changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return model


def export(model: GPTModel, directory: Path, **changes: Any) -> Path:
    """Write a model as GPT-2, with changes of its config.json; return the directory."""
    directory.mkdir(exist_ok=True)
    config = gpt2_config(model.config, None) | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        to_gpt2(model.state_dict(), model.config), directory / "model.safetensors", {"format": "pt"}
    )
    return directory


def add_dataset_with_tokenizer(workplace: Workplace) -> tuple[Path, str]:
    """Add a dataset with a tokenizer of its own and an exported model.

    Returns the model's directory and the tokenizer's name.
    """
    dataset_dir = workplace.add_dataset()
    name = choose_tokenizer(str(write_tokenizer(dataset_dir, vocab_size=257))).name
    write_tokens(
        dataset_dir / "train.safetensors", np.zeros(4000, dtype=np.uint16), {"tokenizer": name}
    )
    torch.manual_seed(0)
    return export(GPTModel(ModelConfig(**TINY_MODEL)), workplace.root / "published"), name


CPU = torch.device("cpu")


def step_of(device: torch.device = CPU, **changes: object) -> TrainingStep:
    """Return a step of a new model; `changes` are keys of model.json and train.json."""
    model = {key: value for key, value in changes.items() if key in ModelConfig.model_fields}
    train = {key: value for key, value in changes.items() if key not in model}
    config = resolve_for_device(TrainConfig(**TINY_TRAIN | train), device)
    process = Process(rank=0, local_rank=0, world_size=1, device=device)
    state = build_training_state(ModelConfig(**TINY_MODEL | model), config, process)
    return TrainingStep(state, config, process)


def microbatches(device: torch.device = CPU) -> Iterator[Microbatch]:
    """Yield microbatches of two sequences without end."""
    generator = torch.Generator().manual_seed(0)
    for index in itertools.count():
        tokens = torch.randint(1, 257, (2, 2, 16), generator=generator)
        yield Microbatch(index, *tokens.to(device))


def ops_of(step: TrainingStep) -> set[str]:
    """Take a step; return the names of all operators and kernels that ran."""
    device = step.process.device
    tokens = torch.randint(0, 257, (2, 2, 16), device=device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        step.take(iter([Microbatch(0, *tokens)]), num_microbatches=1, learning_rate=1e-3)
    return {event.key for event in profiler.key_averages()}


MODEL = ModelConfig(**TINY_MODEL)
ONE_PROCESS = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def state(seed: int, model: ModelConfig = MODEL) -> TrainingState:
    torch.manual_seed(seed)
    network = GPTModel(model)
    optimizer = build_optimizer(network, TrainConfig(**TINY_TRAIN), ONE_PROCESS)
    network(torch.arange(16)[None], torch.arange(16)[None]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return TrainingState(network, optimizer, GradScaler("cpu", init_scale=2.0**seed))


def describe(global_step: int, loss: float | None = 1.0) -> CheckpointMeta:
    return CheckpointMeta(
        global_step=global_step,
        tokens=0,
        loss=loss,
        train_loss=loss,
        seconds={},
        tokenizer=None,
        model=MODEL,
        random_seed=42,
        loss_scale=LossScale(scale=2.0**global_step, growth_tracker=3),
        data={"train": "100 tokens, abc"},
    )


def save(checkpoints_dir: Path, global_step: int, loss: float | None = 1.0) -> Checkpoint:
    snapshot = SnapshotBuffers().take(state(global_step))
    checkpoint = save_checkpoint(checkpoints_dir, snapshot, describe(global_step, loss))
    renew_links(checkpoints_dir)
    return checkpoint


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(b"rubbish")


def original_weights(model):
    """Return the weights under the original system's names, the fused matrix split in three.

    Its checkpoints also have the mask of each layer.
    """
    config, ours = model.config, model.state_dict()
    names = {
        "token_embedding.": "tok_emb.",
        "position_embedding.": "pos_emb.",
        "blocks.": "trf_blocks.",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "attention.output": "att.out_proj",
        "mlp.up": "ff.layers.0",
        "mlp.output": "ff.layers.2",
    }
    theirs = {"out_head.weight": model.head_weight}
    for name, weight in ours.items():
        for here, there in names.items():
            name = name.replace(here, there)
        if "norm" in name:
            name = name.replace("weight", "scale").replace("bias", "shift")
        if "attention.qkv" in name:
            theirs |= {
                name.replace("attention.qkv", f"att.W_{part}"): piece
                for part, piece in zip(("query", "key", "value"), weight.chunk(3), strict=True)
            }
        elif name != "head.weight":
            theirs[name] = weight
    for layer in range(config.n_layers):
        theirs[f"trf_blocks.{layer}.att.mask"] = torch.ones([config.context_length] * 2).triu(1)
    return {name: value.clone().contiguous() for name, value in theirs.items()}
