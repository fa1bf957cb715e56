"""How many of a baseline's tokens a recipe needs to reach the baseline's final loss.

    uv run python -m benchmarks.recipes --sweeps-dir sweeps

reads the sweeps that `benchmarks/recipes.md` lists and prints its first table.
"""

import re
import statistics
from pathlib import Path

import click

from basics.cli import run_and_exit
from basics.errors import UserError, print_line
from lab.compare.reaching import first_reaching
from lab.runs import Result, read_run
from lab.stats import Difference
from lab.table import UNKNOWN, Column, Table
from reporting.summary import FINISHED

RECIPES = {
    "bytes-muon": ("bytes-original", "bytes-adamw"),
    "bpe-muon": ("bpe-original", "bpe-adamw-one-rate", "bpe-adamw"),
    "bpe-muon-4k": ("bpe-adamw-4k",),
    "bpe-large-muon": ("bpe-large-adamw",),
}  # each with the baselines beside it
RUN_DIR = re.compile(r"(.+)-seed-(\d+)")
HEADS = [
    "baseline",
    "its tokens",
    "its loss",
    "recipe",
    "its tokens",
    "share",
    "its loss",
    "difference",
    "95% interval",
    "reached after",
    "share",
    "95% interval",
]
BASELINE = "baseline"  # in the directories of a sweep: its base without changes
Runs = dict[int, Result]  # the finished runs of one variant of a sweep, by seed


def read_variants(sweep_dir: Path) -> list[tuple[str, Runs]]:
    """Read the variants of a sweep by name, in order of their tokens; none if it does not exist."""
    variants: dict[str, Runs] = {}
    for path in sorted(sweep_dir.glob("*-seed-*")):
        found, result = RUN_DIR.fullmatch(path.name), read_run(path)
        if found and result.status == FINISHED and result.validation_loss is not None:
            change, seed = found.groups()
            name = sweep_dir.name if change == BASELINE else f"{sweep_dir.name}: {change}"
            variants.setdefault(name, {})[int(seed)] = result
    return sorted(variants.items(), key=lambda found: mean("tokens", found[1]))


def mean(figure: str, runs: Runs) -> float:
    return statistics.fmean(run.value(figure) for run in runs.values())


def own_cells(name: str, runs: Runs) -> list[str]:
    return [
        name,
        f"{mean('tokens', runs):,.0f}",
        f"{mean('validation_loss', runs):.3f} ({len(runs)} seeds)",
    ]


def compare(baseline: tuple[str, Runs], recipe: tuple[str, Runs]) -> list[str]:
    (_, theirs), (_, ours) = baseline, recipe
    cells = own_cells(*baseline)
    name, tokens, loss = own_cells(*recipe)
    seeds = sorted(theirs.keys() & ours.keys())
    losses = {seed: theirs[seed].validation_loss for seed in seeds}
    difference = Difference.of([ours[seed].validation_loss - losses[seed] for seed in seeds])
    cells += [
        name,
        tokens,
        f"{mean('tokens', ours) / mean('tokens', theirs):.0%}",
        loss,
        f"{difference.mean:+.3f}" if difference else UNKNOWN,
        interval_of(difference, "{:+.3f} to {:+.3f}"),
    ]
    reached = [first_reaching(ours[seed].records, losses[seed]) for seed in seeds]
    if not seeds or None in reached:
        return [*cells, "not reached" if seeds else UNKNOWN, UNKNOWN, UNKNOWN]
    shares = Difference.of(
        [found.tokens / theirs[seed].tokens for seed, found in zip(seeds, reached, strict=True)]
    )
    return [
        *cells,
        f"{statistics.fmean(found.tokens for found in reached):,.0f}",
        f"{shares.mean:.1%}",
        interval_of(shares, "{:.1%} to {:.1%}"),
    ]


def interval_of(found: Difference | None, text: str) -> str:
    return text.format(*found.interval) if found and found.interval else UNKNOWN


@click.command()
@click.option(
    "--sweeps-dir", type=click.Path(path_type=Path), default=Path("sweeps"), show_default=True
)
def main(sweeps_dir: Path) -> None:
    """Print the table of recipes, each beside each of its baselines, as Markdown."""
    rows = [
        compare(baseline, recipe)
        for name, baselines in RECIPES.items()
        for each in baselines
        for baseline in read_variants(sweeps_dir / each)
        for recipe in read_variants(sweeps_dir / name)
    ]
    if not rows:
        raise UserError(
            f"{sweeps_dir}: no finished runs of the sweeps in benchmarks/recipes.md;"
            " run those commands first"
        )
    columns = [Column(head, "left" if head in (BASELINE, "recipe") else "right") for head in HEADS]
    print_line(Table(columns, rows).markdown())


if __name__ == "__main__":
    run_and_exit(main, smaller="")
