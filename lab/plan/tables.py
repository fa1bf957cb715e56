"""The tables of `lab plan`, and the lines that explain them."""

from __future__ import annotations

from dataclasses import fields

from tabulate import tabulate

from lab.plan.estimate import (
    Bounds,
    Estimate,
    bytes_of_checkpoint,
    default_precision,
    num_checkpoints,
)
from lab.plan.memory import Memory, largest_microbatch, peak_memory
from lab.plan.setting import Setting
from reporting.speed import CARDS_GIB, usable_gib
from run_config import Run

PART_NAMES = {
    "weights": "weights", "optimizer": "optimizer state",
    "average": "averaged weights", "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision", "activations": "activations",
    "logits": "logits, loss and their gradients",
}
BATCH_HEADS = ["machine", "microbatch x\naccumulation", "largest\nmicrobatch", "global\nbatch",
               "steps", "checkpoints,\nin total", ""]
COST_HEADS = ["machine", "US$\nper hour", "hours:\nexpected", "\nlow to high", "US$:\nexpected",
              "\nlow to high", "expected\nMFU"]
COST_NOTES = [
    "Sorted by the expected US$. Hours and US$ count validation, not startup; prices are those of",
    "December 2025, or of --machine.",
    "low: the best public MFU for plain PyTorch on such a GPU or its nearest relative",
    "high: the MFU that the original system reached on one of these, and a slow disk",
    "expected: the MFU beside it, by its source:",
]
FITS, PROBABLY_FITS = "fits", "probably fits"
FITS_IF_FAST, TOO_EXPENSIVE = "fits if fast", "too expensive"


def _settings(run: Run) -> list[Setting]:
    """Return the settings of the two columns: one GPU, and several (computed for 8)."""
    precision = default_precision(run.train)
    return [Setting(run.model, run.train, precision, num_processes=n) for n in (1, 8)]


def memory_lines(run: Run) -> list[str]:
    """Show the memory peak by part, for the run's own microbatch."""
    size = run.train.microbatch_size
    peaks = [peak_memory(setting, size) for setting in _settings(run)]
    title = f"GiB at the peak, {default_precision(run.train)}, microbatch {size}"
    parts = {PART_NAMES[field.name]: [getattr(peak, field.name) for peak in peaks]
             for field in fields(Memory)} | {"total": [peak.total for peak in peaks]}
    return _table([[title, "one GPU", "several GPUs"],
                   *([name, *(f"{size / 2**30:.2f}" for size in sizes)]
                     for name, sizes in parts.items())])


def card_lines(run: Run) -> list[str]:
    """Show the largest microbatch that is expected to fit on cards of several sizes."""
    settings = _settings(run)
    sizes = [[f"{card} GiB", *(str(largest_microbatch(setting, usable_gib(card)) or "none")
                               for setting in settings)] for card in CARDS_GIB]
    return [*_table([["largest microbatch, by card", "one GPU", "several GPUs"], *sizes]),
            "computed with the activations of code that is not compiled, which needs more;"
            " ddp_train.py --find-max-microbatch measures the code that will run"]


def _table(rows: list[list[str]], *, left: tuple[int, ...] = ()) -> list[str]:
    """Align cells in columns, the first one and those in `left` to the left.

    The first row holds the heads.
    """
    align = ["left" if column in (0, *left) else "right" for column in range(len(rows[0]))]
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
    return [line.rstrip() for line in table.splitlines()]


def batch_lines(run: Run, estimates: list[Estimate]) -> list[str]:
    """Show how each machine would divide the run's tokens, or why it cannot train the run."""
    return _table([BATCH_HEADS, *(_batch_cells(run, found) for found in estimates)],
                  left=(len(BATCH_HEADS) - 1,))


def _batch_cells(run: Run, found: Estimate) -> list[str]:
    name, plan = found.machine.name, found.plan
    if plan is None:
        return [name, "-", f"{found.largest}", "-", "-", "-", found.reason]
    count = num_checkpoints(run, plan)
    return [
        name, f"{plan.microbatch_size} x {plan.gradient_accumulation_steps}", f"{found.largest}",
        f"{plan.global_batch_size:,}", f"{plan.num_steps:,}",
        f"{count:,} ({count * bytes_of_checkpoint(run) / 1e9:,.0f} GB)", "",
    ]


def cost_lines(run: Run, estimates: list[Estimate], *, budget: float | None) -> list[str]:
    """Show the hours and dollars on each machine that can train the run."""
    estimates = [found for found in estimates if found.plan is not None]
    if not estimates:
        return ["no machine in the table can train this run"]
    heads = [*COST_HEADS, *(["validation:\nrank0 / all"] if run.train.validates else []),
             "source", *([] if budget is None else [f"budget\n${budget:,.2f}"])]
    rows = [[*_cost_cells(found), *([_shares(found)] if run.train.validates else []),
             found.speed.source, *([] if budget is None else [verdict(found.usd, budget)])]
            for found in estimates]
    source = heads.index("source")
    return [*_table([heads, *rows], left=(source, source + 1)), "", *_notes(run, estimates),
            *([] if budget is None else _budget_lines(estimates, budget))]


def _cost_cells(found: Estimate) -> list[str]:
    costs = [cell for bounds in (found.hours, found.usd) for cell in (
        f"{bounds.expected:,.2f}", f"{bounds.low:,.2f} to {bounds.high:,.2f}")]
    return [found.machine.name, f"{found.machine.usd_per_hour:.2f}", *costs,
            f"{found.speed.mfu:.0%}"]


def _shares(found: Estimate) -> str:
    """Return the shares of the time that validation takes, in per cent; one GPU has only one."""
    alone, shared = (f"{share * 100:.2g}%" for share in found.validation)
    return alone if found.machine.num_gpus == 1 else f"{alone} / {shared}"


def _notes(run: Run, estimates: list[Estimate]) -> list[str]:
    """Explain the columns; only the sources that were used."""
    sources = dict.fromkeys(f"{found.speed.source}: {found.speed.detail}" for found in estimates)
    validation = [
        "validation: its share of the time, on rank 0 alone and on all GPUs; this run has",
        f'  "validate_on": "{run.train.validate_on}", and that is counted',
    ] if run.train.validates else []
    return [*COST_NOTES, *(f"  {source}" for source in sources), *validation]


def verdict(usd: Bounds, budget: float) -> str:
    """Judge whether a run fits a budget by its dollars."""
    if usd.high <= budget:
        return FITS
    if usd.expected <= budget:
        return PROBABLY_FITS
    return FITS_IF_FAST if usd.low <= budget else TOO_EXPENSIVE


def _budget_lines(estimates: list[Estimate], budget: float) -> list[str]:
    found = {judged: [each.machine.name for each in estimates
                      if verdict(each.usd, budget) == judged]
             for judged in (FITS, PROBABLY_FITS, FITS_IF_FAST)}
    said = "; ".join(f"{judged}: {', '.join(names)}" for judged, names in found.items() if names)
    return [f"Within ${budget:,.2f}: {said or 'none'}."]
