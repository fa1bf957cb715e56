"""The memory that a training step really takes, and shapes where different tensors set the peak."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu_rows import stepping
from processes.launch import Process
from run_config import ModelConfig, TrainConfig

GPT2_SMALL = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
              "n_layers": 12}
MANY_TOKENS = {"vocab_size": 257, "context_length": 256, "emb_dim": 128, "n_heads": 4,
               "n_layers": 4}
MANY_WORDS = {"vocab_size": 8192, "context_length": 128, "emb_dim": 64, "n_heads": 2,
              "n_layers": 2}
WIDE = {"vocab_size": 2000, "context_length": 16, "emb_dim": 512, "n_heads": 4, "n_layers": 1}


def peak_of_training(model: ModelConfig, train: TrainConfig, process: Process) -> int:
    """Return the peak bytes of tensors in a step, from the second step on. Every rank.

    On a CPU, the bytes held between two steps and the peak that the profiler sees in the third: in
    the first two it would miss what gloo's threads free, the weights that DDP broadcasts and the
    buckets that it rebuilds.
    """
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(process.device)
        torch.cuda.reset_peak_memory_stats(process.device)
        _, take = stepping(model, train, process)
        for _ in range(3):
            take()
        return torch.cuda.max_memory_allocated(process.device) - before
    step, take = stepping(model, train, process)
    optimizer, buckets = step.state.optimizer, [{}]
    parameters = list(step.state.model.parameters())
    if process.world_size > 1:
        optimizer.register_step_pre_hook(
            lambda *_: buckets.append(_storages(p.grad for p in parameters)))
    take(), take()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = _storages([*parameters, *moments]) | buckets[-1]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        take()
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(held.values()) + max(itertools.accumulate(changes))


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by its address: views count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
