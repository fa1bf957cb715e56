"""What a run measures and shows beside its losses."""

from typing import Literal, Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig
from settings.keys import Count, SameLoss


class StopIfBehind(FrozenConfig):
    """How far a run may be above its reference: `std` or `loss`, in `reports` reports in a row."""

    std: float | None = Field(default=None, gt=0, le=1e6)  # of the reference's noise
    loss: float | None = Field(default=None, gt=0, le=1e6)  # nats per token
    reports: int = Field(default=3, ge=1, le=2**31)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if (self.std is None) == (self.loss is None):
            raise ValueError("stop_if_behind wants either std or loss; set one of them")
        return self


class ReportConfig(FrozenConfig):
    """The keys of `train.json` about diagnostics, trackers and the reference curve."""

    diagnostics_interval: SameLoss[Count | None] = None  # global steps
    tracker: SameLoss[Literal["none", "tensorboard", "wandb", "trackio"]] = "none"
    reference: str | None = Field(default=None, min_length=1, max_length=64)
    stop_if_behind: StopIfBehind | None = None
