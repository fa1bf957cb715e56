"""All checks, in one process or on the nodes that torchrun has started, and their reports."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basics.errors import UserError
from basics.gpu_readings import nvml_failure, read_gpus
from basics.machine import available_ram_gib, num_cpu_cores
from lab.doctor import gpu_checks, host_checks, load_tests, network_checks, run_checks
from lab.doctor.check import Check, Subject, make_checks, within
from lab.doctor.gpu_checks import NO_ANSWER
from lab.doctor.load_result import Result
from lab.doctor.report import Report
from processes.run_lock import trained_by
from run_config import RUN_NAME, Run, load_run

DRIVER_SECONDS = 8.0  # it needs milliseconds; one in trouble may never answer
RUN_SECONDS = 8.0  # to read a run's files; a network disk may never answer


@dataclass(frozen=True)
class Request:
    """The command line's argument and options.

    Attributes:
        time_limit: seconds for the load tests.
    """

    run: str | None
    runs_dir: Path
    datasets_dir: Path
    is_online: bool
    as_json: bool
    time_limit: float


def subject_of(request: Request, environment: Mapping[str, str]) -> Subject:
    """Find out what is to be checked.

    Raises:
        UserError: there is no such run.
    """
    found = within(RUN_SECONDS, lambda: _find_run(request), instead=_Found(config_error=(
        f"{request.runs_dir}: no answer within {RUN_SECONDS:g} s; check the disk, or name another"
        " place with --runs-dir")))
    if found.refusal is not None:
        raise found.refusal
    pid = found.pid
    every, failure = within(DRIVER_SECONDS, lambda: (read_gpus(), nvml_failure()),
                            instead=([], NO_ANSWER))
    gpus = gpu_checks.visible_gpus(every, environment.get("CUDA_VISIBLE_DEVICES"))
    used = gpu_checks.in_use(gpus)
    reasons = [f"{request.run} is being trained by process {pid}" if pid else "",
               f"in use: {used}" if used else ""]
    num_processes = int(environment.get("LOCAL_WORLD_SIZE", max(1, len(gpus))))
    return Subject(
        request.runs_dir, request.datasets_dir, request.run, found.run, found.config_error,
        tuple(every), tuple(gpus), failure, num_processes,
        int(environment.get("WORLD_SIZE", num_processes)), available_ram_gib(),
        busy="; ".join(filter(None, reasons)), is_training=pid is not None,
        is_online=request.is_online)


@dataclass(frozen=True)
class _Found:
    """What the disk has of a run; `refusal` is the error if there is no such run."""

    run: Run | None = None
    config_error: str = ""
    refusal: UserError | None = None
    pid: int | None = None


def _find_run(request: Request) -> _Found:
    """Read a run. Raises nothing, but may wait for a disk without end."""
    if request.run is None:
        return _Found()
    try:
        run_dir = request.runs_dir / request.run
        try:
            return _Found(load_run(request.runs_dir, request.run), pid=trained_by(run_dir))
        except UserError as wrong:
            if not RUN_NAME.fullmatch(request.run) or not run_dir.is_dir():
                return _Found(refusal=wrong)
            return _Found(config_error=str(wrong), pid=trained_by(run_dir))
    except OSError as error:
        return _Found(config_error=f"{error.filename or request.runs_dir}: {error.strerror}; check"
                                   " the disk")


def examine_here(request: Request) -> list[Report]:
    """Make all checks in this process, and the load tests in processes of their own."""
    subject = subject_of(request, os.environ)
    with load_tests.load_tests(subject, _launch(subject), seconds=request.time_limit) as tests:
        others = other_checks(subject)
        results = tests.results()
    return [Report(socket.gethostname(), [
        *checks_of_gpus(subject, results), *make_checks(load_tests.CHECKS, results),
        *make_checks(load_tests.SHARED_CHECKS, results), *others])]


def _launch(subject: Subject) -> dict[str, Any]:
    """Return one process for each GPU; two on a CPU; one that only reports if others are busy."""
    number = len(subject.gpus) or min(2, num_cpu_cores())
    number = 1 if subject.busy else number
    return {"world_size": number, "name": "", "ranks": [(rank, rank) for rank in range(number)]}


def other_checks(subject: Subject) -> list[Check]:
    """Make the checks that load nothing but a disk, while the load tests run."""
    return [check for module in (host_checks, network_checks, run_checks)
            for check in make_checks(module.CHECKS, subject, late=host_checks.LATE)]


def checks_of_gpus(subject: Subject, results: Sequence[Result]) -> list[Check]:
    """Make the checks of this machine's GPUs, and of what PyTorch makes of them."""
    return make_checks(gpu_checks.CHECKS, subject, results[0].found.get("torch", {}))
