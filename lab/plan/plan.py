"""`lab plan`: what a run takes, in memory, hours and dollars, before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import click

from basics.errors import UserError
from lab.plan.machines import Machine, known_machines, parse_machine
from lab.plan.memory import Memory, Setting, largest_microbatch, num_parameters, peak_memory
from reporting.clock import BYTES_PER_PARAMETER_SAVED, SLOW_DISK_BYTES_PER_SECOND
from reporting.speed import CARDS_GIB, flops_per_token, usable_gib
from run_config import Precision, Run, TrainConfig, load_run
from tokens.batch_plan import BatchPlan, nearest_divisors, plan_batches

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, roughly
PART_NAMES = {
    "weights": "weights", "optimizer": "optimizer", "gradients": "gradients",
    "buckets": "buckets, with the gradients in them", "weight_copies": "weights in low precision",
    "activations": "activations", "logits": "logits, loss and their gradients",
}
FORWARD_SHARE = 1 / 3  # of a training token's work is the forward pass, all that validation does
NO_DATASET_IS_LONGER = 2**62  # tokens: the plan asks for min_train_tokens, not for a file


@click.command()
@click.argument("run")
@click.option("--machine", "machines", multiple=True, metavar="NAME=COUNTxGPU@USD",
              help="A machine to add to the table: box=8xH100@23.92, dollars an hour.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), metavar="USD",
              help="Say which machines train the run for so much.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N",
              help="Training tokens of the dataset, where min_train_tokens is -1.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(run: str, machines: tuple[str, ...], budget: float | None, tokens: int | None,
            runs_dir: Path) -> None:
    """Say what RUN takes in memory, hours and dollars. Needs no GPU and no data."""
    loaded = load_run(runs_dir, run)
    takes_all = loaded.train.min_train_tokens == -1
    if takes_all and tokens is None:
        raise UserError(f"{loaded.train_path}: min_train_tokens is -1, all that the dataset has;"
                        " say with --tokens how many those are")
    if tokens is not None and not takes_all:
        raise UserError(f"{loaded.train_path}: min_train_tokens says how many tokens; --tokens is"
                        " for a run in which it is -1")
    if budget is not None and not math.isfinite(budget):
        raise UserError(f"--budget is {budget}; wanted dollars")
    table = [*known_machines(), *map(parse_machine, machines)]
    for line in [*_run_lines(loaded, tokens), "", *_memory_lines(loaded), "",
                 *_machine_lines(loaded, table, tokens=tokens, budget=budget)]:
        click.echo(line.rstrip())


def _precision(train: TrainConfig) -> Precision:
    """Give the precision that a run has on a GPU with bf16, as all in the table are."""
    return train.precision or ("bf16" if train.use_amp else "fp32")


def _run_lines(run: Run, tokens: int | None) -> list[str]:
    parameters, per_token = num_parameters(run.model), flops_per_token(run.model)
    num_tokens = tokens if run.train.min_train_tokens == -1 else run.train.min_train_tokens
    chinchilla = CHINCHILLA_TOKENS_PER_PARAMETER
    return [
        f"{run.name}: {parameters:,} parameters; {num_tokens:,} tokens,"
        f" {num_tokens / parameters:.1f} for each (Chinchilla: {chinchilla} ="
        f" {chinchilla * parameters:,})",
        f"{per_token / 1e6:,.1f} MFLOP a token, forward and backward;"
        f" {per_token * num_tokens:.3g} FLOP in all, validation not counted",
        f"a checkpoint takes {_checkpoint_bytes(run) / 1e9:,.2f} GB on disk",
    ]


def _checkpoint_bytes(run: Run) -> int:
    return BYTES_PER_PARAMETER_SAVED * num_parameters(run.model)


def _memory_lines(run: Run) -> list[str]:
    """Show the peak by part for the run's own microbatch, and what would fit on which card."""
    size, precision = run.train.microbatch_size, _precision(run.train)
    settings = [Setting(run.model, run.train, precision, num_processes=n) for n in (1, 8)]
    peaks = [peak_memory(setting, size) for setting in settings]
    lines = [f"{f'GiB at the peak, {precision}, microbatch {size}':40}"
             f"{'one GPU':>10}{'several':>10}"]
    for field in fields(Memory):
        one, several = (getattr(peak, field.name) / 2**30 for peak in peaks)
        lines.append(f"  {PART_NAMES[field.name]:38}{one:>10.2f}{several:>10.2f}")
    one, several = (peak.total / 2**30 for peak in peaks)
    lines.append(f"  {'in all, at the fullest moment':38}{one:>10.2f}{several:>10.2f}")
    lines += ["", f"{'largest microbatch on a card of':40}{'one GPU':>10}{'several':>10}"]
    for card in CARDS_GIB:
        largest = [largest_microbatch(setting, usable_gib(card)) for setting in settings]
        shown = "".join(f"{size or 'none':>10}" for size in largest)
        lines.append(f"  {f'{card} GiB':38}{shown}")
    return [*lines, "counted for code that is not compiled; the search measures what is"]


