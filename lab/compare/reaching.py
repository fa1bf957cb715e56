"""When a run had reached a loss. Needs no torch."""

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from lab.runs import Record, number_of


class Reached(NamedTuple):
    """What a run had trained on and spent when it reached a loss; dollars if the price is known."""

    tokens: float
    usd: float | None = None


def first_reaching(records: Iterable[Record], loss: float) -> Reached | None:
    """Return when a run's validation loss was first at or below a loss; None if it never was.

    Between two validations the loss is taken as linear in tokens, and so are the dollars. Of a
    run whose first validation is already there, it is that validation: an upper bound.
    """
    before: tuple[float, Reached] | None = None
    for record in records:
        now = number_of(record, "validation_loss")
        tokens, usd = number_of(record, "tokens"), number_of(record, "usd")
        if now is None or tokens is None:
            continue
        if now > loss:
            before = now, Reached(tokens, usd)
        elif before is None:
            return Reached(tokens, usd)
        else:
            high, first = before
            share = (high - loss) / (high - now)
            return Reached(
                first.tokens + share * (tokens - first.tokens),
                None if None in (first.usd, usd) else first.usd + share * (usd - first.usd),
            )
    return None


def mean_reached(runs: Iterable[tuple[Iterable[Record], float]]) -> Reached | None:
    """Return the mean over runs with a loss to reach each; None without any, or if one has not."""
    found = [first_reaching(records, loss) for records, loss in runs]
    if not found or None in found:
        return None
    tokens, usd = zip(*found, strict=True)
    return Reached(statistics.fmean(tokens), None if None in usd else statistics.fmean(usd))
