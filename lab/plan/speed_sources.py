"""The MFU that a run is expected to reach on a GPU: of a run of one's own, else an estimate."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from basics.errors import UserError, one_line
from basics.gpu_readings import read_gpus
from basics.json_files import FrozenConfig, found_object
from lab.plan.memory import Setting
from lab.runs import Record, RunFiles, launched_runs, number
from reporting.gpus import EXPECTED_SHARE, GPT2_SMALL_FLOPS_PER_TOKEN, Gpu, find_gpu
from reporting.speed import SPEED_CHECK_STEPS
from run_config import ModelConfig, Run
from settings.batch import BatchConfig
from settings.machine import MachineConfig, NumCandidates, Precision

MAX_SIZE_RATIO = 2  # between the FLOPs per token of two models whose MFUs are alike
CREDIBLE_MFU = (0.01, 1.0)  # of a measurement
RECOMPUTING = 3 / 4  # of the MFU: a second forward pass adds a third of the work
# Sources, for a table.
OWN, MEASURED, PUBLIC, ASSUMED = "own run", "measured", "public", "assumed"
LOW_PRECISIONS = ("bf16", "fp16")  # whose peaks are equal
SPEED_KEYS = (*BatchConfig.model_fields, *MachineConfig.model_fields, "optimizer")
MAX_SPEED, MAX_PROCESSES = 2**53, 4096
DAMAGED = (LookupError, TypeError, ValueError, ArithmeticError)  # what damaged values raise


class Measurement(FrozenConfig):
    """A training speed of this trainer: of all processes, after the first step, no validation."""

    device: str = Field(pattern=r"^[ -~]{1,80}$")  # as the driver names it
    processes: int = Field(ge=1, le=MAX_PROCESSES)
    precision: Precision
    compile: bool = True
    attention: str = "auto"  # or the kernel that ran
    activation_checkpointing: bool = False
    sampled_softmax: NumCandidates | None = None
    tokens_per_second: float = Field(gt=0, le=MAX_SPEED)
    model: ModelConfig
    source: str  # the command or document, and the date

    @property
    def flops_per_token(self) -> float:
        """The training FLOPs per token."""
        return MachineConfig(sampled_softmax=self.sampled_softmax).flops_per_token(self.model)

    def mfu(self, gpu: Gpu) -> float:
        """Return the share of the peak in this precision that one process reaches."""
        flops = self.tokens_per_second * self.flops_per_token / self.processes
        return flops / gpu.peak(self.precision)

    def fits(self, wanted: Setting, gpu: Gpu) -> bool:
        """Return whether this is the speed of such a run on such a GPU; how many is not asked."""
        config, precisions = wanted.config, {self.precision, wanted.precision}
        return (
            find_gpu(self.device) is gpu
            and (len(precisions) == 1 or precisions == set(LOW_PRECISIONS))
            and self.compile == (config.compile is not False)
            and (self.attention == "math") == (config.attention == "math")
            and self.activation_checkpointing == config.activation_checkpointing
            and (self.sampled_softmax is None) == (config.sampled_softmax is None)
            and bool(self.model.drop_rate) == bool(wanted.model.drop_rate)
            and _size_ratio(wanted, self.flops_per_token) <= MAX_SIZE_RATIO
            and CREDIBLE_MFU[0] <= self.mfu(gpu) <= CREDIBLE_MFU[1]
        )


class ExpectedSpeed(NamedTuple):
    """An expected MFU, its source in a word or two, and how it was measured or estimated."""

    mfu: float
    source: str
    detail: str


def read_measured(runs_dir: Path) -> list[Measurement]:
    """Read the speeds of one's own runs, the newest first."""
    launched = launched_runs(runs_dir) if runs_dir.exists() else []
    paths = sorted(
        (runs_dir / name / "summary.json" for name in launched), reverse=True, key=_mtime
    )
    own = [read_own(path.parent) for path in paths]
    return [measurement for measurement in own if measurement]


