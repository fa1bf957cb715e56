"""Small checkpoints for the tests."""

from pathlib import Path

import torch
from torch.amp import GradScaler

from checkpointing import (
    Checkpoint,
    CheckpointMeta,
    LossScale,
    SnapshotBuffers,
    TrainingState,
    renew_links,
    save_checkpoint,
)
from gpt import GPTModel
from optim import build_optimizer
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import TINY_MODEL, TINY_TRAIN

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
    return CheckpointMeta(global_step=global_step, tokens=0, loss=loss, train_loss=loss,
                          seconds={}, tokenizer=None, model=MODEL, random_seed=42,
                          loss_scale=LossScale(scale=2.0**global_step, growth_tracker=3),
                          data={"train": "100 tokens, abc"})


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
