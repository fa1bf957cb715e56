"""The batch plan, hours and dollars of a run on a machine; the length that a budget buys."""

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, Self

from basics.checkpoint_files import SNAPSHOT_BLOCK_BYTES, named_as_checkpoints
from basics.errors import UserError
from basics.json_files import set_number
from basics.text import counted
from lab.plan.memory import Setting, largest_microbatch
from lab.plan.speed_sources import OWN, Measurement, expected_speed, measured_speed
from processes.run_lock import lock_run
from reporting import speed
from reporting.estimate import Ahead, Rates, seconds_ahead, validation_steps
from reporting.gpus import SMALLEST_FLOPS_PER_TOKEN, Gpu, Price, find_gpu
from reporting.summary import duration
from run_config import Run, TrainConfig, make_run_dir
from settings.machine import Precision
from tokens.batch_plan import BatchPlan, divided, plan_batches

TOKEN_BYTES = 2  # in a file
MAX_TOKENS = 2**50  # of a length that a budget buys
UNLIMITED_TOKENS = 2**62  # of a file whose length is not known or does not matter
TOO_SMALL = "too small for the formula"
MAX_NAME = 16  # characters, so that the table fits a terminal
MACHINE = re.compile(rf"(?:([^=]{{1,{MAX_NAME}}})=)?([1-9]\d{{0,3}})x([^@]+)@(\d{{1,5}}(\.\d+)?)")


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs of one type and its price per hour in US dollars."""

    name: str
    num_gpus: int
    gpu: Gpu
    usd_per_hour: float
    price: Price | None = None  # where `usd_per_hour` is from, if it ships with the project

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `[name=]COUNTxGPU@USD_PER_HOUR`. Raises: UserError."""
        match = MACHINE.fullmatch(text)
        gpu = find_gpu(match[3]) if match else None
        if gpu is None or not float(match[4]):
            raise UserError(
                f"--machine {text[:60]!r}: wanted [name=]COUNTxGPU@USD_PER_HOUR, with"
                " a GPU that lab plan --help lists, for example box=8xH100@23.92 (name:"
                f" {MAX_NAME} characters at most)"
            )
        return cls(match[1] or f"{match[2]}x {gpu.name}", int(match[2]), gpu, float(match[4]))

    @classmethod
    def priced(cls, price: Price) -> Self:
        """Return the machine of a price that ships with the project."""
        gpu = find_gpu(price.gpu)
        assert gpu, price.gpu
        name = f"{price.num_gpus}x {gpu.name}"
        return cls(name, price.num_gpus, gpu, price.usd_per_hour, price)


def default_precision(config: TrainConfig, gpu: Gpu | None = None) -> Precision:
    """Return the precision of a run on a GPU; without one, on a GPU that has bf16."""
    fastest = "bf16" if gpu is None or gpu.has_bf16 else "fp16"
    return config.precision or (fastest if config.use_amp else "fp32")


