"""Runs with a fault or of a single process, and what they leave, for the tests of whole runs."""

import gc
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.run
from filelock import FileLock

from basics import entry_points
from basics.checkpoint_files import directory_of
from basics.failpoints import VARIABLE
from processes import command_line, run_lock, startup_agreement
from processes.signals import DEADLINES
from processes.watchdog import Watchdog
from reporting.metrics_file import METRICS
from tests.support.workplace import PROJECT_DIR, Workplace, read_lines, succeeded

# Every 5 steps a validation and a checkpoint; 12 steps on two processes.
# Longer than writes to a busy disk take; tests of hangs have their own.
SETTINGS = {"hang_timeout_seconds": 30.0, "collective_timeout_seconds": 30.0}
# So many seconds a step; the last one leaves time for a stop to be heard of.
SLOW_AT_THE_END = "train:slow:seconds={};train:slow:hit=11:seconds=6"
OF_MACHINE = {"mfu", *(key for key, name in METRICS.items() if name.startswith("machine/"))}
TIMED = {
    "seconds",
    "usd",
    "seconds_left",
    "usd_at_end",
    "tokens_per_second",
    "validation_seconds",
    "slowest_step",
    "slowest_step_seconds",
    *OF_MACHINE,
}


def with_fault(workplace: Workplace, fault: str, *arguments: str) -> CompletedProcess[str]:
    return workplace.torchrun(2, "tiny", *arguments, **{VARIABLE: fault})


def with_deadlines(**seconds: float) -> dict[str, str]:
    """Return the environment that changes the watchdog's deadlines."""
    return {DEADLINES: json.dumps(seconds)}


def train_undisturbed(root: Path, settings: dict[str, object]) -> Path:
    workplace = Workplace(root)
    workplace.add_dataset()
    run_dir = workplace.add_run(train=settings)
    succeeded(workplace.torchrun(2, "tiny"))
    return run_dir


def last_line_of_ours(result: CompletedProcess[str]) -> str:
    """Return the last error line of the trainer; torchrun prints others."""
    return next(
        (line for line in reversed(result.stderr.splitlines()) if line.startswith("Error: ")), ""
    )


def tried(output: str) -> dict[int, bool]:
    """Read the table of a search for a microbatch: whether each size fitted."""
    rows = re.findall(r"^ +([\d,]+) +(\d|out of memory)", output, re.MULTILINE)
    return {int(size.replace(",", "")): result != "out of memory" for size, result in rows}


def weights_of(run_dir: Path) -> str:
    path = directory_of(run_dir / "checkpoints/latest") / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metrics_of(run_dir: Path) -> list[dict]:
    return [
        {key: value for key, value in record.items() if key not in TIMED}
        for record in read_lines(run_dir / "metrics.jsonl")
    ]


def validations_of(run_dir: Path) -> list[dict]:
    return [record for record in metrics_of(run_dir) if "validation_loss" in record]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def wait_until(holds: Callable[[], object], *, seconds: float = 400) -> None:
    """Wait until something holds; fail if it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    wait_until(path.exists)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until processes have ended; what is their parent need not have noticed."""
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), seconds=120)


