"""The MFU that a run is expected to reach on a GPU, and where that figure comes from.

First choice is a run of one's own on that GPU, then a measurement that ships with the project,
then an estimate.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from basics.errors import UserError
from basics.files import read_regular_file
from basics.json_files import FrozenConfig
from lab.plan.setting import num_parameters
from lab.runs import number
from reporting.speed import (
    ASSUMED,
    EXPECTED_SHARE,
    SPEED_CHECK_STEPS,
    Gpu,
    find_gpu,
    flops_per_token,
)
from run_config import RUN_NAME, ModelConfig, Precision, TrainConfig

MEASURED_PATH = Path(__file__).parents[2] / "benchmarks" / "measured.json"
MAX_SIZE_RATIO = 2  # between the FLOPs per token of two models whose MFUs are alike
PUBLIC_FLOPS_PER_TOKEN = 854.44e6  # of GPT-2 small, which the public figures are of
CREDIBLE_MFU = (0.01, 1.0)  # of a measurement
RECOMPUTING = 3 / 4  # of the MFU: a second forward pass adds a third of the work
OWN, MEASURED, PUBLIC, ROUGH = "own run", "measured", "public", "rough"  # sources, for a table
LOW_PRECISIONS = ("bf16", "fp16")  # whose peaks are equal


class Measurement(FrozenConfig):
    """A training speed of this trainer; `benchmarks/measured.json` is a list of them.

    Attributes:
        device: the GPU's name as its driver gives it.
        attention: as in `train.json`, or the kernel that ran.
        tokens_per_second: of all processes, in the steps after the first, without validation.
        source: how the figure was measured: the command or document, and the date.
    """

    device: str = Field(pattern=r"^[ -~]{1,80}$")
    processes: int = Field(ge=1, le=4096)
    precision: Precision
    compile: bool = True
    attention: str = "auto"
    activation_checkpointing: bool = False
    tokens_per_second: float = Field(gt=0, le=2**53)
    model: ModelConfig
    source: str

    def mfu(self, gpu: Gpu) -> float:
        flops = self.tokens_per_second * flops_per_token(self.model) / self.processes
        return flops / gpu.peak(self.precision)


@dataclass(frozen=True)
class Wanted:
    """What a measurement must have to be used for a planned run, on a GPU.

    Attributes:
        num_gpus: of the machine; a measurement may be of another number.
    """

    model: ModelConfig
    train: TrainConfig
    precision: Precision
    num_gpus: int = 1

    def size_ratio(self, flops: float) -> float:
        """Return how many times more FLOPs per token one of two models needs."""
        ratio = flops / flops_per_token(self.model)
        return max(ratio, 1 / ratio)

    def fits(self, found: Measurement, gpu: Gpu) -> bool:
        low, high = CREDIBLE_MFU
        return (find_gpu(found.device) is gpu
                and _kind(found.precision) == _kind(self.precision)
                and found.compile == (self.train.compile is not False)
                and (found.attention == "math") == (self.train.attention == "math")
                and found.activation_checkpointing == self.train.activation_checkpointing
                and bool(found.model.drop_rate) == bool(self.model.drop_rate)
                and self.size_ratio(flops_per_token(found.model)) <= MAX_SIZE_RATIO
                and low <= found.mfu(gpu) <= high)

    def not_public(self) -> list[str]:
        """List why public figures say little of this run; empty if they do."""
        reasons = {
            self.precision: self.precision not in LOW_PRECISIONS,
            "not compiled": self.train.compile is False,
            "math attention": self.train.attention == "math",
            "recomputation, which adds a third of the work": self.train.activation_checkpointing,
            "dropout": self.model.drop_rate > 0,
            "another model size": self.size_ratio(PUBLIC_FLOPS_PER_TOKEN) > MAX_SIZE_RATIO,
        }
        return [reason for reason, applies in reasons.items() if applies]


def _kind(precision: Precision) -> str:
    return "low" if precision in LOW_PRECISIONS else precision


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
    def estimate(cls, wanted: Wanted, gpu: Gpu) -> ExpectedSpeed:
        """Estimate from public figures, if there are any and they are of such a run."""
        recomputing = RECOMPUTING if wanted.train.activation_checkpointing else 1
        mfu, reasons = gpu.expected_mfu * recomputing, wanted.not_public()
        public = f"{gpu.public_mfu} in public runs on several GPUs"
        if gpu.public_mfu is None:
            number = "one" if wanted.num_gpus == 1 else "several"
            best = f"the best of {gpu.high_mfu}"
            if gpu.high_mfu.origin == ASSUMED:
                best = f"an assumed best of {gpu.high_mfu.share:.0%}"
            public = (f"no public figure for {number} {gpu.name}; assumed"
                      f" {gpu.expected_mfu:.0%}, {EXPECTED_SHARE:.0%} of {best}")
        if reasons:
            return cls(mfu, ROUGH, f"{public}; no public figure for: {', '.join(reasons)}")
        if gpu.public_mfu is None:
            return cls(mfu, ROUGH, public)
        return cls(mfu, PUBLIC, f"{public}; not measured with this trainer")


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
        for name, measurements in ((OWN, self.own), (MEASURED, self.shipped)):
            fitting = [found for found in measurements if wanted.fits(found, gpu)]
            if fitting:
                nearest = min(fitting, key=lambda found: wanted.size_ratio(
                    flops_per_token(found.model)))  # of equals the first one
                return ExpectedSpeed(nearest.mfu(gpu), name, (
                    f"{nearest.tokens_per_second:,.0f} tokens/s on {nearest.processes}x"
                    f" {nearest.device}, {num_parameters(nearest.model):,} parameters"
                    f" ({nearest.source})"))
        return ExpectedSpeed.estimate(wanted, gpu)


def read_shipped(path: Path) -> tuple[Measurement, ...]:
    """Read the project's own measurements. Raises: UserError if the file cannot be read."""
    try:
        return TypeAdapter(tuple[Measurement, ...]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); it is part of the"
                        " project: download it again") from None


def read_own(path: Path) -> Measurement | None:
    """Read the speed of a run's last launch from `summary.json`; None if it has none to go by."""
    if RUN_NAME.fullmatch(path.parent.name) is None:
        return None
    try:
        summary = json.loads(read_regular_file(path))
        machine = summary["machine"]
        steps, tokens, seconds = (number(summary["this_launch"][key])  # without its first step
                                  for key in ("steps", "tokens", "seconds"))
        if (summary["status"] not in ("finished", "stopped") or machine["device_type"] != "cuda"
                or steps < SPEED_CHECK_STEPS - 1):
            return None
        return Measurement(
            device=machine["device"], processes=machine["processes"],
            precision=machine["precision"], compile=machine["compiled"],
            attention=machine["attention"],
            activation_checkpointing=summary["train"]["activation_checkpointing"],
            tokens_per_second=tokens / seconds,
            model=ModelConfig.model_validate(summary["model"]), source=f"run {path.parent.name}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
            ArithmeticError):
        return None


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return math.inf
