"""What rented machines have cost: the time that each was up, times its price. Needs no torch."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from basics.cli import USD_PER_HOUR
from basics.errors import UserError
from basics.text import did_you_mean
from reporting.machine_time import Use, read_uses
from run_config import RUN_NAME, plain_name

PRICES = click.option(
    "--usd-per-hour",
    "prices",
    multiple=True,
    metavar="RUN=PRICE",
    help="Price all the time of RUN afterwards, or of all runs with PRICE alone; may be repeated.",
)


@dataclass(frozen=True)
class Bill:
    """The time in which machines were up, until a run's last use of each, and its cost."""

    machine_seconds: float
    machine_usd: float | None  # None without any price


def read_bills(runs_dir: Path, prices: Mapping[str, float]) -> tuple[dict[str, Bill], Bill]:
    """Return the bill of each run in a directory, by name, and that of all together.

    A run's bill has all the time of its machines until its last use of them, also what other runs
    used: the bill of all counts it once. Runs that did not record all their uses have no bill.

    Args:
        prices: US dollars an hour, by run, of all the time of runs that are priced afterwards.
    """
    names = dict.fromkeys(filter(RUN_NAME.fullmatch, sorted(os.listdir(runs_dir))))
    uses_of: dict[str, list[Use]] = defaultdict(list)
    for name in names:
        for use in read_uses(runs_dir / name):
            # The directory may be a copy of another run's: each use counts once.
            uses_of[use.run if use.run in names else name].append(use)
    for name, uses in uses_of.items():
        known = [use.usd_per_hour for use in uses if use.usd_per_hour]
        usual = known[-1] if known else None  # of uses without a price
        uses_of[name] = [
            use.model_copy(update={"usd_per_hour": prices.get(name) or use.usd_per_hour or usual})
            for use in uses
        ]
    every = [use for uses in uses_of.values() for use in uses]
    bills = {
        name: _bill_of(uses)
        for name, uses in uses_of.items()
        if not any(use.earlier_seconds for use in uses)  # else a part of it is not known
    }
    return bills, _bill_of(every)


def _bill_of(uses: list[Use]) -> Bill:
    """Add up the time from each machine's start to its last use; each second counts once."""
    seconds, usd = 0.0, 0.0
    counted_until: dict[tuple[str, str], float] = defaultdict(float)  # by machine
    # A container that was stopped and started again is up since later, and was off in between.
    for use in sorted(uses, key=lambda use: (use.up_since, use.until)):
        machine = use.host, use.boot
        new = max(0.0, use.until - max(use.up_since, counted_until[machine]))
        counted_until[machine] = max(counted_until[machine], use.until)
        seconds += new
        usd += new / 3600 * (use.usd_per_hour or 0.0)
    return Bill(seconds, usd or None)


def prices_of(texts: Iterable[str], names: Iterable[str], runs_dir: Path) -> dict[str, float]:
    """Read `--usd-per-hour`: RUN=PRICE, or PRICE for all of `names`. Raises: UserError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, price = text.rpartition("=")
        name = plain_name(runs_dir, name)
        if equals and name not in names:
            raise UserError(
                f"--usd-per-hour {text[:60]!r}{did_you_mean(name, names)}: wanted RUN=PRICE with a"
                " RUN of the table, or PRICE"
            )
        chosen = [name] if equals else names
        prices |= dict.fromkeys(chosen, USD_PER_HOUR(price))
    return prices
