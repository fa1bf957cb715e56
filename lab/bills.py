"""What rented machines have cost, divided among the runs that used them. Needs no torch."""

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import click

from basics.cli import USD_PER_HOUR
from basics.errors import UserError
from reporting.machine_time import SEARCH, Use, read_uses
from run_config import RUN_NAME, plain_name

LAUNCH_SECONDS, SEARCH_SECONDS = "launch_seconds", "search_seconds"
SETUP_SECONDS, IDLE_SECONDS = "setup_seconds", "idle_seconds"
PARTS = (SETUP_SECONDS, SEARCH_SECONDS, LAUNCH_SECONDS, IDLE_SECONDS)
BILL = (*PARTS, "machine_seconds", "machine_usd")
PRICES = click.option(
    "--usd-per-hour",
    "prices",
    multiple=True,
    metavar="RUN=PRICE",
    help="Price all the time of RUN afterwards, or of all runs with PRICE alone; may be repeated.",
)
Bill = dict[str, float | None]  # by BILL; seconds of all machines of a run, and what they cost


def read_bills(runs_dir: Path, prices: Mapping[str, float]) -> dict[str, Bill]:
    """Return the bill of each run in a directory, by name; runs that did not record it have none.

    `prices` has the dollars an hour of runs that are priced afterwards. Dollars are None for a run
    without any price.
    """
    names = dict.fromkeys(filter(RUN_NAME.fullmatch, sorted(os.listdir(runs_dir))))
    uses_of: dict[str, list[Use]] = defaultdict(list)
    for name in names:
        for use in read_uses(runs_dir / name):
            # The directory may be a copy of another run's: each use counts once.
            uses_of[use.run if use.run in names else name].append(use)
    by_machine = defaultdict(list)
    hourly = dict(prices)
    for name, uses in uses_of.items():
        for use in uses:
            by_machine[use.host, use.boot].append((name, use))
        known = [use.usd_per_hour for use in uses if use.usd_per_hour]
        if known:
            hourly.setdefault(name, known[-1])  # of uses without a price
    seconds = {name: dict.fromkeys(PARTS, 0.0) for name in uses_of}
    usd = dict.fromkeys(uses_of, 0.0)
    for machine in by_machine.values():
        for name, use, part, spent in divided(machine):
            seconds[name][part] += spent
            price = prices.get(name) or use.usd_per_hour or hourly.get(name, 0.0)
            usd[name] += spent / 3600 * price
    return {
        name: {
            **seconds[name],
            "machine_seconds": sum(seconds[name].values()),
            "machine_usd": usd[name] if name in hourly else None,
        }
        for name, uses in uses_of.items()
        if not any(use.earlier_seconds for use in uses)  # else a part of its bill is not known
    }


def divided(machine: list[tuple[str, Use]]) -> Iterator[tuple[str, Use, str, float]]:
    """Divide the time of one machine among runs: yield name, use, part of the bill and seconds.

    From the start of the machine to the end of the last use, each second is in one bill. Time in
    which several runs used it is divided equally; time in which none did is of the next one.
    """
    waiting = deque(sorted(machine, key=lambda item: item[1].began))
    times = sorted({time for _, use in machine for time in (use.up_since, use.began, use.until)})
    current: list[tuple[str, Use]] = []
    last_end = 0.0
    for start, end in pairwise(times):
        while waiting and waiting[0][1].began <= start:
            current.append(waiting.popleft())
        current = [(name, use) for name, use in current if use.until > start]
        users = {(name, use.kind): use for name, use in current}  # lines of one use overlap
        for (name, kind), use in users.items():
            part = SEARCH_SECONDS if kind == SEARCH else LAUNCH_SECONDS
            yield name, use, part, (end - start) / len(users)
        if users:
            last_end = end
        elif waiting:
            name, use = waiting[0]
            if start >= use.up_since:  # else the machine, or the container, was off
                part = IDLE_SECONDS if last_end > use.up_since else SETUP_SECONDS
                yield name, use, part, end - start


def prices_of(texts: Iterable[str], names: Iterable[str], runs_dir: Path) -> dict[str, float]:
    """Read `--usd-per-hour`: RUN=PRICE, or PRICE for all of `names`. Raises: UserError."""
    prices: dict[str, float] = {}
    for text in texts:
        name, equals, price = text.rpartition("=")
        name = plain_name(runs_dir, name)
        if equals and name not in names:
            raise UserError(
                f"--usd-per-hour {text[:60]!r}: wanted RUN=PRICE with a RUN of the table, or PRICE"
            )
        chosen = [name] if equals else names
        prices |= dict.fromkeys(chosen, USD_PER_HOUR(price))
    return prices
