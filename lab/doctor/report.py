"""Print what was found: lines for people, or one JSON document."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from basics.errors import visible
from lab.doctor.check import OK, PROBLEM, SKIPPED, WARNING, Check

COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red", SKIPPED: "bright_black"}
VERDICT_WIDTH = max(map(len, COLORS))
NARROWEST, WIDEST = 60, 120  # columns


@dataclass(frozen=True)
class Report:
    """The checks of one node, or of what the nodes have together."""

    title: str
    checks: list[Check]


def num_of(reports: Sequence[Report], verdict: str) -> int:
    """Return the number of checks with a verdict."""
    return sum(check.verdict == verdict for report in reports for check in report.checks)


def is_fit(reports: Sequence[Report]) -> bool:
    """Return whether training is expected to work."""
    return num_of(reports, PROBLEM) == 0


def print_report(reports: Sequence[Report], run_name: str | None) -> None:
    """Print one line or more for each check, then what follows from all of them."""
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    longest = max(len(check.name) for report in reports for check in report.checks)
    for report in reports:
        if len(reports) > 1:
            click.echo(visible(report.title))
        for check in report.checks:
            head = click.style(check.verdict.ljust(VERDICT_WIDTH), fg=COLORS[check.verdict])
            click.echo(f"{head}{visible(_rest(check, longest, width))}")
        if len(reports) > 1:
            click.echo("")
    head = click.style(_conclusion(reports, run_name), bold=True)
    click.echo(head)


def _rest(check: Check, longest: int, width: int) -> str:
    """Format the columns behind the verdict; a line that does not fit continues below its own."""
    indent = " " * (VERDICT_WIDTH + longest + 4)
    name, lines = f"  {check.name.ljust(longest)}  ", _wrapped(check.text, width - len(indent))
    if check.advice:
        advice = _wrapped(check.advice, width - len(indent) - 3)
        lines += [f"-> {advice[0]}", *(f"   {line}" for line in advice[1:])]
    return name + f"\n{indent}".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _conclusion(reports: Sequence[Report], run_name: str | None) -> str:
    """Say whether the machine is fit. A run's name is a plain one."""
    what = f"to train {run_name}" if run_name else "to train"
    counts = [_counted(num_of(reports, verdict), verdict) for verdict in (PROBLEM, WARNING)]
    return f"{'fit' if is_fit(reports) else 'not fit'} {what}: {', '.join(counts)}"


def _counted(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def as_document(reports: Sequence[Report], run_name: str | None) -> dict[str, Any]:
    """Return the same as one JSON document."""
    return {"schema": "doctor/1", "run": run_name, "is_fit": is_fit(reports),
            "reports": [asdict(report) for report in reports]}
