"""The mean validation loss of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from basics.failpoints import failpoint
from tokens.batches import Microbatch, Microbatches, prefetch
from trainer.step import TrainingStep


@torch.inference_mode()
def validate(
    step: TrainingStep, data: Microbatches, *, shares: bool,
    watched: Callable[[Iterable[Microbatch], int], Iterable[Microbatch]],
    is_interrupted: Callable[[], bool],
) -> float | None:
    """Return the mean loss over all of `data`, in nats per token; None if it was interrupted.

    The sum is in float64, so that neither the microbatch size nor the number of processes changes
    the result beyond rounding.

    Args:
        shares: whether the processes share the microbatches. If so a collective: every rank.
        watched: passes microbatches on; its second argument is their number.
        is_interrupted: called after each microbatch.
    """
    process = step.process
    start, stride = (process.rank, process.world_size) if shares else (0, 1)
    indices = range(start, len(data), stride)
    total = torch.zeros(2, dtype=torch.float64, device=process.device)  # loss, sequences
    num_sequences = 0
    step.state.model.eval()
    for _, token_ids, targets in watched(
            prefetch(data, indices, device=process.device), len(indices)):
        failpoint("validate")
        total[0] += step.validation_loss(token_ids, targets) * len(token_ids)
        num_sequences += len(token_ids)
        if is_interrupted():
            break
    step.state.model.train()
    total[1] = num_sequences
    if shares:
        dist.all_reduce(total)
    loss_sum, num_sequences = total.tolist()
    return loss_sum / num_sequences if num_sequences == data.num_sequences else None
