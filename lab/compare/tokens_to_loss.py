"""The tokens and dollars after which a run's validation loss reaches that of another run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from basics.errors import UserError
from lab.compare.rows import SEED, Comparison, Row, validation_slice
from lab.compare.run_figures import Record, number
from lab.compare.run_results import FINISHED, Result, shown

MAX_ROWS = 4  # up to this number, each row is compared with each


@dataclass(frozen=True)
class Reached:
    """What a run had trained on and spent when it reached a loss; dollars if the price is known."""

    tokens: float
    usd: float | None = None


@dataclass(frozen=True)
class TokensToLoss:
    """For each row of a comparison when it reached the final loss of each reference.

    Attributes:
        cells: by row and reference; None if the loss was not reached.
    """

    rows: list[Row]
    references: list[Row]
    cells: list[list[Reached | None]]

    def share(self, row: int, reference: int) -> float | None:
        """Return a cell's tokens as a share of those that the reference itself needed."""
        own = self.cells[self.rows.index(self.references[reference])][reference]
        cell = self.cells[row][reference]
        return cell.tokens / own.tokens if cell and own and own.tokens else None


def first_reaching(records: Iterable[Record], loss: float) -> Reached | None:
    """Return when a run's validation loss was first at or below a loss; None if it never was.

    Between two validations the loss is taken as linear in tokens, and so are the dollars. Of a
    run whose first validation is already there, it is that validation: an upper bound.

    Args:
        records: lines of `metrics.jsonl`.
    """
    before: tuple[float, Reached] | None = None
    for record in records:
        now, tokens = number(record.get("validation_loss")), number(record.get("tokens"))
        if now is None or tokens is None:
            continue
        reached = Reached(tokens, number(record.get("usd")))
        if now <= loss:
            return _between(before, (now, reached), loss) if before else reached
        before = now, reached
    return None


def _between(before: tuple[float, Reached], after: tuple[float, Reached], loss: float) -> Reached:
    (high, first), (low, second) = before, after
    share = (high - loss) / (high - low)
    is_priced = first.usd is not None and second.usd is not None
    return Reached(first.tokens + share * (second.tokens - first.tokens),
                   first.usd + share * (second.usd - first.usd) if is_priced else None)


def mean_reached(found: list[Reached | None]) -> Reached | None:
    """Return the mean over runs; None if one of them did not reach the loss, or there is none."""
    if not found or None in found:
        return None
    dollars = [reached.usd for reached in found]
    return Reached(statistics.fmean(reached.tokens for reached in found),
                   None if None in dollars else statistics.fmean(dollars))


def tokens_to_loss(comparison: Comparison, of_run: str | None = None) -> TokensToLoss | None:
    """Compare all rows with one run's final validation loss, or a few rows with each other.

    Args:
        of_run: the reference; without it, rows of finished runs if there are 2 to 4 of them.

    Returns:
        None without a reference, if there are fewer or more rows.

    Raises:
        UserError: the reference is not in the comparison or has no final validation loss.
    """
    usable = [row for row in comparison.rows if row.first.status == FINISHED and row.first.records
              and row.figures.validation_loss is not None]
    references = usable
    if of_run is not None:
        references = [row for row in usable if of_run in (run.name for run in row.results)]
        if not references:
            raise UserError(f"--to-loss-of {of_run[:60]}: no finished run with a validation loss"
                            " has this name; name one of the compared runs")
    elif not 2 <= len(usable) <= MAX_ROWS:
        return None
    rows = [row for row in comparison.rows if any(run.records for run in row.results)]
    return TokensToLoss(rows, references,
                        [[_reached(row, other) for other in references] for row in rows])


def _reached(row: Row, reference: Row) -> Reached | None:
    """Return the mean over a row's runs; None if they validate on other tokens.

    The loss to reach is that of the reference's run with the same seed; without one, its mean.
    """
    if validation_slice(row.first.config) != validation_slice(reference.first.config):
        return None
    losses = {_seed(run): run.figures.validation_loss for run in reference.results}
    mean = reference.figures.validation_loss
    return mean_reached([first_reaching(run.records, losses.get(_seed(run), mean))
                         for run in row.results])


def _seed(run: Result) -> str:
    return shown(run.config.get(SEED))
