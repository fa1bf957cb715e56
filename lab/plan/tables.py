"""The tables of `lab plan`, and the lines that explain them."""

import textwrap

from basics.text import dollars, gb
from lab.plan.estimate import (
    Bounds,
    Estimate,
    bytes_of_checkpoint,
    default_precision,
    most_checkpoints,
    num_checkpoints,
    num_validations,
)
from lab.plan.memory import largest_microbatch, peak_memory
from lab.plan.setting import Setting
from lab.plan.speed_sources import ROUGH
from lab.table import UNKNOWN, Column, Table
from reporting.speed import CARDS_GIB, usable_gib
from run_config import Run

PARTS = {
    "weights": "weights", "optimizer": "optimizer state",
    "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision", "activations": "activations",
    "logits": "logits, loss and their gradients",
    "total": "total",
}
BY_GPUS = [Column("one GPU"), Column("several GPUs")]
MACHINE = Column("machine", "left")
BATCH_COLUMNS = [MACHINE, *map(Column, (
    "microbatch x\naccumulation", "largest\nmicrobatch", "global\nbatch", "steps",
    "checkpoints on\ndisk, at most", "checkpoints\nwritten")), Column("", "left", 24)]
COST_COLUMNS = [MACHINE, *map(Column, (
    "US$\nper hour", "hours,\nexpected", "hours,\nfewest to most", "US$,\nexpected",
    "US$,\nfewest to most", "MFU"))]
COST_NOTES = [
    "Sorted by the expected US$; ~ marks rough ones. Hours and US$ count validation, not startup.",
    "Prices are those of December 2025, or of --machine.",
]
WIDTH = 120  # characters of a note's line


def settings_of(run: Run) -> dict[str, Setting]:
    """Return the settings of the two columns: one GPU, and several (computed for 8)."""
    precision = default_precision(run.train)
    return {name: Setting(run.model, run.train, precision, num_processes=n)
            for name, n in (("one_gpu", 1), ("several_gpus", 8))}


def memory_table(run: Run) -> Table:
    """Show the memory peak by part, for the run's own microbatch."""
    size = run.train.microbatch_size
    peaks = [peak_memory(setting, size) for setting in settings_of(run).values()]
    factor, unit = (2**30, "GiB") if peaks[0].total >= 2**30 else (2**20, "MiB")
    head = f"{unit} at the peak, {default_precision(run.train)}, microbatch {size:,}"
    return Table([Column(head, "left"), *BY_GPUS], [
        [name, *(f"{getattr(peak, key) / factor:,.2f}" for peak in peaks)]
        for key, name in PARTS.items()])


def card_table(run: Run) -> Table:
    """Show the largest microbatch that is expected to fit on cards of several sizes."""
    return Table([Column("largest microbatch, by card", "left"), *BY_GPUS], [
        [f"{card} GiB", *(_count(largest_microbatch(setting, usable_gib(card)))
                          for setting in settings_of(run).values())] for card in CARDS_GIB],
        ["computed with the activations of code that is not compiled, which needs more;",
         "ddp_train.py --find-max-microbatch measures the code that will run"])


def _count(largest: int) -> str:
    return f"{largest:,}" if largest else "none"


def batch_table(run: Run, estimates: list[Estimate]) -> Table:
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


def cost_table(run: Run, estimates: list[Estimate], budget: float | None) -> Table:
    """Show the hours and dollars on each machine that can train the run."""
    columns, rows = [*COST_COLUMNS], []
    if run.train.validates:
        columns.append(Column(f"validation every\n{run.train.validation_interval:,} steps"))
    columns.append(Column("source", "left"))
    if budget is not None:
        columns.append(Column(f"budget\n${dollars(budget) if budget < 1 else amount(budget)}",
                              "left"))
    for found in estimates:
        hours, usd, rough = found.hours, found.usd, "~" if found.speed.source == ROUGH else ""
        row = [found.machine.name, amount(found.machine.usd_per_hour),
               amount(hours.expected), f"{amount(hours.low)} to {amount(hours.high)}",
               rough + amount(usd.expected), f"{rough}{amount(usd.low)} to {amount(usd.high)}",
               f"{found.speed.mfu:.0%}"]
        if run.train.validates:
            row.append(f"{num_validations(run, found.plan):,}: {_shares(found)}")
        row.append(found.speed.source)
        rows.append([*row, *([] if budget is None else [verdict(found.usd, budget)])])
    return Table(columns, rows, [
        line for note in _cost_notes(run, estimates)
        for line in textwrap.wrap(note, WIDTH, subsequent_indent="    ", break_on_hyphens=False)])


def amount(value: float) -> str:
    """Format hours or dollars in at most seven characters."""
    if value < 0.005:
        return "<0.01"
    if value >= 999_999.5:
        return f"{value:.1e}"
    return f"{value:,.2f}" if value < 999.995 else f"{value:,.0f}"


def _shares(found: Estimate) -> str:
    """Return the shares of the time that validation takes, in per cent; one GPU has only one."""
    alone, shared = (f"{100 * share:.{0 if share >= 0.0995 else 1}f}%"
                     for share in found.validation)
    return alone if found.machine.num_gpus == 1 else f"{alone} / {shared}"


def _cost_notes(run: Run, estimates: list[Estimate]) -> list[str]:
    """Explain the columns, for the GPUs and sources in the table."""
    gpus = list(dict.fromkeys(found.machine.gpu for found in estimates))
    notes = [
        *COST_NOTES,
        "fewest hours: at the best public MFU for plain PyTorch: "
        + ", ".join(f"{gpu.name} {gpu.high_mfu}" for gpu in gpus),
        "most hours: at the MFU of the original system, with a slow disk: "
        + ", ".join(f"{gpu.name} {gpu.low_mfu}" for gpu in gpus),
        "expected: the MFU in the table, by its source:",
        *dict.fromkeys(f"  {found.machine.gpu.name}, {found.speed.source}: {found.speed.detail}"
                       for found in estimates),
    ]
    if run.train.validates:
        notes.append("validation: how often, and its share of the time, on rank 0 alone / on all"
                     f' GPUs; this run\'s "validate_on": "{run.train.validate_on}" is counted')
    return notes


def verdict(usd: Bounds, budget: float) -> str:
    """Judge whether a run fits a budget by its dollars."""
    if usd.high <= budget:
        return "fits"
    if usd.expected <= budget:
        return "probably fits"
    return "fits if fast" if usd.low <= budget else "too expensive"
