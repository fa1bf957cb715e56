"""The result of a sweep: each variant beside the baseline, as table, JSON document and charts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from basics.errors import UserError
from basics.text import counted, dollars, short_count
from lab.compare import charts, published
from lab.compare.reaching import Reached, mean_reached
from lab.compare.rows import compare
from lab.runs import number
from lab.stats import Difference, pooled_deviation, seeds_needed
from lab.sweep.definition import Changes, Sweep, label
from lab.sweep.execution import Outcome, total
from lab.table import UNKNOWN, Column, Table, cell
from reporting.charts import draw_by_hand
from reporting.summary import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = [
    Column("change", "left", 28),
    *map(Column, ("seeds", "loss", "difference", "95% interval")),
    Column("against noise", "left"),
    *map(Column, ("tokens to\nbaseline's loss", "seconds", "US$")),
]
ROUND_DIFFERENCE = 0.01  # nats; the number of seeds that it needs is always named
LONGEST_LABEL = 40  # characters, in a chart
LOWER = "lower, noise unknown"  # a verdict with one seed
VERDICT_COLORS = {"better": "tab:green", "worse": "tab:red"}


@dataclass(frozen=True)
class Entry:
    """One variant, over all its seeds, beside the baseline with the same seeds."""

    name: str
    changes: Changes
    outcomes: list[Outcome]  # in the order of the seeds
    is_comparable: bool  # it validates on the baseline's tokens
    difference: Difference | None  # to the baseline; None for itself, and if they do not compare
    reached: Reached | None  # when all seeds had the baseline's final loss, mean

    @property
    def losses(self) -> list[float]:
        return [found.loss for found in self.outcomes if found.loss is not None]

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure over the finished seeds; None if it is not known of all."""
        values = [found.result.value(key) for found in self.outcomes if found.loss is not None]
        return statistics.fmean(values) if values and None not in values else None

    @property
    def unfinished(self) -> str:
        """The states of the seeds that have not finished; empty if all have."""
        states = Counter(found.state for found in self.outcomes if found.loss is None)
        if len(self.outcomes) == 1:
            return ", ".join(states)
        return ", ".join(
            f"{count} of {len(self.outcomes)} {state}" for state, count in states.items()
        )

    @property
    def verdict(self) -> str:
        """Where the difference lies; `better` and `worse` are outside the noise."""
        if self.difference is None:
            return ""
        is_lower = self.difference.mean < 0
        if self.difference.is_noise is None:
            return LOWER if is_lower else f"not {LOWER}"
        if self.difference.is_noise:
            return "inside"
        return "better" if is_lower else "worse"


def entries_of(sweep: Sweep, outcomes: dict[Path, Outcome]) -> list[Entry]:
    """Return the variants with what their runs have come to; the baseline first."""
    entries: list[Entry] = []
    for name, changes in zip(sweep.names, sweep.variants, strict=True):
        group = [found for found in outcomes.values() if found.run.changes == changes]
        baseline = entries[0].outcomes if entries else group
        pairs = [
            (own, base)
            for own, base in zip(group, baseline, strict=True)
            if own.loss is not None and base.loss is not None
        ]
        is_comparable = all(
            own.result.validation_slice == base.result.validation_slice for own, base in pairs
        )
        difference = Difference.of([own.loss - base.loss for own, base in pairs])
        reached = mean_reached((own.result.records, base.loss) for own, base in pairs)
        entries.append(
            Entry(
                name,
                changes,
                group,
                is_comparable,
                difference if changes and is_comparable else None,
                reached if is_comparable else None,
            )
        )
    return entries


def add_stack(sweep: Sweep, entries: list[Entry]) -> str:
    """Add all improvements to the sweep as one variant; return a line that says what was done.

    An improvement is better outside the noise; with one seed, lower at all. The largest one comes
    first; a later one that sets a key to another value is left out.
    """
    better = sorted(
        (entry for entry in entries if entry.verdict in ("better", LOWER) and not entry.unfinished),
        key=lambda entry: entry.difference.mean,
    )
    together: Changes = {}
    for entry in better:
        if all(together.get(key, value) == value for key, value in entry.changes.items()):
            together |= entry.changes
    if any(entry.changes == together for entry in better) or not better:
        return "stack: nothing new to train: no two changes that were better"
    try:
        sweep.update([together])
    except UserError as error:
        return f"stack: {label(together)} cannot be trained: {error}"
    doubt = ""
    if better[0].verdict == LOWER:
        doubt = "; with one seed the noise is not known: all changes with a lower loss are taken"
    return f"stack: {label(together)}{doubt}"


