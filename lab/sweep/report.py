"""The result of a sweep: each variant beside the baseline, as table, JSON document and charts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from basics.errors import UserError
from basics.text import counted, dollars, short_count
from lab.compare import charts, published
from lab.compare.reaching import Reached, mean_reached
from lab.compare.rows import compare
from lab.runs import Result, number_of
from lab.stats import Difference, pooled_deviation
from lab.sweep.definition import Changes, Sweep, label
from lab.sweep.execution import AT_LIMIT, PRUNED, Outcome, total
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
LONGEST_LABEL = 40  # characters, in a chart
LOWER = "lower, noise unknown"  # a verdict with one seed
VERDICT_COLORS = {"better": "tab:green", "worse": "tab:red"}


@dataclass(frozen=True)
class VariantResult:
    """One variant, over all its seeds, beside the baseline with the same seeds."""

    name: str
    changes: Changes
    outcomes: list[Outcome]  # in the order of the seeds, with the losses that are compared
    is_comparable: bool  # it validates on the baseline's tokens
    difference: Difference | None  # to the baseline; None for itself, and if they do not compare
    reached: Reached | None  # when all seeds had the baseline's final loss, mean

    @property
    def losses(self) -> list[float]:
        return [found.loss for found in self.outcomes if found.loss is not None]

    @property
    def loss(self) -> float | None:
        """The mean over the seeds that have one; None without any."""
        return statistics.fmean(self.losses) if self.losses else None

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure over the seeds that ended; None if one lacks it."""
        values = [found.result.value(key) for found in self.outcomes if found.loss is not None]
        return statistics.fmean(values) if values and None not in values else None

    @property
    def unfinished(self) -> str:
        """The states of the seeds without a final loss; empty if all have one."""
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


@dataclass(frozen=True)
class EqualLimit:
    """The seconds or dollars of a run at which the losses of all runs are compared."""

    key: str  # of a run's records: seconds, usd
    value: float

    def __str__(self) -> str:
        return duration(self.value) if self.key == "seconds" else f"US${dollars(self.value)}"

    def loss_of(self, result: Result) -> float | None:
        """Return the validation loss there, linear between two; None before the first one.

        After its last validation a run keeps that loss: it has finished.
        """
        points = _validations(result, self.key)
        if not points or self.value < points[0][0]:
            return None
        spent, losses = np.array(points).T
        return float(np.interp(self.value, spent, losses))


def _validations(result: Result, key: str) -> list[tuple[float, float]]:
    """Return the seconds or dollars of a run's validations, and their losses."""
    found = [
        (number_of(record, key), number_of(record, "validation_loss")) for record in result.records
    ]
    return [(spent, loss) for spent, loss in found if spent is not None and loss is not None]


def equal_limit(outcomes: Iterable[Outcome]) -> EqualLimit | None:
    """Return where losses are compared, if `max_hours` or `max_cost_usd` has ended a run.

    It is the last validation of the run at its limit that was validated last the earliest. None if
    no run is at its limit: all that have a loss have finished.
    """
    ended = [one for one in outcomes if one.state == AT_LIMIT]
    has_hours = any(one.run.config.max_hours is not None for one in ended)
    key = "seconds" if has_hours else "usd"
    validations = [_validations(one.result, key) for one in ended]
    last = [points[-1][0] for points in validations if points]
    return EqualLimit(key, min(last)) if last else None


def entries_of(sweep: Sweep, outcomes: dict[Path, Outcome]) -> list[VariantResult]:
    """Return the variants with what their runs have come to; the baseline first."""
    entries: list[VariantResult] = []
    limit, compared = equal_limit(outcomes.values()), list(outcomes.values())
    if limit:
        compared = [
            replace(found, loss=found.loss and limit.loss_of(found.result)) for found in compared
        ]
    for name, changes in zip(sweep.names, sweep.variants, strict=True):
        group = [found for found in compared if found.run.changes == changes]
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
            VariantResult(
                name,
                changes,
                group,
                is_comparable,
                difference if changes and is_comparable else None,
                reached if is_comparable else None,
            )
        )
    return entries


def add_stack(sweep: Sweep, entries: list[VariantResult]) -> str:
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


def table_of(sweep: Sweep, entries: list[VariantResult]) -> Table:
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
                cell(entry.loss, "{:.4f}".format),
                f"{found.mean:+.4f}" if found else UNKNOWN,
                interval or UNKNOWN,
                "; ".join(filter(None, (entry.verdict, tokens, entry.unfinished))) or UNKNOWN,
                reached or UNKNOWN,
                cell(entry.mean("seconds"), "{:,.0f}".format),
                cell(entry.mean("usd"), dollars),
            ]
        )
    return Table(COLUMNS, rows, notes_of(sweep, entries))


def notes_of(sweep: Sweep, entries: list[VariantResult]) -> list[str]:
    """Explain the table: where losses are compared, the noise, what was pruned, the cost."""
    outcomes = [found for entry in entries for found in entry.outcomes]
    spent = f"all runs: {duration(total(outcomes, 'seconds'))}"
    if usd := total(outcomes, "usd"):
        spent += f", US${dollars(usd)}"
    loss = "final validation loss"
    if limit := equal_limit(outcomes):
        loss = (
            f"validation loss after {limit} of each run, linear between validations, because"
            " max_hours or max_cost_usd has ended runs; of a run that had finished before, its"
            " final one"
        )
    return [
        f"loss: {loss} (nats per token), mean over seeds; difference: to {sweep.base.name} with the"
        " same seeds",
        _noise_note([entry.difference for entry in entries if entry.difference]),
        *(
            f"{found.run.label}: {PRUNED}: {found.result.reason}"
            for found in outcomes
            if found.state == PRUNED
        ),
        spent,
    ]


def _noise_note(differences: list[Difference]) -> str:
    """Tell the noise over all variants."""
    known = [one for one in differences if one.deviation is not None]
    if not known:
        return (
            "noise: not known with one finished seed of each variant; measure it with --seeds 3"
            " or more"
        )
    deviation, freedom = pooled_deviation((one.deviation, one.num_pairs) for one in known)
    return (
        "noise: the standard deviation of a difference with one seed is"
        f" {deviation:.4f} over all variants ({counted(freedom, 'degree')} of freedom);"
        " inside: the 95% interval, from the variant's own seeds, contains 0"
    )


def document_of(sweep: Sweep, entries: list[VariantResult], stop_reason: str) -> dict[str, Any]:
    """Return the result of a sweep as a JSON document; None for what is not known."""
    limit = equal_limit(found for entry in entries for found in entry.outcomes)
    return {
        "schema": "sweep/2",
        "sweep": str(sweep.sweep_dir),
        "base": sweep.base.name,
        "stop_reason": stop_reason or None,
        "compared_at": limit and {limit.key: limit.value},
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
                        "usd": found.result.usd,
                    }
                    for found in entry.outcomes
                ],
                "loss": entry.loss,
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


def draw_sweep(sweep: Sweep, entries: list[VariantResult]) -> list[Path]:
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
    return written


def _plot_differences(entries: list[VariantResult], figure: Figure) -> None:
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
