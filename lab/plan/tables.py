"""The tables of `lab plan`, and the lines that explain them."""

from __future__ import annotations

import textwrap
from dataclasses import fields

from tabulate import tabulate

from basics.text import gb
from lab.plan.estimate import (
    Bounds,
    Estimate,
    bytes_of_checkpoint,
    default_precision,
    most_checkpoints,
    num_checkpoints,
    num_validations,
)
from lab.plan.memory import Memory, largest_microbatch, peak_memory
from lab.plan.setting import Setting
from lab.plan.speed_sources import ROUGH
from reporting.speed import CARDS_GIB, usable_gib
from run_config import Run

PART_NAMES = {
    "weights": "weights", "optimizer": "optimizer state",
    "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision", "activations": "activations",
    "logits": "logits, loss and their gradients",
}
BATCH_HEADS = ["machine", "microbatch x\naccumulation", "largest\nmicrobatch", "global\nbatch",
               "steps", "checkpoints on\ndisk, at most", "checkpoints\nwritten", ""]
COST_HEADS = ["machine", "US$\nper hour", "hours,\nexpected", "hours,\nfewest to most",
              "US$,\nexpected", "US$,\nfewest to most", "MFU"]
COST_NOTES = [
    "Sorted by the expected US$; ~ marks rough ones. Hours and US$ count validation, not startup.",
    "Prices are those of December 2025, or of --machine.",
]
WIDTH = 120  # columns
FITS, PROBABLY_FITS = "fits", "probably fits"
FITS_IF_FAST, TOO_EXPENSIVE = "fits if fast", "too expensive"


def settings_of(run: Run) -> list[Setting]:
    """Return the settings of the two columns: one GPU, and several (computed for 8)."""
    precision = default_precision(run.train)
    return [Setting(run.model, run.train, precision, num_processes=n) for n in (1, 8)]


def memory_lines(run: Run) -> list[str]:
    """Show the memory peak by part, for the run's own microbatch."""
    size = run.train.microbatch_size
    peaks = [peak_memory(setting, size) for setting in settings_of(run)]
    factor, unit = (2**30, "GiB") if peaks[0].total >= 2**30 else (2**20, "MiB")
    title = f"{unit} at the peak, {default_precision(run.train)}, microbatch {size:,}"
    parts = {PART_NAMES[field.name]: [getattr(peak, field.name) for peak in peaks]
             for field in fields(Memory)} | {"total": [peak.total for peak in peaks]}
    return _table([[title, "one GPU", "several GPUs"],
                   *([name, *(f"{size / factor:,.2f}" for size in sizes)]
                     for name, sizes in parts.items())])


def card_lines(run: Run) -> list[str]:
    """Show the largest microbatch that is expected to fit on cards of several sizes."""
    settings = settings_of(run)
    sizes = [[f"{card} GiB", *(_count(largest_microbatch(setting, usable_gib(card)))
                               for setting in settings)] for card in CARDS_GIB]
    return [*_table([["largest microbatch, by card", "one GPU", "several GPUs"], *sizes]),
            "computed with the activations of code that is not compiled, which needs more;",
            "ddp_train.py --find-max-microbatch measures the code that will run"]


def _count(largest: int) -> str:
    return f"{largest:,}" if largest else "none"


def _table(rows: list[list[str]], *, left: tuple[int, ...] = ()) -> list[str]:
    """Align cells in columns, the first one and those in `left` to the left.

    The first row holds the heads.
    """
    align = ["left" if column in (0, *left) else "right" for column in range(len(rows[0]))]
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
    return [line.rstrip() for line in table.splitlines()]


def batch_lines(run: Run, estimates: list[Estimate]) -> list[str]:
    """Show how each machine would divide the run's tokens, or why it cannot train the run."""
    table = _table([BATCH_HEADS, *(_batch_cells(run, found) for found in estimates)],
                   left=(len(BATCH_HEADS) - 1,))
    own = run.train.microbatch_size
    if all(found.plan is None or found.plan.microbatch_size == own for found in estimates):
        return table
    return [*table, "microbatch: the largest that fits and divides the batch;"
            f" train.json has {own:,}"]


def _batch_cells(run: Run, found: Estimate) -> list[str]:
    name, plan = found.machine.name, found.plan
    if plan is None:
        return [name, "-", _count(found.largest), "-", "-", "-", "-", found.reason]
    written = num_checkpoints(run, plan)
    most = most_checkpoints(run.train, written)
    return [
        name, f"{plan.microbatch_size:,} x {plan.gradient_accumulation_steps:,}",
        _count(found.largest),
        f"{plan.global_batch_size:,}", f"{plan.num_steps:,}",
        f"{most:,} ({gb(most * bytes_of_checkpoint(run))})", f"{written:,}", "",
    ]


def cost_lines(run: Run, estimates: list[Estimate], *, budget: float | None) -> list[str]:
    """Show the hours and dollars on each machine that can train the run."""
    estimates = [found for found in estimates if found.plan is not None]
    if not estimates:
        return ["no machine in the table can train this run"]
    validates = run.train.validates
    heads = [*COST_HEADS,
             *([f"validation every\n{run.train.validation_interval:,} steps"] if validates else []),
             "source", *([] if budget is None else [f"budget\n${amount(budget)}"])]
    rows = [[*_cost_cells(found),
             *([f"{num_validations(run, found.plan):,}: {_shares(found)}"] if validates else []),
             found.speed.source, *([] if budget is None else [verdict(found.usd, budget)])]
            for found in estimates]
    source = heads.index("source")
    return [*_table([heads, *rows], left=(source, source + 1)), "", *_notes(run, estimates),
            *([] if budget is None else ["", *_budget_lines(estimates, budget)])]


def _cost_cells(found: Estimate) -> list[str]:
    rough = "~" if found.speed.source == ROUGH else ""
    hours, usd = found.hours, found.usd
    return [found.machine.name, amount(found.machine.usd_per_hour),
            amount(hours.expected), f"{amount(hours.low)} to {amount(hours.high)}",
            rough + amount(usd.expected), f"{rough}{amount(usd.low)} to {amount(usd.high)}",
            f"{found.speed.mfu:.0%}"]


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


def _notes(run: Run, estimates: list[Estimate]) -> list[str]:
    """Explain the columns, for the GPUs and sources in the table."""
    gpus = list(dict.fromkeys(found.machine.gpu for found in estimates))
    sources = dict.fromkeys(f"  {found.machine.gpu.name}, {found.speed.source}:"
                            f" {found.speed.detail}" for found in estimates)
    notes = [
        *COST_NOTES,
        "fewest hours: at the best public MFU for plain PyTorch: "
        + ", ".join(f"{gpu.name} {gpu.high_mfu}" for gpu in gpus),
        "most hours: at the MFU of the original system, with a slow disk: "
        + ", ".join(f"{gpu.name} {gpu.low_mfu}" for gpu in gpus),
        "expected: the MFU in the table, by its source:", *sources,
        *(["validation: how often, and its share of the time, on rank 0 alone / on all GPUs; this"
           f' run\'s "validate_on": "{run.train.validate_on}" is counted']
          if run.train.validates else []),
    ]
    return [line for note in notes for line in _wrapped(note)]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 4, break_on_hyphens=False)


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
    return _wrapped(f"Within ${budget:,.2f}: {said or 'none'}.")
