"""The MFU that a run is expected to reach on a GPU, and where that figure comes from.

First choice is a run of one's own on that GPU, then a measurement that ships with the project,
then an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from basics.config_files import FrozenConfig
from basics.errors import UserError
from basics.files import read_regular_file
from lab.plan.setting import num_parameters
from reporting.speed import (
    EXPECTED_SHARE,
    SPEED_CHECK_STEPS,
    Gpu,
    find_gpu,
    flops_per_token,
)
from run_config import ModelConfig, Precision

MEASURED_PATH = Path(__file__).parents[2] / "benchmarks" / "measured.json"
MAX_SIZE_RATIO = 2  # between the FLOPs per token of two models whose MFUs are alike
ESTIMATE, ROUGH_ESTIMATE = "estimate", "rough estimate"


class Measurement(FrozenConfig):
    """A training speed of this trainer, compiled; `benchmarks/measured.json` is a list of them.

    Attributes:
        device: the GPU's name as its driver gives it.
        tokens_per_second: of all processes, in the steps after the first, without validation.
        source: how the figure was measured: the command or document, and the date.
    """

    device: str
    processes: int = Field(ge=1)
    precision: Precision
    activation_checkpointing: bool = False
    tokens_per_second: float = Field(gt=0)
    model: ModelConfig
    source: str

    def mfu(self, gpu: Gpu) -> float:
        flops = self.tokens_per_second * flops_per_token(self.model) / self.processes
        return flops / gpu.peak(self.precision)


@dataclass(frozen=True)
class Wanted:
    """What a measurement must have to be used for a planned run."""

    model: ModelConfig
    precision: Precision
    activation_checkpointing: bool

    def size_ratio(self, found: Measurement) -> float:
        """Return how many times more FLOPs per token one of the two models needs."""
        ratio = flops_per_token(found.model) / flops_per_token(self.model)
        return max(ratio, 1 / ratio)

    def fits(self, found: Measurement, gpu: Gpu) -> bool:
        return (find_gpu(found.device) is gpu and found.precision == self.precision
                and found.activation_checkpointing == self.activation_checkpointing
                and self.size_ratio(found) <= MAX_SIZE_RATIO and found.mfu(gpu) <= 1)


@dataclass(frozen=True)
class ExpectedSpeed:
    """An expected MFU with its source.

    Attributes:
        source: in a word or two, for a table.
        detail: how it was measured or estimated.
    """

    mfu: float
    source: str
    detail: str

    @classmethod
    def estimate(cls, gpu: Gpu) -> ExpectedSpeed:
        if gpu.public_mfu is not None:
            return cls(gpu.expected_mfu, ESTIMATE, "from public figures for several such GPUs;"
                       " not measured with this trainer")
        return cls(gpu.expected_mfu, ROUGH_ESTIMATE, f"{EXPECTED_SHARE:.0%} of the MFU of the low"
                   " figures; no public figure for several such GPUs is known")


@dataclass(frozen=True)
class SpeedSources:
    """All measurements known: those of one's own runs, the newest first, and those shipped."""

    own: tuple[Measurement, ...] = ()
    shipped: tuple[Measurement, ...] = ()

    @classmethod
    def read(cls, runs_dir: Path, measured_path: Path = MEASURED_PATH) -> SpeedSources:
        """Read the summaries of all runs, and the measurements that ship with the project.

        Raises:
            UserError: the latter cannot be read. A run's summary that cannot be used is passed by.
        """
        paths = sorted(runs_dir.glob("*/summary.json"), key=_age)
        return cls(own=tuple(filter(None, map(read_own, paths))),
                   shipped=read_shipped(measured_path))

    def expected(self, wanted: Wanted, gpu: Gpu) -> ExpectedSpeed:
        """Return the first source's figure for a GPU: of its runs that of the nearest model."""
        for name, measurements in (("run {}", self.own), ("measured", self.shipped)):
            fitting = [found for found in measurements if wanted.fits(found, gpu)]
            if fitting:
                nearest = min(fitting, key=wanted.size_ratio)  # of equals the first one
                return ExpectedSpeed(nearest.mfu(gpu), name.format(nearest.source), (
                    f"{nearest.tokens_per_second:,.0f} tokens/s on {nearest.processes}x"
                    f" {nearest.device}, {num_parameters(nearest.model):,} parameters"
                    + ("" if measurements is self.own else f" ({nearest.source})")))
        return ExpectedSpeed.estimate(gpu)


def read_shipped(path: Path) -> tuple[Measurement, ...]:
    """Read the project's own measurements. Raises: UserError if the file cannot be read."""
    try:
        return TypeAdapter(tuple[Measurement, ...]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); it is part of the"
                        " project: download it again") from None


class _Machine(BaseModel):
    device: str
    device_type: Literal["cuda"]
    processes: int = Field(ge=1)
    precision: Precision
    compiled: Literal[True]


class _Train(BaseModel):
    activation_checkpointing: bool = False


class _Seconds(BaseModel):
    training: float = Field(gt=0, allow_inf_nan=False)
    waiting: float = Field(ge=0, allow_inf_nan=False)


class _Summary(BaseModel):
    """The part of a `summary.json` that tells a speed."""

    status: Literal["finished", "stopped"]
    global_step: int = Field(ge=SPEED_CHECK_STEPS - 1)
    tokens: int = Field(ge=1)
    seconds: _Seconds
    machine: _Machine
    model: ModelConfig
    train: _Train


def read_own(path: Path) -> Measurement | None:
    """Read the speed of a run from its `summary.json`; None if it has none to go by.

    The time of a launch's first step counts as compiling, so its tokens do not count either.
    """
    try:
        summary = _Summary.model_validate_json(read_regular_file(path))
    except (OSError, ValidationError):
        return None
    tokens = summary.tokens * summary.global_step / (summary.global_step + 1)
    return Measurement(
        device=summary.machine.device, processes=summary.machine.processes,
        precision=summary.machine.precision,
        activation_checkpointing=summary.train.activation_checkpointing,
        tokens_per_second=tokens / (summary.seconds.training + summary.seconds.waiting),
        model=summary.model, source=path.parent.name)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return math.inf
