"""Divide the tokens of a run into global steps, accumulation steps, processes, microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from basics.errors import UserError
from run_config import Run


@dataclass(frozen=True)
class BatchPlan:
    """The division of a run's tokens into global steps, accumulation steps and processes.

    Attributes:
        epoch_tokens: after so many the data begins again, with `repeat_data`; None without.
    """

    microbatch_size: int
    gradient_accumulation_steps: int
    world_size: int
    context_length: int
    num_steps: int
    epoch_tokens: int | None = None

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.context_length

    @property
    def global_batch_size(self) -> int:
        """Sequences in one global step."""
        return self.microbatch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.context_length

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.tokens_per_step


def accumulation_steps_of(run: Run, *, world_size: int) -> int:
    """Return the accumulation steps: as configured, or as they follow from `global_batch_size`.

    Raises:
        UserError: `global_batch_size` is not divisible; names the nearest sizes that are.
    """
    train, wanted = run.train, run.train.global_batch_size
    if wanted is None:
        return train.gradient_accumulation_steps
    per_process, rest = divmod(wanted, world_size)
    if rest or not per_process:
        fits = max(1, per_process) * world_size
        raise UserError(
            f"{run.train_path}: global_batch_size {wanted} is not divisible by {world_size}"
            f" processes; change the number of processes, or make it {fits} or {fits + world_size}"
        )
    if per_process % train.microbatch_size:
        below, above = nearest_divisors(per_process, train.microbatch_size)
        nearest = below if above is None else f"{below} or {above}"
        raise UserError(
            f"{run.train_path}: global_batch_size {wanted} is not divisible by microbatch_size"
            f" {train.microbatch_size} x {world_size} processes; the nearest microbatch_size that"
            f" divides is {nearest}"
        )
    return per_process // train.microbatch_size


def nearest_divisors(number: int, wanted: int) -> tuple[int, int | None]:
    """Return the largest divisor of a number up to `wanted`, and the smallest above it, if any."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    return (max(d for d in divisors if d <= wanted),
            min((d for d in divisors if d > wanted), default=None))


def plan_batches(run: Run, *, world_size: int, file_tokens: int) -> BatchPlan:
    """Divide a run's tokens into whole global batches.

    `min_train_tokens` is rounded up to whole global batches; -1 uses every whole batch after
    `start_train_token`. The file needs one more token than is trained on: the last target. With
    `repeat_data` the whole sequences of the file, at least one, are read again and again.

    Raises:
        UserError: the token file (of `file_tokens` tokens) is too short, or `global_batch_size` is
            not divisible by the microbatches of all processes.
    """
    train, path = run.train, run.train_path
    accumulation_steps = accumulation_steps_of(run, world_size=world_size)
    step_tokens = (train.microbatch_size * accumulation_steps * world_size
                   * run.model.context_length)
    if train.start_train_token >= file_tokens:
        raise UserError(f"{path}: start_train_token {train.start_train_token} is past the end of"
                        f" {train.dataset}, which has {file_tokens} training tokens; lower it")
    usable_tokens, epoch_tokens = file_tokens - train.start_train_token - 1, None
    if train.repeat_data and usable_tokens >= run.model.context_length:
        epoch_tokens = usable_tokens // run.model.context_length * run.model.context_length
        usable_tokens = 2**62
    usable_steps = usable_tokens // step_tokens
    wanted_steps = -(-train.min_train_tokens // step_tokens)
    num_steps = usable_steps if train.min_train_tokens == -1 else wanted_steps
    if not 1 <= num_steps <= usable_steps:
        needed = max(num_steps, 1) * step_tokens + 1
        raise UserError(
            f"{path}: wanted {needed} training tokens from token {train.start_train_token} on"
            f" (batches of {step_tokens}), but {train.dataset} has"
            f" {file_tokens - train.start_train_token}; lower min_train_tokens, or set repeat_data"
        )
    return BatchPlan(
        microbatch_size=train.microbatch_size,
        gradient_accumulation_steps=accumulation_steps,
        world_size=world_size,
        context_length=run.model.context_length,
        num_steps=num_steps,
        epoch_tokens=epoch_tokens,
    )
