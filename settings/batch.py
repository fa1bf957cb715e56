"""The sequences of one step."""

from typing import Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig
from settings.keys import Count


class BatchConfig(FrozenConfig):
    """The keys of `train.json` about the size of a batch. Each changes the speed."""

    microbatch_size: Count  # sequences in one forward pass of one process
    gradient_accumulation_steps: Count = 1
    global_batch_size: int | None = Field(default=None, ge=1, le=2**31)  # sequences

    @model_validator(mode="after")
    def _one_size_of_a_step(self) -> Self:
        if self.global_batch_size and "gradient_accumulation_steps" in self.model_fields_set:
            raise ValueError("gradient_accumulation_steps follows from global_batch_size: drop it")
        return self
