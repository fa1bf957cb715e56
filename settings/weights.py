"""The weights that a run begins with."""

from typing import Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig


class Grow(FrozenConfig):
    """The first part of a run trains the first `from_layers` layers alone: a share of its steps."""

    from_layers: int = Field(default=1, ge=1, le=2**10)
    at: float = Field(gt=0, lt=1)  # the share


class WeightsConfig(FrozenConfig):
    """The keys of `train.json` about initial weights."""

    random_seed: int = Field(default=42, ge=0, lt=2**63)  # also of dropout
    init_from: str | None = Field(default=None, min_length=1, max_length=4096)
    grow: Grow | None = None

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> Self:
        if self.grow is not None and self.init_from is not None:
            raise ValueError(
                "grow trains from initial weights, and init_from has weights of all layers: drop"
                " one"
            )
        return self

    def growth_step(self, num_steps: int) -> int:
        """Return the first global step with all layers in a run of so many; 0 without `grow`."""
        if self.grow is None:
            return 0
        # At least one step has few layers, and at least the last one has all.
        return min(max(1, round(self.grow.at * num_steps)), num_steps - 1)
