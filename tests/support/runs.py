"""Runs on two processes with a fault, and what they leave, for the tests of faults."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from basics.checkpoint_files import directory_of
from basics.failpoints import VARIABLE
from processes.signals import DEADLINES
from reporting.metrics_file import OF_MACHINE
from tests.support.workplace import Workplace, read_lines, succeeded

# Every 5 steps a validation and a checkpoint; 12 steps on two processes.
SETTINGS = {"hang_timeout_seconds": 4.0, "collective_timeout_seconds": 30.0}
TIMED = {"seconds", "usd", "tokens_per_second", "validation_seconds", "slowest_step",
         "slowest_step_seconds", *OF_MACHINE}


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
    return next((line for line in reversed(result.stderr.splitlines())
                 if line.startswith("Error: ")), "")


def weights_of(run_dir: Path) -> str:
    path = directory_of(run_dir / "checkpoints/latest") / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metrics_of(run_dir: Path) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in TIMED}
            for record in read_lines(run_dir / "metrics.jsonl")]


def validations_of(run_dir: Path) -> list[dict]:
    return [record for record in metrics_of(run_dir) if "validation_loss" in record]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.02)


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