def _mtime(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def read_own(run_dir: Path) -> Measurement | None:
    """Read the speed of a run's last launch; None if it has none to go by."""
    files = RunFiles.read(run_dir)
    machine = files.part("machine")
    if files.status not in ("finished", "stopped") or not files.is_on_gpus:
        return None
    with suppress(*DAMAGED):
        return Measurement(
            compile=machine["compiled"],
            tokens_per_second=_launch_speed(files.summary),
            activation_checkpointing=files.part("train")["activation_checkpointing"],
            sampled_softmax=files.part("train").get("sampled_softmax"),
            model=_launch_model(files.summary),
            source=f"run {run_dir.name}",
            **{key: machine[key] for key in ("device", "processes", "precision", "attention")},
        )
    return None


def _launch_speed(summary: Record) -> float:
    """Return tokens per second of a launch, without its first step, which compiles."""
    steps, tokens, seconds = (
        number(summary["this_launch"][key]) for key in ("steps", "tokens", "seconds")
    )
    if steps < SPEED_CHECK_STEPS - 1:
        raise ValueError("too short")
    return tokens / seconds


def _launch_model(summary: Record) -> ModelConfig:
    """Return the shape that `_launch_speed` is of: a run that grows has fewer layers at first."""
    model = ModelConfig.model_validate(summary["model"])
    num_layers = int(summary["this_launch"].get("num_layers", model.n_layers))
    return ModelConfig.model_validate(model.model_dump() | {"n_layers": num_layers})


def measured_speed(run: Run) -> tuple[float, int, str]:
    """Return tokens per second, on how many processes, and where: of a launch, or the search.

    Raises: UserError: no speed was measured with the run's settings on this machine.
    """
    gpus = [gpu.name for gpu in read_gpus() if gpu.name]
    for path in sorted((run.summary_path, run.search_path), reverse=True, key=_mtime):
        record = found_object(path)
        with suppress(*DAMAGED):
            if "this_launch" in record:
                speed, model = _launch_speed(record), _launch_model(record).model_dump()
            else:
                speed, model = record["tokens_per_second"], record["model"]
            device, world_size = str(record["machine"]["device"]), record["machine"]["processes"]
            if (
                0 < speed < MAX_SPEED
                and 1 <= world_size <= MAX_PROCESSES
                and (not gpus or gpus.count(device) == world_size)
                and model == run.model.model_dump()
                and all(record["train"][key] == getattr(run.config, key) for key in SPEED_KEYS)
            ):
                where = f"{world_size}x {one_line(device)} ({path.name})"
                return speed, world_size, f"{speed:,.0f} tokens/s on {where}"
    raise UserError(
        f"{run.run_dir}: no speed was measured with its settings on this machine; run"
        f" ddp_train.py {run.name} --find-max-microbatch --save, without a GPU with"
        " --memory-limit-gib N"
    )


def expected_speed(wanted: Setting, gpu: Gpu, measured: list[Measurement]) -> ExpectedSpeed:
    """Return the figure of an own run of the nearest model, else the best other one.

    That is of this trainer's benchmark on one such GPU, else of public runs, else assumed.
    """
    if fitting := [one for one in measured if one.fits(wanted, gpu)]:
        # Of equally near ones the first.
        nearest = min(fitting, key=lambda one: _size_ratio(wanted, one.flops_per_token))
        detail = (
            f"{nearest.tokens_per_second:,.0f} tokens/s on {nearest.processes}x"
            f" {nearest.device}, {nearest.model.num_parameters:,} parameters"
            f" ({nearest.source})"
        )
        return ExpectedSpeed(nearest.mfu(gpu), OWN, detail)
    config, known = wanted.config, gpu.public_mfu
    recomputing = RECOMPUTING if config.activation_checkpointing else 1
    is_as_original = config.compile is False or config.attention == "math"
    is_other_work = (
        config.activation_checkpointing
        or config.sampled_softmax is not None
        or wanted.precision not in LOW_PRECISIONS
        or _size_ratio(wanted, GPT2_SMALL_FLOPS_PER_TOKEN) > MAX_SIZE_RATIO
    )
    if is_as_original and wanted.precision in LOW_PRECISIONS:
        is_measured = not gpu.low_mfu.origin and not is_other_work
        origin = "for a run" if gpu.low_mfu.origin else "of the original system's code"
        detail = (
            f"{gpu.low_mfu}, {origin} with GPT-2 small, not compiled and with math attention;"
            " with only one of the two a run is faster"
        )
        mfu = gpu.low_mfu.share * recomputing
        return ExpectedSpeed(mfu, PUBLIC if is_measured else ASSUMED, detail)
    is_other = is_other_work or wanted.model.drop_rate or is_as_original
    own = gpu.own_mfu if wanted.num_processes == 1 else None
    share = own.share if own else gpu.expected_mfu
    if own:
        source, detail = MEASURED, f"{own} on one {gpu.name} with this trainer"
    elif known:
        source, detail = PUBLIC, f"{known} in public runs on several GPUs, none of this trainer"
    else:
        source = ASSUMED
        detail = (
            f"no public figure for several {gpu.name}; assumed {share:.0%},"
            f" {EXPECTED_SHARE:.0%} of {gpu.high_mfu}"
        )
    if is_other:
        source = ASSUMED
        detail += (
            "; a guess, as those runs are of GPT-2 small,"
            " compiled, in 16 bits, without dropout, recomputation and sampled softmax"
        )
    return ExpectedSpeed(share * recomputing, source, detail)


def _size_ratio(wanted: Setting, flops: float) -> float:
    """Return how many times more FLOPs per token one of two models needs."""
    ratio = flops / wanted.flops_per_token
    return max(ratio, 1 / ratio)
