"""What the runs of a sweep have come to, by variant."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from basics.errors import NON_FINITE, STOP_SIGNALS, UserError
from lab.compare.results import Result, read_result
from lab.compare.rows import validation_slice
from lab.compare.tokens_to_loss import Reached, first_reaching, mean_reached
from lab.runs import RunFiles
from lab.stats import Difference
from lab.sweep.changes import Changes, label
from lab.sweep.plan import PlannedRun, Sweep, Variant
from reporting.summary import FINISHED

DIVERGED, NOT_STARTED = "diverged", "not started"
NOT_FINITE = "were not finite"  # in the reason of a run whose gradients were not


@dataclass(frozen=True)
class Outcome:
    """What one run has come to.

    Attributes:
        state: `finished`, `diverged`, `not started`, or why it has not finished.
        loss: the final validation loss; None unless finished.
    """

    run: PlannedRun
    result: Result
    state: str

    @property
    def loss(self) -> float | None:
        return self.result.figures.validation_loss if self.state == FINISHED else None

    @property
    def is_final(self) -> bool:
        """Whether another launch would change nothing."""
        return self.state in (FINISHED, DIVERGED)


def read_outcome(run: PlannedRun, exit_status: int = 0) -> Outcome:
    """Read the files of a run.

    Args:
        exit_status: of its launch by this command, if there was one.
    """
    result = read_result(run.run_dir)
    return Outcome(run, result, _state(run, result, exit_status))


def _state(run: PlannedRun, result: Result, exit_status: int) -> str:
    summary = RunFiles.read(run.run_dir).summary
    if result.status == FINISHED:
        return FINISHED if result.figures.validation_loss is not None else DIVERGED
    if exit_status == NON_FINITE or NOT_FINITE in str(summary.get("reason")):
        return DIVERGED
    if exit_status and result.status != "stopped" and exit_status - 128 not in STOP_SIGNALS:
        return f"failed (status {exit_status})"
    return result.status if summary or result.records else NOT_STARTED


@dataclass(frozen=True)
class Entry:
    """One variant, over all its seeds, beside the baseline.

    Attributes:
        outcomes: in the order of the seeds.
        baselines: the baseline's outcomes with the same seeds.
    """

    variant: Variant
    outcomes: list[Outcome]
    baselines: list[Outcome]

    @property
    def losses(self) -> list[float]:
        return [found.loss for found in self.outcomes if found.loss is not None]

    @property
    def loss(self) -> float | None:
        """The mean over the finished seeds."""
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def pairs(self) -> list[tuple[Outcome, Outcome]]:
        """The seeds with which both this variant and the baseline have finished."""
        return [pair for pair in zip(self.outcomes, self.baselines, strict=True)
                if pair[0].loss is not None and pair[1].loss is not None]

    @cached_property
    def difference(self) -> Difference | None:
        """The difference to the baseline; None for the baseline itself."""
        if self.variant.is_baseline:
            return None
        return Difference.of([own.loss - base.loss for own, base in self.pairs])

    @property
    def reached(self) -> Reached | None:
        """When the baseline's final loss was reached, mean over the seeds; None if not by all."""
        if self.validates_on_other_tokens:
            return None
        return mean_reached([first_reaching(own.result.records, base.loss)
                             for own, base in self.pairs])

    @property
    def validates_on_other_tokens(self) -> bool:
        slices = {validation_slice(found[0].result.config) for found in self.pairs}
        return slices != {validation_slice(found[1].result.config) for found in self.pairs}

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure over the finished seeds."""
        values = [getattr(found.result.figures, key) for found in self.outcomes
                  if found.loss is not None]
        return statistics.fmean(values) if values and None not in values else None

    @property
    def unfinished(self) -> str:
        """The states of the seeds that have not finished; empty if all have."""
        states = [found.state for found in self.outcomes if found.loss is None]
        counted = ((state, states.count(state)) for state in dict.fromkeys(states))
        return ", ".join(state if len(self.outcomes) == 1 else
                         f"{count} of {len(self.outcomes)} {state}" for state, count in counted)

    @property
    def verdict(self) -> str:
        """Where the difference lies; `better` and `worse` are outside the noise."""
        if self.difference is None or self.validates_on_other_tokens:
            return ""
        is_lower = self.difference.mean < 0
        if self.difference.is_noise is None:
            return "lower, noise unknown" if is_lower else "not lower, noise unknown"
        return "inside" if self.difference.is_noise else "better" if is_lower else "worse"

    @property
    def is_improvement(self) -> bool:
        """Whether it was better outside the noise; with one seed, better at all."""
        return not self.unfinished and self.verdict in ("better", "lower, noise unknown")


def entries_of(sweep: Sweep, statuses: dict[str, int]) -> list[Entry]:
    """Read what all runs of a sweep have come to; the baseline first.

    Args:
        statuses: exit statuses of the runs that this command has launched, by directory name.
    """
    outcomes = [read_outcome(run, statuses.get(run.run_dir.name, 0)) for run in sweep.runs]
    by_name = {variant.name: [found for found in outcomes if found.run.variant == variant]
               for variant in sweep.plan.variants}
    baselines = next(iter(by_name.values()))
    return [Entry(variant, by_name[variant.name], baselines) for variant in sweep.plan.variants]


def with_stack(sweep: Sweep, entries: list[Entry]) -> tuple[Sweep, list[str]]:
    """Return the sweep with all improvements as one variant, and lines that say what was done.

    The largest improvement comes first; a later one that sets a key to another value is left out.
    """
    better = sorted((entry for entry in entries if entry.is_improvement
                     and not entry.variant.is_stack), key=lambda entry: entry.difference.mean)
    together: Changes = {}
    used, lines = [], []
    for entry in better:
        changes = entry.variant.changes
        if any(together.get(key, value) != value for key, value in changes.items()):
            lines.append(f"stack: without {entry.variant.label}: a larger improvement sets the"
                         " same key")
            continue
        together |= changes
        used.append(entry.variant.label)
    if len(used) < 2:
        return sweep, [*lines, "stack: nothing to train: fewer than two changes were better than"
                               " the baseline outside the noise"]
    if any(entry.difference.is_noise is None for entry in better):
        lines.append("stack: with one seed the noise is not known: all changes with a lower loss"
                     " are taken")
    try:
        stacked = sweep.with_variant(together, is_stack=True)
    except UserError as error:
        return sweep, [*lines, f"stack: {label(together)} cannot be trained: {error}"]
    return stacked, [*lines, f"stack: {', '.join(used)}"]
