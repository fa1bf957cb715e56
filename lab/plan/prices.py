"""Prices of rented machines that ship with the project: when, of which kind, and from where."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from basics.json_files import FrozenConfig

PRICES_PATH = Path(__file__).parents[2] / "benchmarks" / "prices.json"


class Price(FrozenConfig):
    """A price in US$ per hour of all GPUs of a machine."""

    gpu: str  # a name of `GPUS` in `reporting/speed.py`
    num_gpus: int = Field(ge=1)
    usd_per_hour: float = Field(gt=0)
    month: str = Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")
    kind: Literal["on demand", "spot"]  # a spot machine may be taken away at any time
    source_kind: Literal["provider's page", "marketplace", "published by users"]
    provider: str
    source: str  # the page or the public copy of it that was read
    note: str = ""


class Prices(FrozenConfig):
    """`benchmarks/prices.json`: the machines of every plan, and those of a comparison only."""

    about: str
    presets: list[Price]
    others: list[Price]


def read_prices() -> Prices:
    return Prices.model_validate_json(PRICES_PATH.read_bytes())
