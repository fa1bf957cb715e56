"""When a run validates and saves, and how many checkpoints it keeps."""

import math
from typing import Self

from pydantic import model_validator

from settings.keys import Count, SameLoss
from settings.validation import ValidationConfig
from settings.weights import WeightsConfig


class CheckpointConfig(WeightsConfig, ValidationConfig):
    """The keys of `train.json` about checkpoints. A validation and a growth save one too."""

    checkpoint_interval: SameLoss[Count | None] = None  # global steps
    keep_checkpoints: SameLoss[Count | None] = None  # None for all

    @model_validator(mode="after")
    def _run_is_saved(self) -> Self:
        if not self.validates and self.checkpoint_interval is None:
            raise ValueError(
                "set validation_interval with"
                " validation_batches, or checkpoint_interval, so that the run is saved"
            )
        return self

    def num_validations(self, steps: range, *, num_steps: int) -> int:
        """Return how many of these steps of a run are followed by a validation, as the last is."""
        if self.validation_interval is None:
            return 0
        return _num_due(steps, [self.validation_interval], last=[num_steps - 1])

    def num_saves(self, steps: range, *, num_steps: int) -> int:
        """Return how many of these steps of a run are followed by a checkpoint.

        These are the steps with a validation, the last one, and the last one before a growth:
        compiling all layers may fail, or be killed.
        """
        last = [num_steps - 1]
        if self.grow is not None:
            last.append(self.growth_step(num_steps) - 1)
        return _num_due(steps, [self.validation_interval, self.checkpoint_interval], last=last)

    def is_validation_due(self, global_step: int, *, num_steps: int) -> bool:
        """Return whether a run of so many steps is validated after this one."""
        return self.num_validations(range(global_step, global_step + 1), num_steps=num_steps) > 0

    def is_save_due(self, global_step: int, *, num_steps: int) -> bool:
        """Return whether a run of so many steps saves a checkpoint after this one."""
        return self.num_saves(range(global_step, global_step + 1), num_steps=num_steps) > 0


def _num_due(steps: range, intervals: list[int | None], *, last: list[int]) -> int:
    """Return how many of these steps are the last of an interval, of one or two, or in `last`."""
    used = [interval for interval in intervals if interval is not None]

    def num_multiples(interval: int) -> int:
        return steps.stop // interval - steps.start // interval

    number = sum(map(num_multiples, used))
    if len(used) == 2:
        number -= num_multiples(math.lcm(*used))  # these were counted twice
    others = {step for step in last if all((step + 1) % interval for interval in used)}
    return number + len([step for step in others if step in steps])
