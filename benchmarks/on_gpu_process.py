"""Processes of `on_gpu.py`: a command with a time limit, and packages from wheels."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from basics.errors import UserError
from benchmarks.on_gpu_stages import PROJECT_DIR


@contextlib.contextmanager
def installed(wheels: Path | None) -> Iterator[dict[str, str]]:
    """Install wheels into a temporary directory; yield the environment of the stages.

    Raises:
        UserError: the directory has no wheels, or pip could not install them.
    """
    with tempfile.TemporaryDirectory(prefix="on-gpu-packages-") as folder:
        if wheels:
            install(wheels, folder)
            sys.path.insert(0, folder)  # for the page
        paths = [str(PROJECT_DIR), *([folder] if wheels else []), os.environ.get("PYTHONPATH", "")]
        yield os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)),
                            "PYTHONUNBUFFERED": "1"}


def install(wheels: Path, folder: str) -> None:
    """Install all wheels of a directory into another one with pip. Raises: UserError."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise UserError(f"--wheels {wheels}: holds no *.whl file")
    finished = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
         "--no-compile", "--disable-pip-version-check", "--target", folder, *files],
        capture_output=True, text=True)
    if finished.returncode:
        lines = (finished.stderr.strip() or "no message").splitlines()
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise UserError(f"--wheels {wheels}: pip could not install them: {reason}")


def run_to_limit(command: list[str], seconds: float, log_path: Path,
                 environment: dict[str, str]) -> int | None:
    """Run a command in a process group of its own; its output goes to a file.

    Returns:
        Its exit status; None if it was killed at its limit, with all that it had started.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=PROJECT_DIR, env=environment, stdout=log,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_group(process)


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process, its group, and its descendants: torchrun's have groups of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
