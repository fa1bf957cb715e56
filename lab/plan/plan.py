"""`lab plan`: estimate the memory, hours and dollars of a run before it is launched."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import click
from tabulate import tabulate

from basics.errors import UserError
from lab.plan.machines import Machine, known_machines, parse_machine
from lab.plan.memory import Memory, largest_microbatch, peak_memory
from lab.plan.setting import Setting, num_parameters
from reporting.speed import (
    CARDS_GIB,
    SLOW_DISK_BYTES_PER_SECOND,
    checkpoint_bytes,
    flops_per_token,
    usable_gib,
)
from run_config import Precision, Run, TrainConfig, load_run
from tokens.batch_plan import BatchPlan, nearest_divisors, plan_batches

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, roughly
PART_NAMES = {
    "weights": "weights", "optimizer": "optimizer state",
    "average": "averaged weights", "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision", "activations": "activations",
    "logits": "logits, loss and their gradients",
}
MACHINE_HEADS = ["machine", "US$\nper hour", "microbatch x\naccumulation", "largest\nmicrobatch",
                 "global\nbatch", "steps", "checkpoints,\nin total", "hours", "US$"]
MACHINE_NOTES = [
    "Hours and US$ are estimates, with validation, without startup. The low end is the best public",
    "MFU for such models on that GPU; the high end is the MFU that the original system reached,",
    "and a slow disk. The largest microbatch is the one expected to fit. Prices are those of",
    "December 2025, or of --machine.",
]
FORWARD_SHARE = 1 / 3  # of the FLOPs of a training token; validation has no backward pass
UNLIMITED_TOKENS = 2**62  # where min_train_tokens sets the length, the file's does not matter
NEVER = (math.inf, math.inf)


@click.command()
@click.argument("run")
@click.option("--machine", "machines", multiple=True, metavar="NAME=COUNTxGPU@USD",
              help="Add a machine to the table, with its price in US$ per hour, for example"
                   " box=8xH100@23.92.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="USD",
              help="Show which machines can train the run within this budget.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N",
              help="Training tokens of the dataset; needed if min_train_tokens is -1.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(run: str, machines: tuple[str, ...], budget: float | None, tokens: int | None,
            runs_dir: Path) -> None:
    """Estimate the memory, hours and dollars of RUN. Needs no GPU and no dataset."""
    loaded = load_run(runs_dir, run)
    uses_all_tokens = loaded.train.min_train_tokens == -1
    if uses_all_tokens and tokens is None:
        raise UserError(f"{loaded.train_path}: min_train_tokens is -1 (all tokens of the dataset);"
                        " set their number with --tokens")
    if tokens is not None and not uses_all_tokens:
        raise UserError(f"{loaded.train_path}: min_train_tokens is not -1, so --tokens has no"
                        " effect; drop --tokens")
    if budget is not None and not math.isfinite(budget):
        raise UserError(f"--budget is {budget}; wanted US dollars")
    table = [*known_machines(), *map(parse_machine, machines)]
    estimates = sorted((estimate(loaded, machine, tokens=tokens) for machine in table),
                       key=lambda found: found.usd)
    sections = [_run_lines(loaded, tokens), _memory_lines(loaded), _card_lines(loaded),
                _machine_lines(loaded, estimates, budget=budget),
                MACHINE_NOTES + _budget_lines(estimates, budget)]
    click.echo("\n\n".join("\n".join(lines) for lines in sections))


def _precision(train: TrainConfig) -> Precision:
    """Return the precision of a run on a GPU that supports bf16, as all GPUs in the table do."""
    return train.precision or ("bf16" if train.use_amp else "fp32")


def _run_lines(run: Run, tokens: int | None) -> list[str]:
    parameters, per_token = num_parameters(run.model), flops_per_token(run.model)
    num_tokens = tokens if run.train.min_train_tokens == -1 else run.train.min_train_tokens
    chinchilla = CHINCHILLA_TOKENS_PER_PARAMETER
    return [
        f"{run.name}: {parameters:,} parameters; {num_tokens:,} tokens,"
        f" {num_tokens / parameters:.1f} per parameter (Chinchilla: {chinchilla}, or"
        f" {chinchilla * parameters:,} tokens)",
        f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward;"
        f" {per_token * num_tokens:.3g} FLOP in total, without validation",
        f"a checkpoint takes {_checkpoint_bytes(run) / 1e9:,.2f} GB on disk",
    ]


def _checkpoint_bytes(run: Run) -> int:
    return checkpoint_bytes(run.model, run.train, num_parameters(run.model))


def _settings(run: Run) -> list[Setting]:
    """Return the settings of the two columns: one GPU, and several (computed for 8)."""
    return [Setting(run.model, run.train, _precision(run.train), num_processes=n) for n in (1, 8)]


def _memory_lines(run: Run) -> list[str]:
    """Show the memory peak by part, for the run's own microbatch."""
    size = run.train.microbatch_size
    peaks = [peak_memory(setting, size) for setting in _settings(run)]
    title = f"GiB at the peak, {_precision(run.train)}, microbatch {size}"
    parts = {PART_NAMES[field.name]: [getattr(peak, field.name) for peak in peaks]
             for field in fields(Memory)} | {"total": [peak.total for peak in peaks]}
    return _table([[title, "one GPU", "several GPUs"],
                   *([name, *(f"{size / 2**30:.2f}" for size in sizes)]
                     for name, sizes in parts.items())])


