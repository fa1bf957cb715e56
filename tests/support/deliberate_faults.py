"""Put deliberate faults into a copy of the project, one after the other: do the tests notice each?

    uv run python -m tests.support.deliberate_faults [--area AREA ...] [--jobs N]

`tests/deliberate_faults.toml` lists them. Each run of tests is forked from this process, which has
imported what takes long and is not the project's.
"""

from __future__ import annotations

import argparse
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
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
LIST = PROJECT_DIR / "tests" / "deliberate_faults.toml"
PRELOADED = ("torch._dynamo", "torch.distributed.run", "matplotlib.pyplot", "pydantic", "pytest")
CONFIGURATION = ("tests/trainer/test_against_reference.py::"
                 "test_a_configuration_trains_resumes_and_exports_as_the_reference[{}]")
LIMIT_SECONDS, UNBROKEN_SECONDS = 120.0, 900.0  # of a fault's tests, of all without a fault
VERDICTS = {0: "MISSED", 1: "caught", None: "TIMED OUT"}  # any other status: broken, not caught


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


def start_tests(copy: Path, tests: list[str]) -> ForkProcess:
    """Start pytest in a forked process; its exit status is pytest's."""
    process = get_context("fork").Process(target=_test, args=(copy, tests))
    process.start()
    return process


def _test(copy: Path, tests: list[str]) -> None:
    import pytest

    os.setsid()  # so that all that it starts can be ended
    os.chdir(copy)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # those of the copy are meant
    sys.path[:] = [place for place in sys.path if place and Path(place).resolve() != PROJECT_DIR]
    with log_of(copy).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os._exit(pytest.main([*tests, "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short",
                          "--durations=0", "--without-smallest", f"--basetemp={copy}.tmp"]))


def log_of(copy: Path) -> Path:
    return copy.with_suffix(".log")


def end(process: ForkProcess) -> int | None:
    """End a run of tests and all that it has started; return its status, None if it still ran."""
    status = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return status


def copy_project(copy: Path) -> None:
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT_DIR / name, copy / name)


def try_faults(faults: list[Fault], copies: list[Path]) -> list[str]:
    """Run the tests of each fault in one of the copies; return the verdicts."""
    waiting, verdicts = list(reversed(faults)), []
    running: dict[Path, tuple[Fault, ForkProcess, float]] = {}
    while waiting or running:
        for copy in [copy for copy in copies if copy not in running and waiting]:
            fault = waiting.pop()
            (copy / fault.file).write_text(fault.broken())
            running[copy] = fault, start_tests(copy, fault.selected), time.monotonic()
        time.sleep(0.05)
        for copy, (fault, process, began) in list(running.items()):
            seconds = time.monotonic() - began
            if process.is_alive() and seconds < LIMIT_SECONDS:
                continue
            status = end(process)
            verdict = VERDICTS.get(status, f"BROKEN ({log_of(copy).read_text()[-2000:]})")
            verdicts.append("caught" if status is None and fault.hangs else verdict)
            print(f"{verdicts[-1]:9} {fault.area}: {fault.file}: {fault.effect}"
                  f" ({seconds:.1f} s)", flush=True)
            shutil.copy2(PROJECT_DIR / fault.file, copy / fault.file)
            del running[copy]
    return verdicts


def main() -> None:
    faults = read_faults()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", nargs="+", default=[], choices=sorted({f.area for f in faults}))
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    options, began = parser.parse_args(), time.monotonic()
    faults = [fault for fault in faults if not options.area or fault.area in options.area]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryDirectory() as place:
        copies = [Path(place, str(number)) for number in range(options.jobs)]
        copy_project(copies[0])
        for fault in faults:
            fault.broken()
        tests = start_tests(copies[0], sorted({test for f in faults for test in f.selected}))
        tests.join(UNBROKEN_SECONDS)
        if (status := end(tests)) != 0:
            sys.exit(f"without a fault the tests end with {status}:\n"
                     + log_of(copies[0]).read_text()[-5000:])
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # nothing compiled from a fault is kept
        sys.dont_write_bytecode = True
        print(f"without a fault all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        verdicts = try_faults(faults, copies)
    print(f"{verdicts.count('caught')} of {len(verdicts)} faults caught,"
          f" {time.monotonic() - began:.0f} s")
    sys.exit(set(verdicts) != {"caught"})


if __name__ == "__main__":
    main()
