"""The result of a sweep as one table and notes, or as a JSON document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.stats import pooled_deviation, seeds_needed
from lab.sweep.plan import Sweep
from lab.sweep.ranges import ranges_of
from lab.sweep.results import Entry
from lab.table import UNKNOWN, Column, Table, dollars, short_count
from reporting.summary import duration

COLUMNS = [Column("change", "left", 28), *map(Column, ("seeds", "loss", "difference",
                                                       "95% interval")),
           Column("against noise", "left"),
           *map(Column, ("tokens to\nbaseline's loss", "seconds", "US$"))]
ROUND_DIFFERENCE = 0.01  # nats; the number of seeds that it needs is always named
FEW_SEEDS = 3


def table_of(sweep: Sweep, entries: list[Entry]) -> Table:
    """Return the result as a table with its notes."""
    rows = [[entry.variant.label, f"{len(entry.losses)}/{len(entry.outcomes)}",
             _shown(entry.loss, "{:.4f}".format), *_difference_cells(entry), _reached(entry),
             _shown(entry.mean("seconds"), "{:,.0f}".format), _shown(entry.mean("usd"), dollars)]
            for entry in entries]
    return Table(COLUMNS, rows, notes_of(sweep, entries))


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else text(value)


def _difference_cells(entry: Entry) -> list[str]:
    found = entry.difference
    states = [] if not entry.unfinished else [entry.unfinished]
    if found is None or entry.validates_on_other_tokens:
        states += ["other validation tokens"] if entry.validates_on_other_tokens else []
        return [UNKNOWN, UNKNOWN, "; ".join(states) or UNKNOWN]
    interval = UNKNOWN if found.interval is None else "{:+.4f} to {:+.4f}".format(*found.interval)
    return [f"{found.mean:+.4f}", interval, "; ".join([entry.verdict, *states])]


def _reached(entry: Entry) -> str:
    if not entry.pairs or entry.validates_on_other_tokens:
        return UNKNOWN
    return "not reached" if entry.reached is None else short_count(entry.reached.tokens)


def notes_of(sweep: Sweep, entries: list[Entry]) -> list[str]:
    """Explain the table: the noise of the seeds, the best values of ranges, the cost."""
    return [
        "loss: final validation loss (nats per token), mean over seeds; difference: to"
        f" {sweep.base.name} with the same seeds",
        *_noise_notes(entries),
        *(found.line() for found in ranges_of(sweep, entries)),
        _cost_note(entries),
    ]


def _noise_notes(entries: list[Entry]) -> list[str]:
    """Say how large the noise is, and how many seeds differences of some sizes need."""
    found = [entry.difference for entry in entries
             if entry.difference and not entry.validates_on_other_tokens]
    deviation, freedom = pooled_deviation((one.deviation, one.num_pairs) for one in found
                                          if one.deviation is not None)
    if not freedom:
        return ["noise: not known with one finished seed of each variant; measure it with --seeds"
                f" {FEW_SEEDS} or more"]
    smallest = min((abs(one.mean) for one in found if one.mean), default=None)
    sizes = [] if smallest is None else [(smallest, " (the smallest here)")]
    needed = [f"{seeds_needed(size, deviation):,} for a difference of {size:.2g}{name}"
              for size, name in [*sizes, (ROUND_DIFFERENCE, "")]]
    return [
        "noise: the standard deviation of a difference with one seed is"
        f" {deviation:.4f} ({freedom} degrees of freedom); inside: the 95% interval contains 0",
        f"seeds needed (80% power, 5% level): {', '.join(needed)}",
    ]


def _cost_note(entries: list[Entry]) -> str:
    figures = [found.result.figures for entry in entries for found in entry.outcomes]
    seconds = sum(one.seconds or 0.0 for one in figures)
    usd = [one.usd for one in figures if one.usd is not None]
    return f"all runs: {duration(seconds)}" + (f", US${dollars(sum(usd))}" if usd else "")


def sweep_document(sweep: Sweep, entries: list[Entry], stop_reason: str | None) -> dict[str, Any]:
    """Return the result of a sweep as a JSON document; None for what is not known."""
    return {"schema": "sweep/1", "sweep": str(sweep.sweep_dir), "base": sweep.base.name,
            "stop_reason": stop_reason or None, "variants": [_values(entry) for entry in entries],
            "notes": notes_of(sweep, entries)}


def _values(entry: Entry) -> dict[str, Any]:
    compares = entry.difference is not None and not entry.validates_on_other_tokens
    return {
        "name": entry.variant.name, "changes": entry.variant.changes,
        "runs": [{"run": str(found.run.run_dir), "state": found.state, "loss": found.loss}
                 for found in entry.outcomes],
        "loss": entry.loss, "difference": entry.difference.mean if compares else None,
        "interval": entry.difference.interval if compares else None,
        "against_noise": entry.verdict or None,
        "tokens_to_baselines_loss": entry.reached.tokens if entry.pairs and entry.reached else None,
        "seconds": entry.mean("seconds"), "usd": entry.mean("usd"),
    }
