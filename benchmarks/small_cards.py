"""Memory and time of the options for small cards: `uv run python -m benchmarks.small_cards`.

Peak memory as in `memory_model.py`, and the median step time, relative to one head chunk without
activation checkpointing. GPT-2 small on a GPU; on a CPU a small model with GPT-2's vocabulary.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from basics.cpu_settings import keep_freed_memory
from benchmarks.memory_model import GPT2_SMALL, MANY_TOKENS, peak_of_training
from ddp_train import TrainingStep
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

OPTIONS = {
    "none": {"head_chunks": 1},
    "head_chunks 8": {"head_chunks": 8},
    "activation_checkpointing": {"head_chunks": 1, "activation_checkpointing": True},
    "both": {"head_chunks": 8, "activation_checkpointing": True},
}
ROUNDS = 8


def main() -> None:
    on_gpu = torch.cuda.is_available()
    process = Process(0, 0, 1, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    if not on_gpu:
        keep_freed_memory()  # as ddp_train.py does
    shape = GPT2_SMALL if on_gpu else MANY_TOKENS | {"vocab_size": 50257}
    model = ModelConfig(**shape, drop_rate=0.0, qkv_bias=False)
    configs = {name: TrainConfig(dataset="none", checkpoint_interval=1, compile=False,
                                 microbatch_size=24 if on_gpu else 8, **options)
               for name, options in OPTIONS.items()}
    peaks = {name: peak_of_training(model, train, process) for name, train in configs.items()}
    steps = {name: stepping(model, train, process) for name, train in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    print("| options | peak MiB | relative | ms a step | relative |\n|---|---|---|---|---|")
    baseline = statistics.median(seconds["none"][1:])
    for name, peak in peaks.items():
        median = statistics.median(seconds[name][1:])
        print(f"| {name} | {peak / 2**20:,.0f} | {peak / peaks['none']:.2f}"
              f" | {median * 1e3:,.0f} | {median / baseline:.2f} |")


def stepping(model: ModelConfig, train: TrainConfig, process: Process) -> Callable[[], None]:
    """Return a function that takes one step and waits for the device."""
    train = resolve_for_device(train, process.device)
    step = TrainingStep(build_training_state(model, train, process), train, process)
    shape = (train.microbatch_size, model.context_length)
    tokens = [torch.randint(model.vocab_size, shape, device=process.device) for _ in range(2)]
    batches = (Microbatch(0, *tokens) for _ in itertools.count())

    def take() -> None:
        step.take(batches, num_microbatches=1, learning_rate=1e-3)[0].item()

    return take


if __name__ == "__main__":
    main()
