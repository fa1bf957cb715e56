"""`lab doctor`: check whether this machine, or each node of a launch, is fit to train."""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from basics.cli import print_json
from basics.errors import FAILED, UserError
from basics.gpu_readings import GpuReading, nvml_failure, read_gpus
from basics.machine import available_ram_gib, within
from lab.doctor import machine_checks, run_checks
from lab.doctor.check import (
    PROBLEM,
    Checks,
    Subject,
    as_document,
    make_checks,
    num_of,
    print_checks,
)
from lab.doctor.load_tests import check_load, load_tests
from processes.run_lock import trained_by
from run_config import RUN_NAME, Run, load_run

DRIVER_SECONDS = 8.0  # it needs milliseconds; one in trouble may never answer
RUN_SECONDS = 8.0  # to read a run's files; a network disk may never answer


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--online", "is_online", is_flag=True,
              help="Ask the Hugging Face hub for an answer and for what its token may do, also"
                   " where the run needs no download.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@click.option("--time-limit", type=click.FloatRange(min=1, max=600), default=40.0,
              show_default=True, metavar="SECONDS",
              help="For the tests that load the GPUs and exchange data between them.")
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(as_json: bool, **about: Any) -> None:
    """Check whether this machine is fit to train, and to train RUN if one is named.

    Looks at GPUs, driver, PyTorch, disks, memory, limits, and at the run's configs, dataset and
    sizes; loads each GPU for a moment and adds up numbers over all of them. Beside a training it
    leaves these tests out. Exit status 1 if training would fail, 0 otherwise. On several machines:
    torchrun ... -m lab doctor RUN, as the training is started; each one prints its own report.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of its node, which it examines
    spans_nodes = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    subject, checks = examine(Subject(**about)) if is_first else (Subject(**about), {})
    if spans_nodes:
        from lab.doctor.nodes import check_nodes

        checks |= check_nodes(subject.run, bool(subject.busy), subject.time_limit)
    if is_first and as_json:
        print_json(as_document(checks, subject.run_name))
    elif is_first:
        print_checks(checks, subject.run_name)
    status = FAILED if is_first and num_of(checks, PROBLEM) else 0
    if spans_nodes:  # to destroy the process group could wait for a process that hangs
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def found_here(subject: Subject) -> Subject:
    """Find out what is to be checked. Raises: UserError: there is no such run."""
    run, config_error, pid = None, "", None
    if subject.run_name is not None:
        try:
            run, config_error, pid = within(
                RUN_SECONDS, partial(_find_run, subject.runs_dir, subject.run_name))
        except OSError as error:
            why = error.strerror or f"no answer within {RUN_SECONDS:g} s"
            config_error = f"{error.filename or subject.runs_dir}: {why}; check the disk"

    def read() -> tuple[list[GpuReading], list[GpuReading], str | None]:
        every = read_gpus()
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        return every, machine_checks.visible_gpus(every, hidden), nvml_failure()

    try:
        every, gpus, failure = within(DRIVER_SECONDS, read)
    except TimeoutError:
        every, gpus, failure = [], [], machine_checks.NO_ANSWER
    busy = [f"{subject.run_name} is being trained by process {pid}" if pid else "",
            machine_checks.in_use(gpus)]
    number = int(os.environ.get("LOCAL_WORLD_SIZE", max(1, len(gpus))))
    return replace(
        subject, run=run, config_error=config_error, all_gpus=tuple(every), gpus=tuple(gpus),
        nvml_failure=failure, num_processes=number, available_gib=available_ram_gib(),
        world_size=int(os.environ.get("WORLD_SIZE", number)), busy="; ".join(filter(None, busy)),
        is_training=pid is not None)


def _find_run(runs_dir: Path, name: str) -> tuple[Run | None, str, int | None]:
    """Return a run, or what is wrong with its configs, and the process that trains it.

    Raises:
        UserError: there is no such run.
        OSError: the disk cannot be read.
    """
    try:
        return load_run(runs_dir, name), "", trained_by(runs_dir / name)
    except UserError as error:
        if not RUN_NAME.fullmatch(name) or not (runs_dir / name).is_dir():
            raise
        return None, str(error), trained_by(runs_dir / name)


def examine(subject: Subject) -> tuple[Subject, Checks]:
    """Find out what is to be checked, and make all checks of this machine."""
    subject = found_here(subject)
    with load_tests(subject) as results:
        others = machine_checks.check_limits(subject) | make_checks(
            machine_checks.CHECKS | run_checks.CHECKS
            | (run_checks.OF_RUN if subject.run else {}), subject)
        load = results()
    facts = load.found["PyTorch"].get(0, {})
    return subject, {
        "GPUs": machine_checks.check_gpus(subject, facts)} | machine_checks.check_readings(
        subject, facts) | check_load(load) | others
