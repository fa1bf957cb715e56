"""Put deliberate faults into copies of the project, one in each: do the tests notice them?

    uv run python -m tests.support.deliberate_faults [--area AREA ...] [--jobs N]

`tests/deliberate_faults.toml` lists them. Runs of tests are forked from this process, which has
imported what takes long and is not the project's.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
LIST = PROJECT_DIR / "tests" / "deliberate_faults.toml"
PRELOADED = ("torch._dynamo", "torch.distributed.run", "matplotlib.pyplot", "hypothesis", "pytest")
CONFIGURATION = ("tests/trainer/test_against_reference.py::"
                 "test_a_configuration_trains_resumes_and_exports_as_the_reference[{}]")
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--without-smallest")
LIMIT_SECONDS, UNBROKEN_SECONDS = 120.0, 900.0  # of a fault's tests; of all tests without a fault
VERDICTS = {0: "MISSED", 1: "caught", None: "TIMED OUT"}  # pytest's other statuses are no verdict


@dataclass(frozen=True)
class Fault:
    """One line of the product as it is and as it is broken, and the tests that should notice."""

    area: str
    file: str
    line: str
    fault: str
    effect: str
    tests: tuple[str, ...] = ()
    configurations: tuple[int, ...] = ()  # of tests/trainer/test_against_reference.py
    hangs: bool = False  # whether a run beyond the time limit counts as caught

    @property
    def selected(self) -> list[str]:
        return [*self.tests, *map(CONFIGURATION.format, self.configurations)]

    def broken(self) -> str:
        """Return the file's text with the fault. Raises: ValueError if the line is not there."""
        path = PROJECT_DIR / self.file
        text = path.read_text() if path.exists() else ""
        if (count := text.count(self.line)) != 1:
            places = [name for name in tracked() if name.endswith(".py")
                      and self.line in (PROJECT_DIR / name).read_text()]
            raise ValueError(f"{self.area}: {self.line!r} occurs {count} times in {self.file},"
                             f" wanted once; it is in: {', '.join(places) or 'no file'}")
        return text.replace(self.line, self.fault)


def read_faults() -> list[Fault]:
    return [Fault(area=area, **entry) for area, entries in tomllib.loads(LIST.read_text()).items()
            for entry in entries]


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=PROJECT_DIR, text=True).splitlines()
    return [name for name in names if (PROJECT_DIR / name).is_file()]


def run_tests(copy: Path, tests: list[str], limit_seconds: float) -> int | None:
    """Run tests in a process of their own; return pytest's status, None beyond the time limit."""
    until = time.monotonic() + limit_seconds
    if not (pid := os.fork()):
        _run_pytest(copy, tests)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what they have started
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None


def _run_pytest(copy: Path, tests: list[str]) -> None:
    import pytest

    os.setsid()
    os.chdir(copy)
    with copy.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # those of the copy are meant
    sys.path[:] = [place for place in sys.path if place and Path(place).resolve() != PROJECT_DIR]
    os._exit(pytest.main([*tests, *OPTIONS, f"--basetemp={copy}.tmp"]))


def try_fault(fault: Fault, unbroken: Path) -> tuple[str, str]:
    """Return the verdict on a fault, and a line that describes it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        shutil.copytree(unbroken, copy)
        (copy / fault.file).write_text(fault.broken())
        status = run_tests(copy, ["-x", *fault.selected], LIMIT_SECONDS)
        log = copy.with_suffix(".log").read_text()
    verdict = "caught" if status is None and fault.hangs else VERDICTS.get(status, "NOT TESTED")
    line = (f"{verdict:9} {fault.area}: {fault.file}: {fault.effect}"
            f" ({time.monotonic() - began:.1f} s)")
    return verdict, line if verdict != "NOT TESTED" else f"{line}\n{log[-2000:]}"


def main() -> None:
    faults, began = read_faults(), time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", nargs="+", choices=sorted({fault.area for fault in faults}))
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    options, verdicts = parser.parse_args(), []
    faults = [fault for fault in faults if options.area is None or fault.area in options.area]
    for fault in faults:
        fault.broken()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries would report leaks
    with tempfile.TemporaryDirectory() as place:
        unbroken = Path(place, "unbroken")
        for name in tracked():
            (unbroken / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT_DIR / name, unbroken / name)
        tests = sorted({test for fault in faults for test in fault.selected})
        if (status := run_tests(unbroken, tests, UNBROKEN_SECONDS)) != 0:
            sys.exit(f"without a fault the tests end with status {status}:\n"
                     + unbroken.with_suffix(".log").read_text()[-5000:])
        print(f"without a fault all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        with get_context("fork").Pool(options.jobs) as pool:
            for verdict, line in pool.imap(partial(try_fault, unbroken=unbroken), faults):
                verdicts.append(verdict)
                print(line, flush=True)
    print(f"{verdicts.count('caught')} of {len(faults)} faults caught,"
          f" {time.monotonic() - began:.0f} s")
    sys.exit(set(verdicts) != {"caught"})


if __name__ == "__main__":
    main()
