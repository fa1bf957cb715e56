"""The tokens and dollars after which a run's validation loss reaches that of another run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from basics.errors import UserError
from lab.compare.results import shown
from lab.compare.rows import SEED, Comparison, Row
from lab.runs import Record, number
from reporting.summary import FINISHED


class Reached(NamedTuple):
    """What a run had trained on and spent when it reached a loss; dollars if the price is known."""

    tokens: float
    usd: float | None = None


class TokensToLoss(NamedTuple):
    """When each row of a comparison reached the final validation loss of one of them, or None."""

    reference: Row
    cells: list[Reached | None]


def first_reaching(records: Iterable[Record], loss: float) -> Reached | None:
    """Return when a run's validation loss was first at or below a loss; None if it never was.

    Between two validations the loss is taken as linear in tokens, and so are the dollars. Of a
    run whose first validation is already there, it is that validation: an upper bound.

    Args:
        records: lines of `metrics.jsonl`.
    """
    before: tuple[float, Reached] | None = None
    for record in records:
        now, tokens, usd = (number(record.get(key)) for key in ("validation_loss", "tokens", "usd"))
        if now is None or tokens is None:
            continue
        if now > loss:
            before = now, Reached(tokens, usd)
        elif before is None:
            return Reached(tokens, usd)
        else:
            high, first = before
            share = (high - loss) / (high - now)
            return Reached(first.tokens + share * (tokens - first.tokens), None
                           if None in (first.usd, usd) else first.usd + share * (usd - first.usd))
    return None


def mean_reached(found: list[Reached | None]) -> Reached | None:
    """Return the mean over runs; None if one of them did not reach the loss, or there is none."""
    if not found or None in found:
        return None
    tokens, usd = zip(*found, strict=True)
    return Reached(statistics.fmean(tokens), None if None in usd else statistics.fmean(usd))


def tokens_to_loss(comparison: Comparison, of_run: str | None = None) -> TokensToLoss | None:
    """Compare all rows with one run's final validation loss.

    Args:
        of_run: the reference; without it, the finished row with the highest loss, if there are
            two: all others have reached that.

    Raises:
        UserError: the reference is not in the comparison or has no final validation loss.
    """
    usable = [row for row in comparison.rows if row.first.status == FINISHED and row.first.records
              and None not in (row.figures["validation_loss"], row.figures["tokens"])
              and of_run in (None, *(run.name for run in row.results))]
    if of_run is not None and not usable:
        raise UserError(f"--to-loss-of {of_run[:60]}: no finished run with a validation loss"
                        " has this name; name one of the compared runs")
    if of_run is None and len(usable) < 2:
        return None
    reference = max(usable, key=lambda row: row.figures["validation_loss"])
    return TokensToLoss(reference, [_reached(row, reference) for row in comparison.rows])


def _reached(row: Row, reference: Row) -> Reached | None:
    """Return the mean over a row's runs; None if they validate on other tokens.

    The loss to reach is that of the reference's run with the same seed; without one, its mean.
    """
    if row is reference:
        return Reached(row.figures["tokens"], row.figures["usd"])  # all that it took, to its end
    if row.first.validation_slice != reference.first.validation_slice:
        return None
    losses = {shown(run.config.get(SEED)): run.figures["validation_loss"]
              for run in reference.results}
    mean = reference.figures["validation_loss"]
    return mean_reached([first_reaching(run.records, losses.get(shown(run.config.get(SEED)), mean))
                         for run in row.results])
