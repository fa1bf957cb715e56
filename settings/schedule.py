"""The learning rate over the steps."""

from typing import Literal, Self

from pydantic import Field, model_validator

from basics.json_files import FrozenConfig

Schedule = Literal["constant", "cosine", "linear", "wsd"]


class ScheduleConfig(FrozenConfig):
    """The keys of `train.json` about the schedule of the learning rate."""

    schedule: Schedule | None = None
    schedule_learning_rate: bool = False
    warmup_period_percent: float = Field(default=0, ge=0, lt=100)  # of the global steps
    decay_period_percent: float | None = Field(default=None, gt=0, le=100)  # of the global steps
    final_learning_rate_fraction: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_schedule_within_the_run(self) -> Self:
        if self.schedule_learning_rate and self.schedule not in (None, "cosine"):
            raise ValueError(
                f'schedule is "{self.schedule}" but schedule_learning_rate is true, which means'
                " cosine: drop one"
            )
        if self.warmup_period_percent + (self.decay_period_percent or 0) > 100:
            raise ValueError(
                "warmup_period_percent and decay_period_percent are more than 100 together: lower"
                " one"
            )
        return self

    @property
    def resolved_schedule(self) -> Schedule:
        """The schedule; `schedule_learning_rate` is the original's name of the cosine."""
        return self.schedule or ("cosine" if self.schedule_learning_rate else "constant")
