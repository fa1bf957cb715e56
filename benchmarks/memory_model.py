"""The memory model of `lab plan` compared with measured peaks.

Run it with `uv run python benchmarks/memory_model.py`. On a GPU, the allocator's peak for GPT-2
small; on a CPU, the tensors that PyTorch's profiler counts, for small models. One process, three
steps, random tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ddp_train import TrainingStep
from lab.plan.memory import peak_memory
from lab.plan.setting import Setting
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from tokens.batches import Microbatch
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device

GPT2_SMALL = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
              "n_layers": 12}
MANY_TOKENS = {"vocab_size": 257, "context_length": 256, "emb_dim": 128, "n_heads": 4,
               "n_layers": 4}
MANY_WORDS = {"vocab_size": 8192, "context_length": 128, "emb_dim": 64, "n_heads": 2,
              "n_layers": 2}
WIDE = {"vocab_size": 2000, "context_length": 16, "emb_dim": 512, "n_heads": 4, "n_layers": 1}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    process = Process(0, 0, 1, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    shapes = {"GPT-2 small": GPT2_SMALL} if on_gpu else {
        "many tokens": MANY_TOKENS, "large vocabulary": MANY_WORDS, "wide": WIDE}
    print("| model | precision | dropout | microbatch x accumulation | measured MiB | predicted |")
    print("|---|---|---|---|---|---|")
    sizes = ((1, 1), (8, 1), (8, 2), *([(24, 1), (24, 2)] if on_gpu else []))
    for (name, shape), precision, drop_rate, (size, accumulation) in itertools.product(
            shapes.items(), ("fp32", "bf16"), (0.0, 0.1), sizes):
        model = ModelConfig(**shape, drop_rate=drop_rate, qkv_bias=False)
        train = TrainConfig(dataset="none", checkpoint_interval=1, precision=precision,
                            microbatch_size=size, gradient_accumulation_steps=accumulation,
                            compile=False)
        measured = peak_of_training(model, train, process)
        setting = Setting(model, train, precision, num_processes=1, on_gpu=on_gpu)
        off = peak_memory(setting, size).total / measured - 1
        print(f"| {name} | {precision} | {drop_rate} | {size} x {accumulation}"
              f" | {measured / 2**20:,.1f} | {off:+.1%} |", flush=True)


def peak_of_training(model: ModelConfig, train: TrainConfig, process: Process) -> int:
    """Return the peak bytes of tensors in a step, from the second step on. Every rank."""
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(process.device)
        torch.cuda.reset_peak_memory_stats(process.device)
        _take_steps(_build(model, train, process), model, 3)
        return torch.cuda.max_memory_allocated(process.device) - before
    return _peak_on_cpu(_build(model, train, process), model)


def _peak_on_cpu(step: TrainingStep, model: ModelConfig) -> int:
    """Add the bytes held between two steps to the peak that the profiler sees in the third step.

    In the first two steps, it would miss what gloo's threads free: the weights that DDP broadcasts,
    and the buckets that it rebuilds.
    """
    optimizer, buckets = step.state.optimizer, []
    parameters = list(step.state.model.parameters())
    if step.process.world_size > 1:
        optimizer.register_step_pre_hook(
            lambda *_: buckets.append(_storages(p.grad for p in parameters)))
    _take_steps(step, model, 2)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = _storages([*parameters, *moments])
    held |= buckets[-1] if buckets else {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _take_steps(step, model, 1)
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(held.values()) + max(itertools.accumulate(changes))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by its address: views count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _build(model: ModelConfig, train: TrainConfig, process: Process) -> TrainingStep:
    train = resolve_for_device(train, process.device)
    return TrainingStep(build_training_state(model, train, process), train, process)


def _take_steps(step: TrainingStep, model: ModelConfig, num_steps: int) -> None:
    shape = (step.train.microbatch_size, model.context_length)
    microbatches = (
        Microbatch(0, *(torch.randint(model.vocab_size, shape, device=step.process.device)
                        for _ in range(2)))
        for _ in itertools.count()
    )
    for _ in range(num_steps):
        step.take(microbatches, num_microbatches=step.train.gradient_accumulation_steps,
                  learning_rate=1e-3)


if __name__ == "__main__":
    main()