def estimate(
    run: Run,
    machine: Machine,
    budget: float | None = None,
    *,
    tokens: int | None,
    measured: list[Measurement],
) -> dict[str, Any]:
    """Plan a run on a machine, with its own microbatch or one that keeps its global batch.

    Return the values of one machine as in `lab plan --json`; only those until `reason`, if that
    says why it cannot train the run. `tokens` are the dataset's, where `min_train_tokens` is -1.
    """
    gpu, config, num_gpus = machine.gpu, run.config, machine.num_gpus
    setting = Setting(run.model, config, default_precision(config, gpu), num_gpus)
    largest = largest_microbatch(setting, speed.usable_gib(gpu.memory_gib))
    found = {
        "name": machine.name,
        "gpu": gpu.name,
        "num_gpus": num_gpus,
        "usd_per_hour": machine.usd_per_hour,
        "price": machine.price and machine.price.model_dump(),
        "largest_microbatch": largest,
        "reason": None,
    }
    if not gpu.has_bf16 and "bf16" in (setting.precision, config.residual_dtype):
        return found | {"reason": "this GPU has no bf16"}
    try:
        sized = divided(run, world_size=num_gpus, most=max(1, largest))
    except UserError:
        return found | {"reason": "batch not divisible"}
    size = sized.config.microbatch_size
    if size > largest:
        return found | {"reason": "does not fit in memory"}
    file_tokens = UNLIMITED_TOKENS if tokens is None else config.start_train_token + tokens + 1
    try:
        plan = plan_batches(sized, world_size=num_gpus, file_tokens=file_tokens)
    except UserError:
        return found | {"reason": "too few tokens for a step"}
    mfu, source, detail = expected_speed(setting, gpu, measured)
    if source != OWN and setting.flops_per_token < SMALLEST_FLOPS_PER_TOKEN:
        return found | {"reason": TOO_SMALL}
    mfus = {
        "low": max(gpu.high_mfu.share, mfu),
        "expected": mfu,
        "high": min(gpu.low_mfu.share, mfu),
    }
    flops_per_second = mfu * gpu.peak(setting.precision)  # of a GPU
    stages = run.stages(plan.num_steps)
    parts = seconds_of(run, plan, flops_per_second)
    expected = sum(map(sum, parts)) / 3600
    training = {name: expected * mfu / each for name, each in mfus.items()}
    startup_hours = hours_of_startup(run, plan)
    hours = {name: value + startup_hours for name, value in training.items()}
    checkpoints = num_checkpoints(run, plan)
    saving_seconds = checkpoints * bytes_of_checkpoint(run) / speed.SLOW_DISK_BYTES_PER_SECOND
    hours["high"] += saving_seconds / 3600
    usd = {name: value * machine.usd_per_hour for name, value in hours.items()}
    validation_hours = sum(part.validation for part in parts) / 3600
    tokens_per_second = num_gpus * flops_per_second / flops_per_token(run, plan.num_steps)
    return found | {
        "microbatch_size": size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch_size": plan.global_batch_size,
        "steps": plan.num_steps,
        "checkpoints": checkpoints,
        "checkpoints_kept": most_checkpoints(run, plan),
        "startup_hours": startup_hours,
        "hours": hours,
        "usd": usd,
        "validation": {
            "interval": run.config.validation_interval,
            "number": num_validations(run, plan),
            "share": validation_hours / expected,
            "hours": validation_hours,
            "usd": validation_hours * machine.usd_per_hour,
        },
        "parts": [
            {
                "n_layers": stage.model.n_layers,
                "steps": len(stage.steps),
                "hours": sum(part) / 3600,
                "usd": sum(part) / 3600 * machine.usd_per_hour,
                "tokens_per_second": num_gpus
                * flops_per_second
                / run.config.flops_per_token(stage.model),
            }
            for stage, part in zip(stages, parts, strict=True)
        ],
        "tokens_per_second": tokens_per_second,
        "tokens_per_usd": tokens_per_second * 3600 / machine.usd_per_hour,
        "mfu": mfu,
        "source": source,
        "detail": detail,
        "budget": None if budget is None else verdict(usd, budget),
    }


def hours_of_startup(run: Run, plan: BatchPlan) -> float:
    """Estimate the hours of a run's only launch in which it does not train, on a machine that has
    neither its tokens nor its compiled code: start-up, download of the tokens, compilation."""
    num_depths = len(run.stages(plan.num_steps))
    num_compilations = 0 if run.config.compile is False else num_depths
    download_seconds = TOKEN_BYTES * plan.num_tokens / speed.DOWNLOAD_BYTES_PER_SECOND
    return (speed.estimated_startup_seconds(num_compilations) + download_seconds) / 3600


def seconds_of(run: Run, plan: BatchPlan, flops_per_second: float) -> list[Ahead]:
    """Estimate the seconds of training and validation, for each stage of the run.

    `flops_per_second` are of a process, in training and in validation.
    """
    tokens = plan.tokens_per_step / plan.world_size
    step = tokens * run.config.flops_per_token(run.model) / flops_per_second
    rates = Rates(run.model, step, step * validation_steps(run.model, run.config, plan))
    stages = run.stages(plan.num_steps)
    found = seconds_ahead(run, plan, stages, rates, first=0, stop=plan.num_steps)
    if run.config.validate_at_start:
        slower = stages[0].model.flops_per_token / run.model.flops_per_token
        first = found[0]
        found[0] = first._replace(validation=first.validation + slower * rates.validation)
    return found


def flops_of(run: Run, plan: BatchPlan) -> float:
    """Count the FLOPs of training and validation on the GPU that the others wait for."""
    return sum(map(sum, seconds_of(run, plan, flops_per_second=1.0)))


def flops_per_token(run: Run, num_steps: int) -> float:
    """Return the training FLOPs per token, as a mean over a run of so many steps."""
    stages = run.stages(num_steps)
    flops = sum(len(steps) * run.config.flops_per_token(model) for model, steps in stages)
    return flops / num_steps


