"""What is checked, a check's result, and the isolation of the functions that find it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from basics.errors import UserError, describe
from basics.gpu_readings import GpuReading
from run_config import Run

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "skipped"
CHECK_SECONDS = 12.0  # for one check; the disks' and the hub's take a few
T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """A verdict, what was found, and what to do about it."""

    verdict: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """A finding and the name of what was checked."""

    name: str
    verdict: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Subject:
    """A machine, and perhaps a run on it.

    Attributes:
        gpus: those that CUDA_VISIBLE_DEVICES does not hide.
        run: None without a name, or if its configs are wrong: then `config_error` says why.
        num_processes: on this machine; `world_size` counts those of all nodes.
        available_gib: of its RAM, before the load tests began.
        busy: what already uses the GPUs, or trains the run; empty if nothing does.
        is_training: a process on one of the nodes holds the run's lock.
    """

    runs_dir: Path
    datasets_dir: Path
    run_name: str | None = None
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
    is_online: bool = False


def ok(text: str) -> Finding:
    return Finding(OK, text)


def warning(text: str, advice: str) -> Finding:
    return Finding(WARNING, text, advice)


def problem(text: str, advice: str) -> Finding:
    return Finding(PROBLEM, text, advice)


def skipped(text: str) -> Finding:
    return Finding(SKIPPED, text)


def unknown(reason: str, advice: str = "") -> Finding:
    """Return the finding of a check that could not be made: nothing is known to be wrong."""
    return Finding(WARNING, f"could not be checked: {reason}", advice)


def make_checks(functions: Mapping[str, Callable[..., Finding | None]], *arguments: Any,
               seconds: float = CHECK_SECONDS, late: Mapping[str, str] | None = None,
               ) -> list[Check]:
    """Make checks, by their names, one after the other; one that fails or hangs stops no other.

    Args:
        arguments: of each function. It returns None where there is nothing to check.
        late: advice, by the names of those that are a problem if they do not answer.
    """
    checks = []
    for name, function in functions.items():
        no_answer = f"no answer within {seconds:g} s"
        advice = (late or {}).get(name)
        finding = _isolated(function, arguments, seconds, instead=(
            problem(no_answer, advice) if advice else unknown(no_answer)))
        if finding is not None:
            checks.append(Check(name, finding.verdict, finding.text, finding.advice))
    return checks


def _isolated(function: Callable[..., Finding | None], arguments: tuple,
              seconds: float, *, instead: Finding) -> Finding | None:
    def work() -> Finding | None:
        try:
            return function(*arguments)
        except UserError as error:
            return unknown(str(error))
        except Exception as error:  # whatever it is, the other checks go on
            return unknown(describe(error))

    return within(seconds, work, instead=instead)


def within(seconds: float, work: Callable[[], T], *, instead: T) -> T:
    """Return what a function that raises nothing returns, or `instead` if that takes too long.

    A thread that waits for a dead disk or driver cannot be ended: it is left alone.
    """
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else instead
