"""How many of a baseline's tokens a recipe needs to reach the baseline's final loss.

    uv run python -m benchmarks.recipes --sweeps-dir sweeps

reads the sweeps that `benchmarks/recipes.md` lists and prints its first table.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from tabulate import tabulate

from basics.errors import UserError, print_line
from lab.compare.run_results import FINISHED, Result, read_result
from lab.compare.tokens_to_loss import first_reaching, mean_reached
from lab.sweep.noise import Difference

TWINS = ("bytes", "bpe")
RECIPE = "muon"
BASELINES = ("original", "adamw-one-rate", "adamw")
RUN_DIR = re.compile(r"(.+)-seed-(\d+)")
HEADS = ["baseline", "its tokens", "its loss", "recipe", "its tokens", "share", "its loss",
         "difference", "95% interval", "reached after", "share"]


@dataclass(frozen=True)
class Variant:
    """The finished runs of one variant of a sweep, by seed."""

    label: str
    runs: dict[int, Result]

    @property
    def losses(self) -> dict[int, float]:
        return {seed: run.figures.validation_loss for seed, run in self.runs.items()}

    @property
    def tokens(self) -> float:
        return statistics.fmean(run.figures.tokens for run in self.runs.values())


def read_variants(sweep_dir: Path) -> list[Variant]:
    """Read the variants of a sweep, in order of their tokens; empty if there is no such sweep."""
    runs: dict[str, dict[int, Result]] = {}
    for path in sorted(sweep_dir.glob("*-seed-*")):
        label, seed = RUN_DIR.fullmatch(path.name).groups()
        result = read_result(path)
        if result.status == FINISHED and result.figures.validation_loss is not None:
            runs.setdefault(label, {})[int(seed)] = result
    return sorted((Variant(*found) for found in runs.items()), key=lambda found: found.tokens)


def rows_of(sweeps_dir: Path) -> Iterator[list[str]]:
    """Yield the cells of the table: each recipe beside each baseline of its twin."""
    for twin in TWINS:
        for name in BASELINES:
            for baseline in read_variants(sweeps_dir / f"{twin}-{name}"):
                for recipe in read_variants(sweeps_dir / f"{twin}-{RECIPE}"):
                    yield [f"{twin}-{name}", *_compare(baseline, recipe, f"{twin}-{RECIPE}")]


def _compare(baseline: Variant, recipe: Variant, name: str) -> list[str]:
    seeds = sorted(baseline.runs.keys() & recipe.runs.keys())
    difference = Difference.of([recipe.losses[seed] - baseline.losses[seed] for seed in seeds])
    interval = difference.interval if difference else None
    reached = mean_reached([first_reaching(recipe.runs[seed].records, baseline.losses[seed])
                            for seed in seeds])
    return [
        f"{baseline.tokens:,.0f}", _mean(baseline), name, f"{recipe.tokens:,.0f}",
        f"{recipe.tokens / baseline.tokens:.0%}", _mean(recipe),
        f"{difference.mean:+.3f}" if difference else "-",
        "{:+.3f} to {:+.3f}".format(*interval) if interval else "-",
        f"{reached.tokens:,.0f}" if reached else "not reached",
        f"{reached.tokens / baseline.tokens:.1%}" if reached else "-",
    ]


def _mean(variant: Variant) -> str:
    return f"{statistics.fmean(variant.losses.values()):.3f} ({len(variant.runs)} seeds)"


@click.command()
@click.option("--sweeps-dir", type=click.Path(path_type=Path), default=Path("sweeps"),
              show_default=True)
def main(sweeps_dir: Path) -> None:
    """Print the table of recipes and baselines as Markdown."""
    rows = list(rows_of(sweeps_dir))
    if not rows:
        raise UserError(f"{sweeps_dir}: no finished runs of the sweeps in benchmarks/recipes.md;"
                        " run those commands first")
    print_line(tabulate(rows, HEADS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(error.line()) from None
