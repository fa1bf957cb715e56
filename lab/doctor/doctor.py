"""`lab doctor`: check whether this machine is fit to train."""

import os
import shutil
import socket
import sys
import textwrap
from pathlib import Path

import click

from basics.cli import DATASETS_DIR, RUNS_DIR, print_json
from basics.errors import FAILED, UserError, visible
from basics.gpu_readings import nvml_failure, read_gpus
from basics.machine import within
from basics.text import counted
from lab.doctor.checks import (
    CHECKS,
    NO_ANSWER,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Subject,
    TorchFacts,
    make_checks,
    read_torch,
    visible_gpus,
)
from processes.run_lock import trained_by
from run_config import load_run, plain_name

COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
WIDEST = 100  # characters of a line of the report


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1, max=600),
    default=40.0,
    show_default=True,
    metavar="SECONDS",
    help="For each check.",
)
@DATASETS_DIR
@RUNS_DIR
def command(
    run_name: str | None, as_json: bool, time_limit: float, datasets_dir: Path, runs_dir: Path
) -> None:
    """Check whether this machine is fit to train, and to train RUN if one is named.

    Looks at driver, GPUs, PyTorch, disk, memory, clock and network, and at the run's memory and
    dataset; adds up numbers over all GPUs under torchrun. Beside a training it leaves that out.
    Exit status 1 if training would fail, 0 otherwise.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            "lab doctor: starts torchrun itself; run it without, on each machine. For the"
            " all-reduce of several machines: torchrun ... -m lab.doctor.all_reduce 60"
        )
    subject = look_at(runs_dir, datasets_dir, run_name, time_limit)
    rows = make_checks(subject)
    is_fit = PROBLEM not in [row.verdict for row in rows]
    if as_json:
        print_json(
            {
                "schema": "doctor/1",
                "run": run_name,
                "is_fit": is_fit,
                "reports": [
                    {"title": socket.gethostname(), "checks": [row._asdict() for row in rows]}
                ],
            }
        )
    else:
        print_rows(rows, run_name)
    sys.exit(0 if is_fit else FAILED)


def look_at(runs_dir: Path, datasets_dir: Path, run_name: str | None, time_limit: float) -> Subject:
    """Read what several checks need. Raises: UserError: there is no such run."""
    run, refusal, pid = None, None, None
    if run_name:
        run_name = plain_name(runs_dir, run_name)
        run_dir = runs_dir / run_name
        try:
            pid = within(time_limit, lambda: trained_by(run_dir))
            run = within(time_limit, lambda: load_run(runs_dir, run_name))
        except UserError as error:
            if not run_dir.is_dir():
                raise
            refusal = error
        except OSError as error:  # a TimeoutError too
            why = error.strerror or f"no answer within {time_limit:g} s"
            refusal = UserError(f"{run_dir}: {why}; look at the disk")
    try:
        failure, gpus = within(time_limit, lambda: (nvml_failure(), read_gpus()))
    except TimeoutError:
        failure, gpus = NO_ANSWER, []
    try:
        torch = within(time_limit, read_torch)
    except TimeoutError:
        torch = TorchFacts(cause=NO_ANSWER)
    visible = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Subject(
        runs_dir,
        datasets_dir,
        run_name,
        time_limit,
        run,
        refusal,
        failure,
        tuple(gpus),
        tuple(visible),
        torch,
        pid,
    )


def print_rows(rows: list[Finding], run_name: str | None) -> None:
    """Print what was found and what to do about it, then what follows from all of it."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns)
    names = max(len(check.name) for check in CHECKS)
    indent = " " * (len(PROBLEM) + 2 + names + 2)
    for row in rows:
        texts = [row.text, f"-> {row.advice}" if row.advice else ""]
        lines = [
            line
            for text in texts
            for line in textwrap.wrap(visible(text), width - len(indent), break_on_hyphens=False)
        ]
        verdict = row.verdict.ljust(len(PROBLEM))
        click.echo(click.style(visible(verdict), fg=COLORS[row.verdict]), nl=False)
        click.echo(visible(f"  {row.name:{names}}  " + f"\n{indent}".join(lines)))
    verdicts = [row.verdict for row in rows]
    fit = "not fit" if PROBLEM in verdicts else "fit"
    what = f"train {run_name}" if run_name else "train"
    problems = counted(verdicts.count(PROBLEM), PROBLEM)
    warnings = counted(verdicts.count(WARNING), WARNING)
    click.echo(click.style(visible(f"{fit} to {what}: {problems}, {warnings}"), bold=True))
