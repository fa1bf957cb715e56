"""`lab plan`: estimate the memory, hours and dollars of a run before it is launched."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from basics.cli import ABOVE_0, USD_PER_HOUR, print_json
from basics.errors import UserError, visible
from basics.text import dollars, gb, gib
from lab.plan.estimate import (
    KNOWN_MACHINES,
    Estimate,
    Machine,
    amount,
    bytes_of_checkpoint,
    default_precision,
    estimate,
    most_checkpoints,
    num_checkpoints,
    num_validations,
    pinned_bytes,
    save_length,
    verdict,
)
from lab.plan.memory import (
    Setting,
    largest_microbatch,
    num_matrix_parameters,
    num_parameters,
    peak_memory,
    size_name,
)
from lab.plan.speed_sources import ROUGH, read_measured
from lab.table import UNKNOWN, Column, Table
from reporting.speed import CARDS_GIB, GPUS, flops_per_token, usable_gib
from run_config import Run, load_run

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, roughly
NUM_BYTES = {"fp32": 4, "bf16": 2}  # of an element
PACKAGES_BYTES = 6e9  # nearly all of it PyTorch with CUDA
WIDTH = 120  # characters of a note's line
PARTS = {
    "weights": "weights", "optimizer": "optimizer state", "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision", "activations": "activations",
    "logits": "logits, loss and their gradients", "total": "total",
}
BY_GPUS = [Column("one GPU"), Column("several GPUs")]
MACHINE = Column("machine", "left")
BATCH_COLUMNS = [MACHINE, *map(Column, (
    "microbatch x\naccumulation", "largest\nmicrobatch", "global\nbatch", "steps",
    "checkpoints on\ndisk, at most", "checkpoints\nwritten")), Column("", "left", 24)]
COST_COLUMNS = [MACHINE, *map(Column, (
    "US$\nper hour", "hours,\nexpected", "hours,\nfewest to most", "US$,\nexpected",
    "US$,\nfewest to most", "MFU"))]


@click.command(epilog=f"GPUs: {', '.join(gpu.name for gpu in GPUS)}.")
@click.argument("run")
@click.option("--machine", "machines", multiple=True, metavar="NAME=COUNTxGPU@USD",
              help="Add a machine to the table, with its price in US$ per hour, for example"
                   " box=8xH100@23.92.")
@click.option("--budget", type=ABOVE_0, metavar="USD",
              help="Show which machines can train the run within this budget.")
@click.option("--save", is_flag=True,
              help="With --budget: write the tokens that it buys on this machine, at the speed"
                   " measured there, as min_train_tokens into train.json.")
@click.option("--usd-per-hour", type=USD_PER_HOUR, metavar="USD",
              help="With --save: price of the machine; overrides usd_per_hour in train.json.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N",
              help="Training tokens of the dataset; needed if min_train_tokens is -1, and for"
                   " repeat_data to say how often they are read.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
def command(run: str, machines: tuple[str, ...], budget: float | None, tokens: int | None,
            **options: Any) -> None:
    """Estimate the memory, hours and dollars of RUN. Needs no GPU and no dataset."""
    loaded = load_run(options["runs_dir"], run)
    if options["save"] or options["usd_per_hour"]:
        if not (options["save"] and budget) or machines or tokens or options["as_json"]:
            raise UserError("--save needs --budget, --usd-per-hour needs --save; neither goes with"
                            " --machine, --tokens or --json")
        click.echo(visible(save_length(loaded.priced(options["usd_per_hour"]), budget)))
        return
    uses_all_tokens = loaded.train.min_train_tokens == -1
    if uses_all_tokens and tokens is None:
        raise UserError(f"{loaded.train_path}: min_train_tokens is -1 (all tokens of the dataset);"
                        " set their number with --tokens")
    if tokens is not None and not (uses_all_tokens or loaded.train.repeat_data):
        raise UserError(f"{loaded.train_path}: min_train_tokens is not -1, so --tokens has no"
                        " effect; drop --tokens")
    measured = read_measured(options["runs_dir"])
    estimates = sorted((estimate(loaded, Machine.parse(text), tokens=tokens, measured=measured)
                        for text in (*KNOWN_MACHINES, *machines)),
                       key=lambda found: found.usd.expected)
    precision = default_precision(loaded.train)
    settings = {name: Setting(loaded.model, loaded.train, precision, num_processes=n)
                for name, n in (("one_gpu", 1), ("several_gpus", 8))}
    if options["as_json"]:
        print_json(_document(loaded, settings, estimates, tokens, budget))
        return
    possible = [found for found in estimates if found.plan is not None]
    tables = [*_memory_tables(loaded, settings), _batch_table(loaded, estimates),
              *([_cost_table(loaded, possible, budget)] if possible else [])]
    click.echo(visible("\n\n".join([
        "\n".join(_run_lines(loaded, tokens)),
        *(table.terminal() for table in tables),
        *([] if possible else ["no machine in the table can train this run"])])))


def _run_lines(run: Run, tokens: int | None) -> list[str]:
    parameters, per_token = num_parameters(run.model), flops_per_token(run.model)
    num_tokens = tokens if run.train.min_train_tokens == -1 else run.train.min_train_tokens
    chinchilla = CHINCHILLA_TOKENS_PER_PARAMETER
    times = "--tokens says how often" if tokens is None else f"{num_tokens / tokens:.3g} times"
    return [
        f"{run.name}: {size_name(run.model)}, {parameters:,} parameters; {num_tokens:,} tokens",
        f"{num_tokens / parameters:.1f} tokens per parameter (Chinchilla: {chinchilla}, or"
        f" {chinchilla * parameters:,} tokens)",
        f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward;"
        f" {per_token * num_tokens:.3g} FLOP in total, without validation",
        *([f"repeat_data: the dataset is read again where it ends ({times})"]
          if run.train.repeat_data else []),
        f"disk: {gb(bytes_of_checkpoint(run))} a checkpoint (how many: below), {gb(2 * num_tokens)}"
        f" or more for the tokens, {gb(PACKAGES_BYTES)} for the packages",
        f"host RAM: rank 0 pins about {gib(pinned_bytes(run))} on a GPU, for the copy from which"
        " checkpoints are written",
        f"between several GPUs: {gb(NUM_BYTES[run.train.all_reduce_dtype] * parameters)} of"
        f" gradients a step (all_reduce_dtype {run.train.all_reduce_dtype})"
        + (f", {gb(NUM_BYTES['bf16'] * num_matrix_parameters(run.model))} of Muon's updates in bf16"
           if run.train.optimizer == "muon" else ""),
    ]


def _memory_tables(run: Run, settings: dict[str, Setting]) -> list[Table]:
    """Show the memory peak by part for the run's own microbatch, and the largest one by card."""
    size = run.train.microbatch_size
    peaks = [peak_memory(setting, size) for setting in settings.values()]
    factor, unit = (2**30, "GiB") if peaks[0].total >= 2**30 else (2**20, "MiB")
    head = f"{unit} at the peak, {default_precision(run.train)}, microbatch {size:,}"
    return [
        Table([Column(head, "left"), *BY_GPUS], [
            [name, *(f"{getattr(peak, key) / factor:,.2f}" for peak in peaks)]
            for key, name in PARTS.items()]),
        Table([Column("largest microbatch, by card", "left"), *BY_GPUS], [
            [f"{card} GiB", *(_count(largest_microbatch(setting, usable_gib(card)))
                              for setting in settings.values())] for card in CARDS_GIB],
            ["computed with the activations of code that is not compiled, which needs more;",
             "ddp_train.py --find-max-microbatch measures the code that will run"])]


