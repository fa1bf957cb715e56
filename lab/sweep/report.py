"""The result of a sweep: its table with notes, its JSON document, its charts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from basics.text import counted, dollars
from lab.compare.charts import draw_comparison, plot_fit, without_formulas
from lab.compare.rows import compare
from lab.stats import pooled_deviation, seeds_needed
from lab.sweep.plan import Sweep
from lab.sweep.results import Entry, Range, ranges_of
from lab.table import UNKNOWN, Column, Table, short_count
from reporting.charts import draw_by_hand
from reporting.summary import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = [Column("change", "left", 28), *map(Column, ("seeds", "loss", "difference",
                                                       "95% interval")),
           Column("against noise", "left"),
           *map(Column, ("tokens to\nbaseline's loss", "seconds", "US$"))]
ROUND_DIFFERENCE = 0.01  # nats; the number of seeds that it needs is always named
LONGEST_LABEL = 40  # characters, in a chart
VERDICT_COLORS = {"better": "tab:green", "worse": "tab:red"}


def table_of(sweep: Sweep, entries: list[Entry]) -> Table:
    """Return the result as a table with its notes."""
    rows = []
    for entry in entries:
        found, seconds, usd = entry.difference, entry.mean("seconds"), entry.mean("usd")
        interval = found and found.interval
        reached = UNKNOWN
        if entry.pairs and not entry.validates_on_other_tokens:
            reached = short_count(entry.reached.tokens) if entry.reached else "not reached"
        states = [entry.verdict, "other validation tokens" * entry.validates_on_other_tokens,
                  entry.unfinished]
        rows.append([
            entry.variant.label, f"{len(entry.losses)}/{len(entry.outcomes)}",
            UNKNOWN if entry.loss is None else f"{entry.loss:.4f}",
            f"{found.mean:+.4f}" if found else UNKNOWN,
            "{:+.4f} to {:+.4f}".format(*interval) if interval else UNKNOWN,
            "; ".join(filter(None, states)) or UNKNOWN, reached,
            UNKNOWN if seconds is None else f"{seconds:,.0f}",
            UNKNOWN if usd is None else dollars(usd)])
    return Table(COLUMNS, rows, notes_of(sweep, entries))


def notes_of(sweep: Sweep, entries: list[Entry]) -> list[str]:
    """Explain the table: the noise of the seeds, the best values of ranges, the cost."""
    figures = [found.result.figures for entry in entries for found in entry.outcomes]
    usd = [one["usd"] for one in figures if one["usd"] is not None]
    return [
        "loss: final validation loss (nats per token), mean over seeds; difference: to"
        f" {sweep.base.name} with the same seeds",
        *_noise_notes(entries),
        *(found.line() for found in ranges_of(sweep, entries)),
        f"all runs: {duration(sum(one['seconds'] or 0.0 for one in figures))}"
        + (f", US${dollars(sum(usd))}" if usd else ""),
    ]


def _noise_notes(entries: list[Entry]) -> list[str]:
    """Say how large the noise is, and how many seeds differences of some sizes need."""
    found = [entry.difference for entry in entries if entry.difference]
    deviation, freedom = pooled_deviation((one.deviation, one.num_pairs) for one in found
                                          if one.deviation is not None)
    if not freedom:
        return ["noise: not known with one finished seed of each variant; measure it with --seeds"
                " 3 or more"]
    smallest = min((abs(one.mean) for one in found if one.mean), default=None)
    sizes = [] if smallest is None else [(smallest, " (the smallest here)")]
    needed = [f"{seeds_needed(size, deviation):,} for a difference of {size:.2g}{name}"
              for size, name in [*sizes, (ROUND_DIFFERENCE, "")]]
    return [
        "noise: the standard deviation of a difference with one seed is"
        f" {deviation:.4f} ({counted(freedom, 'degree')} of freedom); inside: the 95% interval"
        " contains 0",
        f"seeds needed (80% power, 5% level): {', '.join(needed)}",
    ]


def document_of(sweep: Sweep, entries: list[Entry], stop_reason: str) -> dict[str, Any]:
    """Return the result of a sweep as a JSON document; None for what is not known."""
    return {"schema": "sweep/1", "sweep": str(sweep.sweep_dir), "base": sweep.base.name,
            "stop_reason": stop_reason or None,
            "variants": [{
                "name": entry.name, "changes": entry.variant.changes,
                "runs": [{"run": str(found.run.run_dir), "state": found.state, "loss": found.loss}
                         for found in entry.outcomes],
                "loss": entry.loss, "difference": entry.difference and entry.difference.mean,
                "interval": entry.difference and entry.difference.interval,
                "against_noise": entry.verdict or None,
                "tokens_to_baselines_loss": entry.reached and entry.reached.tokens,
                "seconds": entry.mean("seconds"), "usd": entry.mean("usd"),
            } for entry in entries],
            "notes": notes_of(sweep, entries)}


def draw_sweep(sweep: Sweep, entries: list[Entry]) -> list[Path]:
    """Draw the charts of a comparison, and those of a sweep. Raises: OSError."""
    results = [found.result for entry in entries for found in entry.outcomes
               if found.result.records]
    charts, _ = draw_comparison(compare(results).rows, sweep.sweep_dir)
    if compared := [entry for entry in entries if entry.difference]:
        charts.append(draw_by_hand(sweep.sweep_dir / "differences.png",
                                   lambda figure: _plot_differences(figure, compared)))
    return charts + [draw_by_hand(sweep.sweep_dir / f"range-{found.key}.png",
                                  lambda figure, found=found: _plot_range(figure, found))
                     for found in ranges_of(sweep, entries) if len(found.points) > 1]


def _plot_differences(figure: Figure, entries: list[Entry]) -> None:
    """Plot the difference of each variant to the baseline, and its 95% interval if known."""
    figure.set_size_inches(10, 2 + 0.5 * len(entries))
    axes, names = figure.subplots(), []
    axes.axvline(0, color="black", linewidth=1)
    for position, entry in enumerate(entries):
        color, found = VERDICT_COLORS.get(entry.verdict, "tab:gray"), entry.difference
        if found.interval is not None:
            axes.plot(found.interval, [position] * 2, color=color, linewidth=2.5, path_effects=[])
        axes.plot(found.mean, position, color=color, marker="o", markersize=8)
        text = "all together" if entry.variant.is_stack else entry.variant.label
        names.append(without_formulas(text if len(text) <= LONGEST_LABEL else
                                      f"{text[:LONGEST_LABEL]}..."))
    axes.set_yticks(range(len(entries)), names)
    axes.set_ylim(len(entries) - 0.5, -0.5)  # the first one at the top
    axes.margins(x=0.08)
    figure.supxlabel("loss minus baseline's (nats per token), 95% interval; left is better",
                     fontsize="medium")


def _plot_range(figure: Figure, found: Range) -> None:
    """Plot the mean loss over one key, the fitted curve and its minimum."""
    axes = figure.subplots()
    x, y = list(found.points), list(found.points.values())
    axes.plot(x, y, color="tab:blue", marker="o", markersize=9, linestyle="none",
              label="mean over seeds")
    if found.fit:
        plot_fit(axes, x, y, "tab:blue")
    axes.set_xlabel(found.key)
    axes.set_ylabel("final validation loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")
