"""The price of a run, its budget, and how long its processes wait."""

from pydantic import Field

from basics.cli import MAX_USD_PER_HOUR
from basics.json_files import FrozenConfig
from settings.keys import SameLoss


class LimitsConfig(FrozenConfig):
    """The keys of `train.json` about dollars and times."""

    # Of all machines of the run.
    usd_per_hour: SameLoss[float | None] = Field(default=None, gt=0, le=MAX_USD_PER_HOUR)
    max_cost_usd: SameLoss[float | None] = Field(default=None, gt=0, le=1e9)
    max_hours: SameLoss[float | None] = Field(default=None, gt=0, le=1e6)
    collective_timeout_seconds: SameLoss[float] = Field(default=600, ge=1, le=10**6)
    hang_timeout_seconds: SameLoss[float] = Field(default=600, ge=1, le=10**6)