def _card_lines(run: Run) -> list[str]:
    """Show the largest microbatch that is expected to fit on cards of several sizes."""
    settings = _settings(run)
    sizes = [[f"{card} GiB", *(str(largest_microbatch(setting, usable_gib(card)) or "none")
                               for setting in settings)] for card in CARDS_GIB]
    return [*_table([["largest microbatch, by card", "one GPU", "several GPUs"], *sizes]),
            "computed for code that is not compiled; ddp_train.py --find-max-microbatch measures"
            " the code that will run"]


def _table(rows: list[list[str]], *, last_align: str = "right") -> list[str]:
    """Align cells in columns, the first one to the left. The first row holds the heads."""
    align = ["left", *["right"] * (len(rows[0]) - 2), last_align]
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
    return [line.rstrip() for line in table.splitlines()]


@dataclass(frozen=True)
class Estimate:
    """The resources that a run needs on one machine.

    Attributes:
        largest: the largest microbatch that is expected to fit.
        plan: None if the run cannot be trained on this machine.
        reason: why it cannot; empty if it can.
        hours: the lowest and the highest estimate.
    """

    machine: Machine
    largest: int
    plan: BatchPlan | None = None
    reason: str = ""
    hours: tuple[float, float] = NEVER

    @property
    def usd(self) -> tuple[float, float]:
        low, high = self.hours
        return low * self.machine.usd_per_hour, high * self.machine.usd_per_hour