def ranges_of(sweep: Sweep, entries: list[Entry]) -> dict[str, dict[float, float]]:
    """Return the mean loss by value for each key that two variants or more change alone.

    The values are numbers, by rising number, the baseline's own included.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for entry in entries:
        if len(entry.changes) == 1 and entry.is_comparable:
            ((key, value),) = entry.changes.items()
            if number(value) is not None:
                found.setdefault(key, {})[value] = entry.losses
    own = sweep.base.model.model_dump() | sweep.base.config.model_dump()
    own["global_batch_size"] = own["global_batch_size"] or entries[0].mean("global_batch_size")
    for name, value in list(own.items()):
        if isinstance(value, dict):  # a part of an object is a key such as grow.at
            own |= {f"{name}.{part}": each for part, each in value.items()}
    ranges = {}
    for key, losses in found.items():
        if len(losses) < 2:
            continue
        if number(own.get(key)) is not None:
            losses.setdefault(own[key], []).extend(entries[0].losses)
        trained = sorted((value, each) for value, each in losses.items() if each)
        ranges[key] = {value: statistics.fmean(each) for value, each in trained}
    return ranges


def has_fit(points: dict[float, float]) -> bool:
    """Return whether a quadratic in the value's logarithm can be fitted."""
    return len(points) >= published.NEEDED_FOR_PARABOLA and min(points) > 0


def _range_note(key: str, points: dict[float, float]) -> str:
    """Tell the minimum of the fitted curve, or why there is none."""
    if not has_fit(points):
        return f"{key}: no curve is fitted; it needs the losses of 3 values above 0"
    _, lowest = published.fit_log_quadratic(list(points), list(points.values()))
    if lowest is None:
        return (
            f"{key}: the fitted curve has no minimum between {min(points):g} and"
            f" {max(points):g}; try values beyond the best one"
        )
    return (
        f"{key}: lowest loss {lowest[1]:.4f} at {lowest[0]:.4g}, by a quadratic in log2({key})"
        f" through {len(points)} values"
    )


def table_of(sweep: Sweep, entries: list[Entry]) -> Table:
    """Return the result as a table with its notes."""

    rows = []
    for entry in entries:
        found = entry.difference
        interval = "{:+.4f} to {:+.4f}".format(*found.interval) if found and found.interval else ""
        tokens = "other validation tokens" * (not entry.is_comparable)
        reached = "not reached" if found else ""
        if entry.reached:
            reached = short_count(entry.reached.tokens)
        rows.append(
            [
                label(entry.changes),
                f"{len(entry.losses)}/{len(entry.outcomes)}",
                cell(entry.mean("validation_loss"), "{:.4f}".format),
                f"{found.mean:+.4f}" if found else UNKNOWN,
                interval or UNKNOWN,
                "; ".join(filter(None, (entry.verdict, tokens, entry.unfinished))) or UNKNOWN,
                reached or UNKNOWN,
                cell(entry.mean("seconds"), "{:,.0f}".format),
                cell(entry.mean("usd"), dollars),
            ]
        )
    return Table(COLUMNS, rows, notes_of(sweep, entries))


def notes_of(sweep: Sweep, entries: list[Entry]) -> list[str]:
    """Explain the table: the noise and how many seeds it asks for, ranges, the cost."""
    outcomes = [found for entry in entries for found in entry.outcomes]
    spent = f"all runs: {duration(total(outcomes, 'seconds'))}"
    if usd := total(outcomes, "usd"):
        spent += f", US${dollars(usd)}"
    return [
        "loss: final validation loss (nats per token), mean over seeds; difference: to"
        f" {sweep.base.name} with the same seeds",
        *noise_notes([entry.difference for entry in entries if entry.difference]),
        *(_range_note(key, points) for key, points in ranges_of(sweep, entries).items()),
        *pruned_notes(outcomes),
        spent,
    ]


def pruned_notes(outcomes: list[Outcome]) -> list[str]:
    """Tell for each pruned run where it ended and why, what it has cost, and what it would have."""
    notes = []
    for found in outcomes:
        saved = found.seconds_saved
        if found.num_steps_left is None:
            continue
        seconds, usd = found.result.seconds or 0.0, found.result.usd
        spent, left = duration(seconds), "an unknown time" if saved is None else duration(saved)
        if usd and saved is not None:
            spent += f", US${dollars(usd)}"
            left += f", US${dollars(usd * saved / seconds)}"
        notes.append(
            f"{found.run.label}: {found.state}: {found.result.reason}; spent: {spent}; saved: about"
            f" {left}"
        )
    return notes


