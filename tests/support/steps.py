"""Steps of the tiny model in the process of the test, and microbatches for them."""

import itertools
from collections.abc import Iterator

import torch

from ddp_train import TrainingStep
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tests.support.workplace import TINY_MODEL, TINY_TRAIN
from tokens.batches import Microbatch
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

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