def num_validations(run: Run, plan: BatchPlan) -> int:
    number = run.config.num_validations(range(plan.num_steps), num_steps=plan.num_steps)
    return number + run.config.validate_at_start


def num_checkpoints(run: Run, plan: BatchPlan) -> int:
    """Return the number of steps after which a run saves a checkpoint."""
    return run.config.num_saves(range(plan.num_steps), num_steps=plan.num_steps)


def most_checkpoints(run: Run, plan: BatchPlan) -> int:
    """Return the most checkpoints on disk at a time: newest, best and the one being written."""
    count, kept = num_checkpoints(run, plan), run.config.keep_checkpoints
    return count if kept is None else min(count, kept + 2)


def bytes_of_checkpoint(run: Run) -> int:
    return speed.checkpoint_bytes(run.model, run.config)


def pinned_bytes(run: Run) -> int:
    """Return the pinned host memory of rank 0's snapshot on a GPU: see `SnapshotBuffers`."""
    return -(-bytes_of_checkpoint(run) // SNAPSHOT_BLOCK_BYTES) * SNAPSHOT_BLOCK_BYTES


def speed_here(run: Run, tokens: int | None) -> str:
    """Say how long the run takes at the speed measured with its settings on this machine.

    Raises: UserError: none was measured.
    """
    tokens_per_second, world_size, measured = measured_speed(run)
    file_tokens = UNLIMITED_TOKENS if tokens is None else run.config.start_train_token + tokens + 1
    plan = plan_batches(run, world_size=world_size, file_tokens=file_tokens)
    flops_per_second = tokens_per_second / world_size * run.config.flops_per_token(run.model)
    seconds = flops_of(run, plan) / flops_per_second
    return (
        f"here about {duration(seconds)}, without start-up and checkpoints:"
        f" {plan.num_steps:,} steps at {measured}"
    )


def amount(value: float) -> str:
    """Format hours or dollars."""
    return f"{value:,.2f}" if value >= 0.005 else "<0.01"


def verdict(usd: dict[str, float], budget: float) -> str:
    """Say whether a run of these dollars (`low`, `expected`, `high`) fits a budget."""
    if usd["high"] <= budget:
        return "fits"
    if usd["expected"] <= budget:
        return "probably fits"
    return "fits if fast" if usd["low"] <= budget else "too expensive"


def save_length(run: Run, budget: float) -> str:
    """Write the `min_train_tokens` that a budget in US$ buys into `train.json`; return a report.

    Raises: UserError: the price or speed is not known, or the run has begun with another length.
    """
    price = run.config.usd_per_hour
    if price is None:
        raise UserError(
            f"{run.train_path}: --save needs the machine's price; set usd_per_hour, or"
            " pass --usd-per-hour"
        )
    make_run_dir(run)
    lock_run(run.run_dir)  # a launch keeps the length that it has read
    tokens_per_second, world_size, measured = measured_speed(run)
    one_token = run.config.model_copy(update={"min_train_tokens": 1})
    step = plan_batches(
        replace(run, config=one_token), world_size=world_size, file_tokens=UNLIMITED_TOKENS
    )
    flops_per_second = tokens_per_second / world_size * run.config.flops_per_token(run.model)
    flops_per_usd = flops_per_second * 3600 / price  # of a process

    def usd(num_steps: int) -> float:
        return flops_of(run, replace(step, num_steps=num_steps)) / flops_per_usd

    num_steps = bisect_right(range(1, MAX_TOKENS // step.tokens_per_step + 1), budget, key=usd)
    if not num_steps:
        raise UserError(f"--budget {budget:g}: buys no step, which costs US${usd(1):.2g}")
    present = -(-run.config.min_train_tokens // step.tokens_per_step)
    if num_steps != present and named_as_checkpoints(run.checkpoints_dir):
        raise UserError(
            f"{run.run_dir}: has checkpoints, so its length cannot become"
            f" {counted(num_steps, 'step')}; to start over with that, move checkpoints/"
            " away"
        )
    tokens, cost = step.tokens_of(num_steps), usd(num_steps)
    set_number(run.train_path, "min_train_tokens", tokens)
    return (
        f"saved in {run.train_path}: min_train_tokens {tokens} ({counted(num_steps, 'step')})\n"
        f"{amount(cost / price)} hours, US${amount(cost)} at {price:g} an hour: training and"
        f" validation, without start-up and checkpoints\nmeasured: {measured}"
    )