def noise_notes(differences: list[Difference]) -> list[str]:
    """Tell the noise over all variants, and how many seeds the smallest difference needs."""
    known = [one for one in differences if one.deviation is not None]
    if not known:
        return [
            "noise: not known with one finished seed of each variant; measure it with --seeds 3"
            " or more"
        ]
    deviation, freedom = pooled_deviation((one.deviation, one.num_pairs) for one in known)
    needed = (
        f"{seeds_needed(ROUND_DIFFERENCE, deviation):,} for a difference of"
        f" {ROUND_DIFFERENCE:g}, by the noise over all variants"
    )
    smallest = min(known, key=lambda one: abs(one.mean) or math.inf)
    if smallest.mean:  # by its own noise: one noisy variant would ask thousands of a quiet one
        needed += (
            f"; {seeds_needed(smallest.mean, smallest.deviation):,} for the smallest one,"
            f" {abs(smallest.mean):.2g}, by its own"
        )
    return [
        "noise: the standard deviation of a difference with one seed is"
        f" {deviation:.4f} over all variants ({counted(freedom, 'degree')} of freedom);"
        " inside: the 95% interval, from the variant's own seeds, contains 0",
        f"seeds needed (80% power, 5% level): {needed}",
    ]


def document_of(sweep: Sweep, entries: list[Entry], stop_reason: str) -> dict[str, Any]:
    """Return the result of a sweep as a JSON document; None for what is not known."""
    return {
        "schema": "sweep/1",
        "sweep": str(sweep.sweep_dir),
        "base": sweep.base.name,
        "stop_reason": stop_reason or None,
        "variants": [
            {
                "name": entry.name,
                "changes": entry.changes,
                "runs": [
                    {
                        "run": str(found.run.run_dir),
                        "state": found.state,
                        "loss": found.loss,
                        "seconds": found.result.seconds,
                        "seconds_saved": found.seconds_saved,
                    }
                    for found in entry.outcomes
                ],
                "loss": entry.mean("validation_loss"),
                "difference": entry.difference and entry.difference.mean,
                "interval": entry.difference and entry.difference.interval,
                "against_noise": entry.verdict or None,
                "tokens_to_baselines_loss": entry.reached and entry.reached.tokens,
                "seconds": entry.mean("seconds"),
                "usd": entry.mean("usd"),
            }
            for entry in entries
        ],
        "notes": notes_of(sweep, entries),
    }


def draw_sweep(sweep: Sweep, entries: list[Entry]) -> list[Path]:
    """Draw the charts of a comparison, and those of a sweep, anew. Raises: OSError."""
    for path in sweep.sweep_dir.glob("*.png"):
        path.unlink()
    results = [
        found.result for entry in entries for found in entry.outcomes if found.result.records
    ]
    written, _ = charts.draw_comparison(compare(results).rows, sweep.sweep_dir)
    if compared := [entry for entry in entries if entry.difference]:
        path = sweep.sweep_dir / "differences.png"
        written.append(draw_by_hand(path, partial(_plot_differences, compared)))
    for key, points in ranges_of(sweep, entries).items():
        if len(points) > 1:
            plot = partial(
                published.plot_points,
                {"mean over seeds": dict.fromkeys(points.items())},
                published.plot_fit if has_fit(points) else lambda *_: None,
                (key, "final validation loss (nats per token)"),
            )
            written.append(draw_by_hand(sweep.sweep_dir / f"range-{key}.png", plot))
    return written


def _plot_differences(entries: list[Entry], figure: Figure) -> None:
    figure.set_size_inches(10, 2 + 0.5 * len(entries))
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=1)
    for position, entry in enumerate(entries):
        found = entry.difference
        color = VERDICT_COLORS.get(entry.verdict, "tab:gray")
        if found.interval is not None:
            axes.plot(found.interval, [position] * 2, color=color, linewidth=2.5, path_effects=[])
        axes.plot(found.mean, position, color=color, marker="o", markersize=8)
    labels = [published.without_formulas(label(entry.changes)[:LONGEST_LABEL]) for entry in entries]
    axes.set_yticks(range(len(entries)), labels)
    axes.set_ylim(len(entries) - 0.5, -0.5)  # the first one at the top
    axes.margins(x=0.08)
    figure.supxlabel(
        "loss minus baseline's (nats per token), 95% interval; left is better", fontsize="medium"
    )