def _count(largest: int) -> str:
    return f"{largest:,}" if largest else "none"


def _batch_table(run: Run, estimates: list[Estimate]) -> Table:
    """Show how each machine would divide the run's tokens, or why it cannot train the run."""
    own, rows, notes = run.train.microbatch_size, [], []
    for found in estimates:
        largest, plan = _count(found.largest), found.plan
        if plan is None:
            rows.append([found.machine.name, UNKNOWN, largest, *[UNKNOWN] * 4, found.reason])
            continue
        written = num_checkpoints(run, plan)
        most = most_checkpoints(run.train, written)
        rows.append([
            found.machine.name, f"{plan.microbatch_size:,} x {plan.gradient_accumulation_steps:,}",
            largest, f"{plan.global_batch_size:,}", f"{plan.num_steps:,}",
            f"{most:,} ({gb(most * bytes_of_checkpoint(run))})", f"{written:,}", ""])
        if plan.microbatch_size != own:
            notes = ["microbatch: the largest that fits and divides the batch; train.json has"
                     f" {own:,}"]
    return Table(BATCH_COLUMNS, rows, notes)


def _cost_table(run: Run, estimates: list[Estimate], budget: float | None) -> Table:
    """Show the hours and dollars on each machine that can train the run, and where they are from.

    Of the time that validation takes, it shows the share on rank 0 alone and on all GPUs.
    """
    columns, rows, validates = [*COST_COLUMNS], [], run.train.validates
    if validates:
        columns.append(Column(f"validation every\n{run.train.validation_interval:,} steps"))
    columns.append(Column("source", "left"))
    if budget is not None:
        columns.append(Column(f"budget\n${dollars(budget) if budget < 1 else amount(budget)}",
                              "left"))
    for found in estimates:
        hours, usd, rough = found.hours, found.usd, "~" if found.speed.source == ROUGH else ""
        alone, shared = (f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"
                         for share in found.validation)
        shares = alone if found.machine.num_gpus == 1 else f"{alone} / {shared}"
        rows.append([
            found.machine.name, amount(found.machine.usd_per_hour),
            amount(hours.expected), f"{amount(hours.low)} to {amount(hours.high)}",
            rough + amount(usd.expected), f"{rough}{amount(usd.low)} to {amount(usd.high)}",
            f"{found.speed.mfu:.0%}",
            *([f"{num_validations(run, found.plan):,}: {shares}"] if validates else []),
            found.speed.source, *([] if budget is None else [verdict(usd, budget)])])
    gpus = list(dict.fromkeys(found.machine.gpu for found in estimates))
    notes = [
        "Sorted by the expected US$; ~ marks rough ones. Hours and US$ count validation, not"
        " startup.",
        "Prices are those of December 2025, or of --machine.",
        "fewest hours: at the best public MFU for plain PyTorch: "
        + ", ".join(f"{gpu.name} {gpu.high_mfu}" for gpu in gpus),
        "most hours: at the MFU of the original system, with a slow disk: "
        + ", ".join(f"{gpu.name} {gpu.low_mfu}" for gpu in gpus),
        "expected: the MFU in the table, by its source:",
        *dict.fromkeys(f"  {found.machine.gpu.name}, {found.speed.source}: {found.speed.detail}"
                       for found in estimates),
        *(["validation: how often, and its share of the time, on rank 0 alone / on all GPUs; this"
           f' run\'s "validate_on": "{run.train.validate_on}" is counted'] if validates else []),
    ]
    return Table(columns, rows, [line for note in notes for line in textwrap.wrap(
        note, WIDTH, subsequent_indent="    ", break_on_hyphens=False)])


