"""The MFU that a run is expected to reach on a GPU, and where that figure comes from.

First choice is a run of one's own on that GPU, then a measurement that ships with the project,
then an estimate.
"""

import json
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from basics.errors import UserError
from basics.files import read_regular_file
from basics.json_files import FrozenConfig
from lab.plan.setting import Setting, num_parameters
from lab.runs import number
from reporting.speed import (
    ASSUMED,
    EXPECTED_SHARE,
    SPEED_CHECK_STEPS,
    Gpu,
    find_gpu,
    flops_per_token,
)
from run_config import RUN_NAME, ModelConfig, Precision

MEASURED_PATH = Path(__file__).parents[2] / "benchmarks" / "measured.json"
MAX_SIZE_RATIO = 2  # between the FLOPs per token of two models whose MFUs are alike
PUBLIC_FLOPS_PER_TOKEN = 854.44e6  # of GPT-2 small, which the public figures are of
FEW_PARAMETERS = 1e6  # a model with fewer leaves a GPU waiting for its host
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

    def fits(self, wanted: Setting, gpu: Gpu) -> bool:
        """Return whether this is the speed of such a run on such a GPU; how many is not asked."""
        low, high = CREDIBLE_MFU
        return (find_gpu(self.device) is gpu
                and _kind(self.precision) == _kind(wanted.precision)
                and self.compile == (wanted.train.compile is not False)
                and (self.attention == "math") == (wanted.train.attention == "math")
                and self.activation_checkpointing == wanted.train.activation_checkpointing
                and bool(self.model.drop_rate) == bool(wanted.model.drop_rate)
                and _size_ratio(wanted, flops_per_token(self.model)) <= MAX_SIZE_RATIO
                and low <= self.mfu(gpu) <= high)


class ExpectedSpeed(NamedTuple):
    """An expected MFU, its source in a word or two, and how it was measured or estimated."""

    mfu: float
    source: str
    detail: str


def read_measured(runs_dir: Path,
                  measured_path: Path = MEASURED_PATH) -> dict[str, list[Measurement]]:
    """Read the summaries of all runs, and the measurements that ship with the project.

    Returns:
        By source: those of one's own runs, the newest first, and those shipped.

    Raises:
        UserError: the latter cannot be read. A run's summary that cannot be used is passed by.
    """
    paths = sorted(runs_dir.glob("*/summary.json"), reverse=True,
                   key=lambda path: path.stat().st_mtime if path.exists() else 0)
    try:
        shipped = TypeAdapter(list[Measurement]).validate_json(measured_path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{measured_path}: cannot be read ({type(error).__name__}); it is part of"
                        " the project: download it again") from None
    return {OWN: [found for path in paths if (found := read_own(path))], MEASURED: shipped}


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


def expected_speed(wanted: Setting, gpu: Gpu,
                   measured: dict[str, list[Measurement]]) -> ExpectedSpeed:
    """Return the figure of the first source that has one; of its runs that of the nearest model."""
    for name, found in measured.items():
        if fitting := [one for one in found if one.fits(wanted, gpu)]:
            nearest = min(fitting, key=lambda one: _size_ratio(
                wanted, flops_per_token(one.model)))  # of equals the first one
            return ExpectedSpeed(nearest.mfu(gpu), name, (
                f"{nearest.tokens_per_second:,.0f} tokens/s on {nearest.processes}x"
                f" {nearest.device}, {num_parameters(nearest.model):,} parameters"
                f" ({nearest.source})"))
    return _estimate(wanted, gpu)


def _estimate(wanted: Setting, gpu: Gpu) -> ExpectedSpeed:
    """Estimate from public figures, if there are any and they are of such a run."""
    mfu = gpu.expected_mfu * (RECOMPUTING if wanted.train.activation_checkpointing else 1)
    reasons = {  # why public figures say little of this run
        wanted.precision: wanted.precision not in LOW_PRECISIONS,
        "not compiled": wanted.train.compile is False,
        "math attention": wanted.train.attention == "math",
        "recomputation, which adds a third of the work": wanted.train.activation_checkpointing,
        "dropout": wanted.model.drop_rate > 0,
        "another model size": _size_ratio(wanted, PUBLIC_FLOPS_PER_TOKEN) > MAX_SIZE_RATIO,
        "a model below a million parameters (the speed is a guess)":
            num_parameters(wanted.model) < FEW_PARAMETERS,
    }
    public = f"{gpu.public_mfu} in public runs on several GPUs"
    if gpu.public_mfu is None:
        number_of = "one" if wanted.num_processes == 1 else "several"
        best = (f"an assumed best of {gpu.high_mfu.share:.0%}" if gpu.high_mfu.origin == ASSUMED
                else f"the best of {gpu.high_mfu}")
        public = (f"no public figure for {number_of} {gpu.name}; assumed {gpu.expected_mfu:.0%},"
                  f" {EXPECTED_SHARE:.0%} of {best}")
    if any(reasons.values()):
        found = ", ".join(reason for reason, applies in reasons.items() if applies)
        return ExpectedSpeed(mfu, ROUGH, f"{public}; no public figure for: {found}")
    if gpu.public_mfu is None:
        return ExpectedSpeed(mfu, ROUGH, public)
    return ExpectedSpeed(mfu, PUBLIC, f"{public}; not measured with this trainer")


def _kind(precision: Precision) -> str:
    return "low" if precision in LOW_PRECISIONS else precision


def _size_ratio(wanted: Setting, flops: float) -> float:
    """Return how many times more FLOPs per token one of two models needs."""
    ratio = flops / flops_per_token(wanted.model)
    return max(ratio, 1 / ratio)
