"""How many of a baseline's tokens a recipe needs to reach the baseline's final loss.

    uv run python -m benchmarks.recipes --sweeps-dir sweeps

reads the sweeps that `benchmarks/recipes.md` lists and prints its first table.
"""

import re
import statistics
from pathlib import Path
from typing import NamedTuple

import click

from basics.cli import run_and_exit
from basics.errors import UserError, print_line
from lab.compare.results import Result, first_reaching, read_result
from lab.stats import Difference
from lab.table import UNKNOWN, Column, Table
from reporting.summary import FINISHED

RECIPES = {"bytes-muon": ("bytes-original", "bytes-adamw"),
           "bpe-muon": ("bpe-original", "bpe-adamw-one-rate", "bpe-adamw"),
           "bpe-muon-4k": ("bpe-adamw-4k",),
           "bpe-large-muon": ("bpe-large-adamw",)}  # each with the baselines beside it
RUN_DIR = re.compile(r"(.+)-seed-(\d+)")
HEADS = ["baseline", "its tokens", "its loss", "recipe", "its tokens", "share", "its loss",
         "difference", "95% interval", "reached after", "share", "95% interval"]
BASELINE = "baseline"  # in the directories of a sweep: its base without changes


class Variant(NamedTuple):
    """The finished runs of one variant of a sweep, by seed."""

    name: str  # of the sweep, and of the change if there is one
    runs: dict[int, Result]

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.figures["validation_loss"] for seed, run in self.runs.items()}

    @property
    def tokens(self) -> float:
        return statistics.fmean(run.figures["tokens"] for run in self.runs.values())

    @property
    def cells(self) -> list[str]:
        return [self.name, f"{self.tokens:,.0f}",
                f"{statistics.fmean(self.losses.values()):.3f} ({len(self.runs)} seeds)"]


def read_variants(sweep_dir: Path) -> list[Variant]:
    """Read the variants of a sweep, in order of their tokens; empty if there is no such sweep."""
    runs: dict[str, dict[int, Result]] = {}
    for path in sorted(sweep_dir.glob("*-seed-*")):
        found, result = RUN_DIR.fullmatch(path.name), read_result(path)
        if found and result.status == FINISHED and result.figures["validation_loss"] is not None:
            change, seed = found.groups()
            name = sweep_dir.name if change == BASELINE else f"{sweep_dir.name}: {change}"
            runs.setdefault(name, {})[int(seed)] = result
    return sorted((Variant(*found) for found in runs.items()), key=lambda found: found.tokens)


def compare(baseline: Variant, recipe: Variant) -> list[str]:
    seeds = sorted(baseline.runs.keys() & recipe.runs.keys())
    difference = Difference.of([recipe.losses[seed] - baseline.losses[seed] for seed in seeds])
    name, tokens, loss = recipe.cells
    cells = [*baseline.cells, name, tokens, f"{recipe.tokens / baseline.tokens:.0%}", loss,
             f"{difference.mean:+.3f}" if difference else UNKNOWN,
             interval_of(difference, "{:+.3f} to {:+.3f}")]
    reached = [first_reaching(recipe.runs[seed].records, baseline.losses[seed]) for seed in seeds]
    if not seeds or None in reached:
        return [*cells, "not reached" if seeds else UNKNOWN, UNKNOWN, UNKNOWN]
    shares = Difference.of([found.tokens / baseline.runs[seed].figures["tokens"]
                            for seed, found in zip(seeds, reached, strict=True)])
    return [*cells, f"{statistics.fmean(found.tokens for found in reached):,.0f}",
            f"{shares.mean:.1%}", interval_of(shares, "{:.1%} to {:.1%}")]


def interval_of(found: Difference | None, text: str) -> str:
    return text.format(*found.interval) if found and found.interval else UNKNOWN


@click.command()
@click.option("--sweeps-dir", type=click.Path(path_type=Path), default=Path("sweeps"),
              show_default=True)
def main(sweeps_dir: Path) -> None:
    """Print the table of recipes, each beside each of its baselines, as Markdown."""
    rows = [compare(baseline, recipe) for name, baselines in RECIPES.items()
            for each in baselines for baseline in read_variants(sweeps_dir / each)
            for recipe in read_variants(sweeps_dir / name)]
    if not rows:
        raise UserError(f"{sweeps_dir}: no finished runs of the sweeps in benchmarks/recipes.md;"
                        " run those commands first")
    columns = [Column(head, "left" if head in (BASELINE, "recipe") else "right") for head in HEADS]
    print_line(Table(columns, rows).markdown())


if __name__ == "__main__":
    run_and_exit(main, smaller="")
