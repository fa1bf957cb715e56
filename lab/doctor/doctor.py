"""`lab doctor`: check whether this machine, or each node of a launch, is fit to train."""

import os
import shutil
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from basics.cli import DATASETS_DIR, RUNS_DIR, print_json
from basics.errors import FAILED, UserError, visible
from basics.gpu_readings import nvml_failure, read_gpus
from basics.machine import available_ram_gib, within
from basics.text import counted
from lab.doctor import machine_checks
from lab.doctor.load_tests import check_load, load_tests
from lab.doctor.machine_checks import OK, PROBLEM, WARNING, Checks, Subject
from lab.doctor.run_checks import RUN_CHECKS
from lab.table import Column, Table
from processes.run_lock import trained_by
from run_config import RUN_NAME, load_run
from tokens.batch_plan import divided

COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
MIN_WIDTH = 30  # characters of what was found
WIDEST = 100  # characters of a line of the report
ANSWER_SECONDS = 8.0  # for the driver and a run's files; a network disk may never answer


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1, max=600),
    default=40.0,
    show_default=True,
    metavar="SECONDS",
    help="For the tests that load the GPUs and exchange data between them.",
)
@DATASETS_DIR
@RUNS_DIR
def command(as_json: bool, **about: Any) -> None:
    """Check whether this machine is fit to train, and to train RUN if one is named.

    Looks at GPUs, driver, PyTorch, compiler, disks, memory, and at the run's configs, dataset and
    sizes; loads each GPU for a moment and adds up numbers over all of them. Beside a training it
    leaves these tests out. Exit status 1 if training would fail, 0 otherwise. On several machines:
    torchrun ... -m lab doctor RUN, as the training is started; each one prints its own report.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of its node, which it examines
    spans_nodes = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    subject = Subject(**about)
    found: Checks = {}
    if is_first:
        subject, found = examine(subject)
    if spans_nodes:
        from lab.doctor.load_process import check_nodes

        found |= check_nodes(bool(subject.busy), subject.time_limit)
    is_fit = PROBLEM not in [each.verdict for each in found.values()]
    if is_first and as_json:
        checks = [{"name": name} | each._asdict() for name, each in found.items()]
        print_json(
            {
                "schema": "doctor/1",
                "run": subject.run_name,
                "is_fit": is_fit,
                "reports": [{"title": socket.gethostname(), "checks": checks}],
            }
        )
    elif is_first:
        print_checks(found, subject.run_name)
    status = FAILED if is_first and not is_fit else 0
    if spans_nodes:  # to destroy the process group could wait for a process that hangs
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def examine(subject: Subject) -> tuple[Subject, Checks]:
    """Make all checks of this machine. Raises: UserError: there is no such run."""
    subject, found = with_run(with_machine(subject))
    functions = machine_checks.CHECKS | (RUN_CHECKS if subject.run else {})
    found |= machine_checks.make_checks(functions, subject)
    processes = load_tests(subject)
    gpus = machine_checks.compare_gpus(subject, processes[0].found("PyTorch") or {})
    return subject, {"GPUs": gpus} | check_load(processes) | found


def with_machine(subject: Subject) -> Subject:
    """Read the GPUs and the memory that there is."""
    every = []
    gpus = []
    failure = machine_checks.NO_ANSWER
    with suppress(TimeoutError):
        every = within(ANSWER_SECONDS, read_gpus)
        gpus = within(
            ANSWER_SECONDS,
            lambda: machine_checks.visible_gpus(every, os.environ.get("CUDA_VISIBLE_DEVICES")),
        )
        failure = nvml_failure()
    number = int(os.environ.get("LOCAL_WORLD_SIZE", max(1, len(gpus))))
    return replace(
        subject,
        all_gpus=tuple(every),
        gpus=tuple(gpus),
        nvml_failure=failure,
        num_processes=number,
        world_size=int(os.environ.get("WORLD_SIZE", number)),
        available_gib=available_ram_gib(),
        busy=machine_checks.in_use(gpus),
    )


def with_run(subject: Subject) -> tuple[Subject, Checks]:
    """Read the run if one is named, or find what is wrong with it.

    Raises: UserError: there is no such run.
    """
    runs_dir = subject.runs_dir
    name = subject.run_name
    if name is None:
        return subject, {}
    try:
        if pid := within(ANSWER_SECONDS, lambda: trained_by(runs_dir / name)):
            subject = replace(
                subject, is_training=True, busy=f"{name} is being trained by process {pid}"
            )
        run = within(ANSWER_SECONDS, lambda: load_run(runs_dir, name))
    except UserError as error:
        if not RUN_NAME.fullmatch(name) or not (runs_dir / name).is_dir():
            raise
        return subject, {"configs": machine_checks.refused(error)}
    except OSError as error:  # a TimeoutError too
        why = error.strerror or f"no answer within {ANSWER_SECONDS:g} s"
        found = machine_checks.problem(f"{error.filename or runs_dir}: {why}", "check the disk")
        return subject, {"configs": found}
    with suppress(UserError):  # the check of the batch says it
        run = divided(run, world_size=subject.world_size)
    return replace(subject, run=run), {}


def print_checks(found: Checks, run_name: str | None) -> None:
    """Print what was found and what to do about it, then what follows from all of it."""
    columns = [Column("", "left"), Column("check", "left"), Column("found", "left", MIN_WIDTH)]
    rows = [
        [each.verdict, name, "\n-> ".join(filter(None, [each.text, each.advice]))]
        for name, each in found.items()
    ]
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns)
    for line in Table(columns, rows).terminal(width).splitlines():
        verdict = line.partition(" ")[0]
        click.echo(click.style(visible(verdict), fg=COLORS.get(verdict)), nl=False)
        click.echo(visible(line.removeprefix(verdict)))
    verdicts = [each.verdict for each in found.values()]
    fit = "not fit" if PROBLEM in verdicts else "fit"
    what = f"train {run_name}" if run_name else "train"
    problems = counted(verdicts.count(PROBLEM), PROBLEM)
    warnings = counted(verdicts.count(WARNING), WARNING)
    click.echo(click.style(visible(f"{fit} to {what}: {problems}, {warnings}"), bold=True))
