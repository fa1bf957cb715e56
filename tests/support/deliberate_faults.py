"""Put each fault of `tests/deliberate_faults.toml` into a copy of the project: do tests notice it?

    uv run python -m tests.support.deliberate_faults [--area AREA ...] [--jobs N] [--results FILE]

With `--results` a command that was interrupted goes on where it was, as long as the code is the
same. Runs of tests are forked from this process, which has imported what takes long to import.
"""

import argparse
import ast
import atexit
import gc
import hashlib
import importlib
import json
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
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[2]
PRELOADED = ("torch._dynamo", "torch.distributed.run", "matplotlib.pyplot", "hypothesis", "pytest")
CONFIGURATION = (
    "tests/test_reference.py::test_a_configuration_trains_and_resumes_as_the_reference[{}]"
)
OPTIONS = (
    *("-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"),
    "--hypothesis-profile=without shrinking",
)
UNBROKEN = "without a fault"  # among verdicts: all tests pass
LIMIT_SECONDS, UNBROKEN_SECONDS = 180.0, 900.0  # of a fault's tests; of all tests without a fault


@dataclass(frozen=True)
class Fault:
    """A piece of the product as it is and as it is broken, and the tests that should notice.

    Both are written as `ast.unparse` writes them, so layout and comments do not matter.
    """

    area: str
    file: str
    code: str
    fault: str
    effect: str
    function: str = ""  # with its class: Watchdog.stop
    tests: tuple[str, ...] = ()
    configurations: tuple[int, ...] = ()  # of tests/test_reference.py
    hangs: bool = False  # whether a run beyond the time limit counts as caught

    @property
    def key(self) -> str:
        return f"{self.file} {self.function}: {self.code} -> {self.fault}"

    @property
    def selected(self) -> list[str]:
        return [*self.tests, *map(CONFIGURATION.format, self.configurations)]

    def broken(self) -> ast.Module:
        """Return the file with the fault. Raises: ValueError: the code is not there once."""
        tree = ast.parse(project_files().get(self.file, b""))
        place: ast.AST = tree
        for name in filter(None, self.function.split(".")):
            found = [node for node in definitions_in(place) if node.name == name]
            if len(found) != 1:
                raise ValueError(f"{self.area}: {self.file} has {len(found)} times {self.function}")
            place = found[0]
        text = ast.unparse(place)
        if (count := text.count(self.code)) != 1:
            places = [
                name
                for name, content in project_files().items()
                if name.endswith(".py") and self.code in ast.unparse(ast.parse(content))
            ]
            raise ValueError(
                f"{self.area}: {self.code!r} is {count} times in {self.file}"
                f" {self.function}, wanted once; it is in:"
                f" {', '.join(places) or 'no file'}"
            )
        broken = ast.parse(text.replace(self.code, self.fault))
        if self.function:
            vars(place).update(vars(broken.body[0]))
            broken = tree
        return broken


def definitions_in(place: ast.AST) -> list[ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes in a place, but not those in them."""
    found, pending = [], [*ast.iter_child_nodes(place)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node)
        else:
            pending += ast.iter_child_nodes(node)
    return found


@cache
def project_files() -> dict[str, bytes]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=PROJECT_DIR, text=True).splitlines()
    return {
        name: (PROJECT_DIR / name).read_bytes() for name in names if (PROJECT_DIR / name).is_file()
    }


def read_faults() -> list[Fault]:
    by_area = tomllib.loads((PROJECT_DIR / "tests/deliberate_faults.toml").read_text())
    return [Fault(area=area, **entry) for area, entries in by_area.items() for entry in entries]


@cache
def code_digest() -> str:
    """Return a digest of all files except documents: a verdict is one of the code."""
    digest = hashlib.sha256()
    for name, content in sorted(project_files().items()):
        if not name.endswith(".md"):
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def read_verdicts(path: Path) -> dict[str, bool]:
    """Return which faults were caught in this code, by their keys; also `UNBROKEN`."""
    verdicts = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a kill cuts a line
            record = json.loads(line)
            if record["code"] == code_digest():
                verdicts[record["fault"]] = record["caught"]
    return verdicts


def append_verdict(path: Path | None, fault: str, *, is_caught: bool) -> None:
    if path:
        with path.open("a") as file:
            line = {"code": code_digest(), "fault": fault, "caught": is_caught}
            file.write("\n" + json.dumps(line))  # first, as the line before it may be cut


def run_tests(copy: Path, tests: list[str], limit_seconds: float) -> tuple[int | None, str]:
    """Return pytest's status, None beyond the time limit, and the end of what it has printed."""
    until, log = time.monotonic() + limit_seconds, copy.with_suffix(".log")
    if not (pid := os.fork()):
        os.setsid()
        os.chdir(copy)
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]  # those of the copy are meant
        sys.path[:] = [place for place in sys.path if Path(place).resolve() != PROJECT_DIR]
        pytest = importlib.import_module("pytest")
        os._exit(pytest.main([*tests, *OPTIONS, f"--basetemp={copy}.tmp"]))
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what they have started
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None, log.read_text()[-4000:]


def try_fault(fault: Fault, unbroken: Path) -> tuple[bool, str]:
    """Return whether a fault is caught, and a line that says so."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        copy = shutil.copytree(unbroken, Path(place, "copy"))
        (copy / fault.file).write_text(ast.unparse(fault.broken()))
        status, log = run_tests(copy, ["-x", *fault.selected], LIMIT_SECONDS)
    is_caught = status == 1 or (status is None and fault.hangs)
    verdict = "caught" if is_caught else {0: "MISSED", None: "TIMED OUT"}.get(status, log)
    return is_caught, (
        f"{verdict:9} {fault.area}: {fault.file}: {fault.effect} ({time.monotonic() - began:.1f} s)"
    )


def main() -> None:
    faults, began = read_faults(), time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--area", nargs="+", choices=sorted({fault.area for fault in faults}))
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at once")
    parser.add_argument("--results", type=Path, help="file that keeps the verdicts of this code")
    options = parser.parse_args()
    faults = [fault for fault in faults if options.area is None or fault.area in options.area]
    verdicts = read_verdicts(options.results) if options.results else {}
    pending = [fault for fault in faults if fault.key not in verdicts]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries would report leaks
    with tempfile.TemporaryDirectory() as place:
        unbroken = Path(place, "unbroken")
        for name, content in project_files().items():
            (unbroken / name).parent.mkdir(parents=True, exist_ok=True)
            (unbroken / name).write_bytes(content)
        if UNBROKEN not in verdicts:
            status, log = run_tests(
                unbroken,
                sorted({test for fault in faults for test in fault.selected}),
                UNBROKEN_SECONDS,
            )
            if status != 0:
                sys.exit(f"{log}\nwithout a fault these tests end with status {status}")
            print(f"without a fault all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
            if options.area is None:
                append_verdict(options.results, UNBROKEN, is_caught=True)
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        with get_context("fork").Pool(options.jobs) as pool:
            tried = pool.imap(partial(try_fault, unbroken=unbroken), pending)
            for fault, (is_caught, line) in zip(pending, tried, strict=True):
                verdicts[fault.key] = is_caught
                append_verdict(options.results, fault.key, is_caught=is_caught)
                print(line, flush=True)
    num_caught = sum(verdicts[fault.key] for fault in faults)
    print(f"{num_caught} of {len(faults)} faults caught, {time.monotonic() - began:.0f} s")
    sys.exit(num_caught < len(faults))


if __name__ == "__main__":
    main()
