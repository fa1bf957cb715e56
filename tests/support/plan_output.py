"""The output of `lab plan`, and its cells."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from lab.__main__ import cli
from tests.support.workplace import PROJECT_DIR

# GPT-2 small
BIG = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12,
       "drop_rate": 0.0}
HOURS, HOURS_RANGE, USD, USD_RANGE, MFU, VALIDATION, SOURCE = range(2, 9)  # columns


def plan(*arguments: str, runs_dir: Path = PROJECT_DIR / "runs") -> str:
    result = CliRunner().invoke(cli, ["plan", *arguments, "--runs-dir", str(runs_dir)],
                                catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(output: str, *, table: int) -> list[list[str]]:
    """Return the cells of a table of machines, without its two lines of heads."""
    text = output.split("\nmachine ")[table].split("\n\n")[0].split("\nmicrobatch: ")[0]
    return [re.split(r"  +", row.strip()) for row in text.splitlines()[2:]]


def batch_rows(output: str) -> list[list[str]]:
    return rows_of(output, table=1)


def cost_rows(output: str) -> list[list[str]]:
    return rows_of(output, table=2)


def number(cell: str) -> float:
    return float(cell.removeprefix("~").replace(",", ""))


def low_to_high(cell: str) -> tuple[float, float]:
    low, high = map(number, cell.split(" to "))
    return low, high