def _document(run: Run, settings: dict[str, Setting], estimates: list[Estimate],
              tokens: int | None, budget: float | None) -> dict[str, Any]:
    """Return what the tables show, with all digits: bytes, hours and US dollars."""
    peaks = {name: peak_memory(setting, run.train.microbatch_size)
             for name, setting in settings.items()}
    return {
        "schema": "plan/1", "run": run.name,
        "model": size_name(run.model), "parameters": num_parameters(run.model),
        "tokens": tokens if run.train.min_train_tokens == -1 else run.train.min_train_tokens,
        "flops_per_token": flops_per_token(run.model),
        "checkpoint_bytes": bytes_of_checkpoint(run), "pinned_bytes": pinned_bytes(run),
        "memory_bytes": {name: asdict(peak) | {"total": peak.total}
                         for name, peak in peaks.items()},
        "largest_microbatch": [
            {"card_gib": card} | {name: largest_microbatch(setting, usable_gib(card))
                                  for name, setting in settings.items()} for card in CARDS_GIB],
        "machines": [{
            "name": found.machine.name, "gpu": found.machine.gpu.name,
            "num_gpus": found.machine.num_gpus, "usd_per_hour": found.machine.usd_per_hour,
            "largest_microbatch": found.largest,
            "reason": found.reason or None,  # why it cannot train the run
        } | (_planned(run, found, budget) if found.plan else {}) for found in estimates],
    }


def _planned(run: Run, found: Estimate, budget: float | None) -> dict[str, Any]:
    plan, (on_rank_0, on_all) = found.plan, found.validation
    return {
        "microbatch_size": plan.microbatch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch_size": plan.global_batch_size, "steps": plan.num_steps,
        "checkpoints": num_checkpoints(run, plan),
        "hours": asdict(found.hours), "usd": asdict(found.usd),
        "mfu": found.speed.mfu, "source": found.speed.source,
        "validations": num_validations(run, plan),
        "validation_share": {"rank0": on_rank_0, "all": on_all},
        "budget": None if budget is None else verdict(found.usd, budget),
    }
