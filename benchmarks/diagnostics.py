"""Time of diagnostics, as a share of training: `uv run python -m benchmarks.diagnostics`.

Steps with and without them take turns in one process. What diagnostics add to a step, divided by
the time of 100 steps, is what a `diagnostics_interval` of 100 costs; medians of all pairs. GPT-2
small on a GPU, a small model on a CPU. Ends with an error if anything is compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from basics.cpu_settings import keep_freed_memory
from benchmarks.memory_model import GPT2_SMALL, MANY_TOKENS
from ddp_train import TrainingStep
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.diagnostics import Diagnostics
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

INTERVAL = 100  # global steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    on_gpu = torch.cuda.is_available()
    process = Process(0, 0, 1, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    if not on_gpu:
        keep_freed_memory()  # as ddp_train.py does
    vocabularies = (50257,) if on_gpu else (257, 50257)
    print("| vocabulary | microbatch | compiled | ms a step | diagnostics add | of 100 steps |\n"
          "|---|---|---|---|---|---|")
    for vocab_size, size, compiles in itertools.product(
            vocabularies, (1, 24 if on_gpu else 8), (False, True)):
        shape = (GPT2_SMALL if on_gpu else MANY_TOKENS) | {"vocab_size": vocab_size}
        model = ModelConfig(**shape, drop_rate=0.0, qkv_bias=False)
        train = TrainConfig(dataset="none", checkpoint_interval=1, microbatch_size=size,
                            compile=compiles, diagnostics_interval=INTERVAL)
        steps = stepping(model, train, process)
        for step in steps:
            step()
        with torch.compiler.set_stance("fail_on_recompile"):
            seconds, added = measure(*steps, rounds=rounds)
        print(f"| {vocab_size:,} | {size} | {'yes' if compiles else 'no'} | {seconds * 1e3:,.1f}"
              f" | {added * 1e3:,.1f} | {added / seconds / INTERVAL:.2%} |",
              flush=True)


def measure(without: Callable[[], None], measured: Callable[[], None], *,
            rounds: int) -> tuple[float, float]:
    """Return the median seconds of a step, and what diagnostics add to one."""
    seconds: dict[Callable[[], None], list[float]] = {without: [], measured: []}
    for place in range(rounds):
        for step in (without, measured) if place % 2 else (measured, without):
            began = time.perf_counter()
            step()
            seconds[step].append(time.perf_counter() - began)
    pairs = zip(seconds[measured], seconds[without], strict=True)
    return (statistics.median(seconds[without]),
            statistics.median(longer - shorter for longer, shorter in pairs))


def stepping(
    model: ModelConfig, train: TrainConfig, process: Process
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions that take one step and wait: without diagnostics, and with them."""
    train = resolve_for_device(train, process.device)
    step = TrainingStep(build_training_state(model, train, process), train, process)
    shape = (train.microbatch_size, model.context_length)
    tokens = [torch.randint(model.vocab_size, shape, device=process.device) for _ in range(2)]
    batches = (Microbatch(0, *tokens) for _ in itertools.count())
    diagnostics = Diagnostics(train, process)

    def take(global_step: int) -> None:
        probe = diagnostics.probe(global_step)
        step.take(batches, num_microbatches=1, learning_rate=1e-3, probe=probe)[0].item()
        list(diagnostics.measured(up_to=10**9))

    return lambda: take(0), lambda: take(INTERVAL - 1)


if __name__ == "__main__":
    main()
