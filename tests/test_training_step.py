from __future__ import annotations

import pytest
import torch
from support import TINY_MODEL, TINY_TRAIN

from launching import Process
from run_config import ModelConfig, TrainConfig
from training_step import TrainingStep, build_training_state


def step_of(**changes: object) -> TrainingStep:
    model = ModelConfig(**TINY_MODEL | {k: v for k, v in changes.items() if k in TINY_MODEL})
    train = TrainConfig(**TINY_TRAIN | {k: v for k, v in changes.items() if k in TINY_TRAIN})
    process = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    return TrainingStep(build_training_state(model, train, process.device), train, process)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("drop_rate", "kernel"), [(0.0, "flash"), (0.1, "math")])
def test_the_attention_kernel_is_named(precision: str, drop_rate: float, kernel: str) -> None:
    # Without a GPU PyTorch has no flash kernel that can drop.
    assert step_of(precision=precision, drop_rate=drop_rate).attention_kernel() == kernel
