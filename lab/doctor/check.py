"""What a check is about and what it finds, checks that stop no other, and their report."""

import shutil
import socket
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from basics.errors import describe, visible
from basics.gpu_readings import GpuReading
from basics.machine import within
from run_config import Run

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "skipped"
COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red", SKIPPED: "bright_black"}
NARROWEST, WIDEST = 60, 120  # columns of a report
OTHER_PLACE = {f"disk of {name}": f"name another place with --{name}-dir"
               for name in ("runs", "datasets")}
OTHER_MACHINE = "restart the machine, or take another one"
INSTALL_TORCH = "install a PyTorch that is built for this GPU: https://pytorch.org"
CHECK_SECONDS = 12.0  # for one check; the disks' and the hub's take a few


class Finding(NamedTuple):
    """A verdict, what was found, and what to do about it."""

    verdict: str
    text: str
    advice: str = ""


ok, warning, problem = (partial(Finding, verdict) for verdict in (OK, WARNING, PROBLEM))
Checks = dict[str, Finding]  # by the name of what was checked


@dataclass(frozen=True)
class Subject:
    """A machine, and perhaps a run on it.

    Attributes:
        time_limit: seconds for the load tests.
        gpus: those that CUDA_VISIBLE_DEVICES does not hide.
        run: None without a name, or if its configs are wrong: then `config_error` says why.
        num_processes: on this machine; `world_size` counts those of all nodes.
        available_gib: of its RAM, before the load tests began.
        busy: what uses the GPUs, or trains the run; empty if nothing does.
        is_training: a process of this machine holds the run's lock.
    """

    runs_dir: Path
    datasets_dir: Path
    run_name: str | None = None
    is_online: bool = False
    time_limit: float = 40.0
    run: Run | None = None
    config_error: str = ""
    all_gpus: tuple[GpuReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()
    nvml_failure: str | None = None
    num_processes: int = 1
    world_size: int = 1
    available_gib: float = 0.0
    busy: str = ""
    is_training: bool = False


def warn_unless(is_fine: bool, text: str, advice: str) -> Finding:
    """Return an ok, or else a warning with advice."""
    return ok(text) if is_fine else warning(text, advice)


def unknown(reason: str, advice: str = "") -> Finding:
    """Return the finding of a check that could not be made: nothing is known to be wrong."""
    return warning(f"could not be checked: {reason}", advice)


def split_error(error: object, *advice: str) -> tuple[str, str]:
    """Return what is wrong and what to do: behind a semicolon of the error, else the first one."""
    text, _, remedy = str(error).partition("; ")
    return text, remedy or advice[0]


def make_checks(functions: Mapping[str, Callable[[Subject], Finding | None]], subject: Subject,
                seconds: float = CHECK_SECONDS) -> Checks:
    """Make checks one after the other; one that fails or hangs stops no other.

    A function returns None where there is nothing to check. A disk that does not answer is a
    problem.
    """
    checks = {}
    for name, function in functions.items():
        try:
            found = within(seconds, partial(function, subject))
        except TimeoutError:
            text = f"no answer within {seconds:g} s"
            found = problem(text, OTHER_PLACE[name]) if name in OTHER_PLACE else unknown(text)
        except Exception as error:  # whatever it is, the other checks go on
            found = unknown(describe(error))
        if found is not None:
            checks[name] = found
    return checks


def numbers(indices: Sequence[int]) -> str:
    """Name GPUs by their numbers: "GPU 3", "GPUs 0 and 2"."""
    *others, last = map(str, indices)
    return f"GPUs {', '.join(others)} and {last}" if others else f"GPU {last}"


def num_processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def num_of(checks: Checks, verdict: str) -> int:
    """Return the number of checks with a verdict; training would fail if one is a problem."""
    return [found.verdict for found in checks.values()].count(verdict)


def print_checks(checks: Checks, run_name: str | None) -> None:
    """Print one line or more for each check, then what follows from all of them."""
    longest = max(map(len, checks))
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    for name, found in checks.items():
        verdict, rest = f"{found.verdict:<7}", f"  {name:<{longest}}  "
        indent = " " * len(verdict + rest)
        lines = textwrap.wrap(found.text, width, break_on_hyphens=False, initial_indent=indent,
                              subsequent_indent=indent)
        lines += textwrap.wrap(found.advice, width, break_on_hyphens=False,
                               initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
        head = click.style(verdict, fg=COLORS[found.verdict])
        text = "\n".join(lines).lstrip()
        click.echo(f"{head}{visible(rest + text)}")
    counts = {verdict: num_of(checks, verdict) for verdict in (PROBLEM, WARNING)}
    head = click.style(
        f"{'not fit' if counts[PROBLEM] else 'fit'} to train{f' {run_name}' if run_name else ''}: "
        + ", ".join(f"{number or 'no'} {word}{'' if number == 1 else 's'}"
                    for word, number in counts.items()), bold=True)
    click.echo(head)


def as_document(checks: Checks, run_name: str | None) -> dict[str, Any]:
    """Return the same as one JSON document."""
    return {"schema": "doctor/1", "run": run_name, "is_fit": not num_of(checks, PROBLEM),
            "reports": [{"title": socket.gethostname(), "checks": [
                {"name": name} | found._asdict() for name, found in checks.items()]}]}