def struck_by(marks: Path) -> int:
    """Wait until a failpoint has made its fault; return the process id in its mark."""
    wait_until(lambda: marks.exists() and marks.read_text().endswith("\n"))
    return int(marks.read_text().split()[3])


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Let nobody write to a directory, not even root if it may mount."""
    is_root = os.geteuid() == 0
    if is_root:
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", directory], check=True)
    else:
        directory.chmod(0o555)
    try:
        yield
    finally:
        if is_root:
            subprocess.run(["umount", directory], check=True)
        else:
            directory.chmod(0o755)


LONGEST_ERROR = 900  # characters, "Error: " included; a cause has at most 500


class Exited(BaseException):
    """Raised by os._exit."""


def run_in_process(*arguments: str, under_torchrun: bool = False) -> CompletedProcess[str]:
    """Run ddp_train.py here, alone or as the only rank under torchrun, up to the first step."""
    stdout, stderr = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    with (
        mock.patch.dict(os.environ),  # a launch tells its processes what it has spent
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        patch.setattr(sys, "argv", ["ddp_train.py", *arguments])
        patch.setattr(os, "_exit", _raise_exited)
        patch.setattr(torch.distributed.run, "run", _refuse_to_train)
        for name, instead in (
            ("start", lambda watchdog: watchdog),  # without thread and signals
            ("stop", lambda watchdog: watchdog._peers.close()),
            ("fail", lambda watchdog, error: watchdog._peers.close()),
            ("expect_steps", _refuse_to_train),
        ):
            patch.setattr(Watchdog, name, instead)
        patch.setattr(command_line, "end_with_torchrun", lambda: None)
        patch.setattr(entry_points, "keep_freed_memory", lambda: None)
        if under_torchrun:
            store = dist.HashStore()
            patch.setattr(startup_agreement, "open_torchrun_store", lambda: store)
            for name, value in {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            }.items():
                patch.setenv(name, value)
        try:
            runpy.run_path(str(PROJECT_DIR / "ddp_train.py"), run_name="__main__")
            status = 0
        except SystemExit as error:
            status = error.code
        except Exited as error:
            status = error.args[0]
        finally:
            run_lock.release_run()
            signal.signal(signal.SIGINT, handler)
            gc.enable()
    return CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())


def refused(workplace: Workplace, *arguments: str, under_torchrun: bool = False) -> str:
    """Check that the trainer refuses these arguments and changes no file; return its error line."""
    before = contents(workplace.root)
    result = run_in_process(*workplace.arguments(), "--", *arguments, under_torchrun=under_torchrun)
    assert_refused(result)
    assert contents(workplace.root) == before
    return result.stderr


def assert_refused(result: CompletedProcess[str]) -> None:
    """Check that a mistake in the input gives status 2 and one line that fits a screen."""
    assert result.returncode == 2, result.stdout + result.stderr
    line = result.stderr
    assert line.startswith("Error: ") and line.count("\n") == 1 and line.endswith("\n")
    assert len(line) <= LONGEST_ERROR + 1 and line[:-1].isprintable()
    assert result.stdout == ""


def contents(root: Path) -> dict[str, str]:
    """Return every path below a directory with a digest of the file, or the target of the link."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else os.readlink(path)
        if path.is_symlink()
        else ""
        for path in root.rglob("*")
    }


def files_of(run_dir: Path) -> dict[str, bytes]:
    """Return the content of each file of a run, by its place; not what is set aside or hidden.

    The heartbeat is left out: it is of the processes, and goes with them.
    """
    paths = (path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file())
    return {
        str(path): (run_dir / path).read_bytes()
        for path in paths
        if path.parts[0] not in ("set-aside", "heartbeat.json")
        and not any(part.startswith(".") for part in path.parts)
        and not (run_dir / path).is_symlink()
    }


def not_kept(before: dict[str, bytes], run_dir: Path) -> list[str]:
    """Return those of the earlier files of a run of which no copy is anywhere below it."""
    found = {
        (path.name, path.read_bytes())
        for path in run_dir.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    return [name for name, content in before.items() if (Path(name).name, content) not in found]


def follow_links(run_dir: Path) -> None:
    """Do to `latest` and `best` what `cp -rL` does."""
    for name in ("latest", "best"):
        link = run_dir / "checkpoints" / name
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link)


# A run that has every kind of file: it grows, and has validation sets, samples and a reference.
EVERYTHING = {
    "grow": {"from_layers": 1, "at": 0.5},
    "validation": {"own": "tiny", "other": "other"},
    "sample_prompts": ["def "],
    "reference": "curve",
    "diagnostics_interval": 4,
    "validation_interval": 5,
}
CURVE = {
    "name": "curve",
    "vocab_size": 257,
    "train": [[100, 6.0], [10_000, 4.0]],
    "validation": [[100, 6.2], [10_000, 4.2]],
}


def add_everything(workplace: Workplace, **train: Any) -> Path:
    """Add the run, its two datasets and its reference; return the run directory."""
    workplace.add_dataset()
    workplace.add_dataset("other", num_tokens=100)
    run_dir = workplace.add_run(train=EVERYTHING | train)
    (workplace.runs_dir / "references.json").write_text(json.dumps({"curves": [CURVE]}))
    return run_dir


def _raise_exited(status: int) -> NoReturn:
    raise Exited(status)


def _refuse_to_train(*_: object, **__: object) -> NoReturn:
    pytest.fail("the input was accepted: training would start now")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that the first process fills; the others wait for it. Do not change it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    place, whole = base / name, base / f"{name}.whole"
    with FileLock(base / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a worker that failed
            place.mkdir()
            make(place)
            whole.touch()
    return place


def thorough_but(kept: Collection[object], cases: Iterable[object]) -> list[Any]:
    """Return all cases as parameters; those that are not kept run only with --thorough."""
    return [
        case
        if case in kept
        else pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough
        )
        for case in cases
    ]