@dataclass(frozen=True)
class Estimate:
    """What a run takes on one machine."""

    machine: Machine
    largest: int  # microbatch that is expected to fit
    plan: BatchPlan | None  # none where the run cannot be trained there
    hindrance: str
    hours: tuple[float, float]  # if fast, and if slow

    @property
    def usd(self) -> tuple[float, float]:
        low, high = self.hours
        return low * self.machine.usd_per_hour, high * self.machine.usd_per_hour


def estimate(run: Run, machine: Machine, *, tokens: int | None) -> Estimate:
    """Lay a run out on a machine: the run's microbatch, or what keeps its global batch."""
    setting = Setting(run.model, run.train, _precision(run.train), machine.num_gpus)
    largest = largest_microbatch(setting, usable_gib(machine.gpu.memory_gib))
    size, batch = run.train.microbatch_size, run.train.global_batch_size
    if batch and batch % machine.num_gpus == 0 and largest:
        size, _ = nearest_divisors(batch // machine.num_gpus, largest)
    never = (float("inf"), float("inf"))
    if size > largest:
        return Estimate(machine, largest, None, "does not fit in memory", never)
    train = run.train.model_copy(update={"microbatch_size": size})
    sized = Run(run.name, run.run_dir, run.model, train)
    try:
        plan = plan_batches(sized, world_size=machine.num_gpus,
                            file_tokens=_file_tokens(run, tokens))
    except UserError as error:
        is_uneven = batch and batch % machine.num_gpus
        reason = "batch not divisible" if is_uneven else str(error).split(": ", 1)[1]
        return Estimate(machine, largest, None, reason, never)
    saving = num_checkpoints(run, plan) * _checkpoint_bytes(run) / SLOW_DISK_BYTES_PER_SECOND
    fast, slow = (_hours(run, plan, machine, mfu=mfu)
                  for mfu in (machine.gpu.high_mfu, machine.gpu.low_mfu))
    return Estimate(machine, largest, plan, "", (fast, slow + saving / 3600))


def _file_tokens(run: Run, tokens: int | None) -> int:
    if run.train.min_train_tokens != -1:
        return NO_DATASET_IS_LONGER
    return run.train.start_train_token + tokens + 1


def _hours(run: Run, plan: BatchPlan, machine: Machine, *, mfu: float) -> float:
    """Give the hours of training, and of validation: on one GPU while the others wait, or on all.
    """
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
    """Count the steps of a run after which it is saved."""
    intervals = (run.train.validation_interval, run.train.checkpoint_interval)
    saved = {plan.num_steps}
    for interval in filter(None, intervals):
        saved |= set(range(interval, plan.num_steps + 1, interval))
    return len(saved)


def _machine_lines(run: Run, machines: list[Machine], *, tokens: int | None,
                   budget: float | None) -> list[str]:
    estimates = sorted((estimate(run, machine, tokens=tokens) for machine in machines),
                       key=lambda found: found.usd)
    head = ["machine", "$/hour", "micro x acc", "largest", "batch", "steps", "checkpoints", "hours",
            "US$", "" if budget is None else f"${budget:,.2f}"]
    lines = [
        *_aligned([head, *(_row(run, found, budget) for found in estimates)]),
        "",
        "micro x acc: microbatch and accumulation; largest: microbatch expected to fit. Hours and"
        " US$ are estimates:",
        "from the best public MFU for such models on that GPU to what the original system reached"
        " (a slow disk included);",
        "with validation, without start-up. Prices: December 2025, or your own.",
    ]
    if budget is not None:
        fitting = [e.machine.name for e in estimates if e.usd[1] <= budget]
        perhaps = [e.machine.name for e in estimates if e.usd[0] <= budget < e.usd[1]]
        lines.append(f"Within ${budget:,.2f}: {', '.join(fitting) or 'none'}; only if fast:"
                     f" {', '.join(perhaps) or 'none'}.")
    return lines


def _row(run: Run, found: Estimate, budget: float | None) -> list[str]:
    machine, plan = found.machine, found.plan
    start = [machine.name, f"{machine.usd_per_hour:.2f}"]
    if plan is None:
        return [*start, "-", f"{found.largest}", "-", "-", "-", "-", "-", found.hindrance]
    count = num_checkpoints(run, plan)
    return [
        *start, f"{plan.microbatch_size} x {plan.gradient_accumulation_steps}",
        f"{found.largest}", f"{plan.global_batch_size:,}", f"{plan.num_steps:,}",
        f"{count:,} = {count * _checkpoint_bytes(run) / 1e9:,.0f} GB",
        *(f"{low:,.2f} to {high:,.2f}" for low, high in (found.hours, found.usd)),
        _verdict(found, budget),
    ]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Lay cells out in columns: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]),
                       *(cell.rjust(width) for cell, width
                         in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]).rstrip()
            for row in rows]


def _verdict(found: Estimate, budget: float | None) -> str:
    if budget is None:
        return ""
    low, high = found.usd
    return "fits" if high <= budget else "fits if fast" if low <= budget else "too dear"