def estimate(run: Run, machine: Machine, *, tokens: int | None) -> Estimate:
    """Plan a run on a machine, with its own microbatch or one that keeps its global batch.

    Args:
        tokens: training tokens of the dataset, where `min_train_tokens` is -1.
    """
    setting = Setting(run.model, run.train, _precision(run.train), machine.num_gpus)
    largest = largest_microbatch(setting, usable_gib(machine.gpu.memory_gib))
    size, batch = run.train.microbatch_size, run.train.global_batch_size
    if batch and batch % machine.num_gpus == 0 and largest:
        size, _ = nearest_divisors(batch // machine.num_gpus, largest)
    if size > largest:
        return Estimate(machine, largest, reason="does not fit in memory")
    train = run.train.model_copy(update={"microbatch_size": size})
    sized = Run(run.name, run.run_dir, run.model, train)
    try:
        plan = plan_batches(sized, world_size=machine.num_gpus,
                            file_tokens=_file_tokens(run, tokens))
    except UserError as error:
        is_uneven = batch and batch % machine.num_gpus
        reason = "batch not divisible" if is_uneven else str(error).split(": ", 1)[1]
        return Estimate(machine, largest, reason=reason)
    saving = num_checkpoints(run, plan) * _checkpoint_bytes(run) / SLOW_DISK_BYTES_PER_SECOND
    low, high = (_hours(run, plan, machine, mfu=mfu)
                 for mfu in (machine.gpu.high_mfu, machine.gpu.low_mfu))
    return Estimate(machine, largest, plan, hours=(low, high + saving / 3600))


def _file_tokens(run: Run, tokens: int | None) -> int:
    if run.train.min_train_tokens != -1:
        return UNLIMITED_TOKENS
    return run.train.start_train_token + tokens + 1


def _hours(run: Run, plan: BatchPlan, machine: Machine, *, mfu: float) -> float:
    """Return the hours of training plus validation; one GPU validates, or all of them do."""
    flops = mfu * machine.gpu.peak(_precision(run.train))
    per_token = flops_per_token(run.model)
    training = plan.num_tokens * per_token / (flops * machine.num_gpus)
    sequences = run.train.num_validation_sequences * _num_validations(run, plan)
    num_validating = machine.num_gpus if run.train.validate_on == "all" else 1
    validation = (sequences * plan.context_length * per_token * FORWARD_SHARE
                  / (flops * num_validating))
    return (training + validation) / 3600


def _num_validations(run: Run, plan: BatchPlan) -> int:
    return -(-plan.num_steps // run.train.validation_interval) if run.train.validates else 0


def num_checkpoints(run: Run, plan: BatchPlan) -> int:
    """Return the number of steps after which a run saves a checkpoint."""
    steps, train = plan.num_steps, run.train
    intervals = list(filter(None, (train.validation_interval, train.checkpoint_interval)))
    count = sum(steps // interval for interval in intervals)
    if len(intervals) == 2:
        count -= steps // math.lcm(*intervals)  # one checkpoint serves both
    return count + all(steps % interval for interval in intervals)  # the last step is always saved


def _machine_lines(run: Run, estimates: list[Estimate], *, budget: float | None) -> list[str]:
    heads = [*MACHINE_HEADS, "" if budget is None else f"budget\n${budget:,.2f}"]
    return _table([heads, *(_machine_cells(run, found, budget) for found in estimates)],
                  last_align="left")


def _machine_cells(run: Run, found: Estimate, budget: float | None) -> list[str]:
    machine, plan = found.machine, found.plan
    first = [machine.name, f"{machine.usd_per_hour:.2f}"]
    if plan is None:
        return [*first, "-", f"{found.largest}", "-", "-", "-", "-", "-", found.reason]
    count = num_checkpoints(run, plan)
    return [
        *first, f"{plan.microbatch_size} x {plan.gradient_accumulation_steps}",
        f"{found.largest}", f"{plan.global_batch_size:,}", f"{plan.num_steps:,}",
        f"{count:,} ({count * _checkpoint_bytes(run) / 1e9:,.0f} GB)",
        *(f"{low:,.2f} to {high:,.2f}" for low, high in (found.hours, found.usd)),
        _verdict(found, budget),
    ]


def _verdict(found: Estimate, budget: float | None) -> str:
    if budget is None:
        return ""
    low, high = found.usd
    return "fits" if high <= budget else "fits if fast" if low <= budget else "too expensive"


def _budget_lines(estimates: list[Estimate], budget: float | None) -> list[str]:
    if budget is None:
        return []
    names = {verdict: ", ".join(found.machine.name for found in estimates
                                if _verdict(found, budget) == verdict) or "none"
             for verdict in ("fits", "fits if fast")}
    return [f"Within ${budget:,.2f}: {names['fits']}; only if fast: {names['fits if fast']}."]
