"""ddp_train.py in the process of the test: for errors that are found before any training."""

import gc
import hashlib
import io
import os
import runpy
import signal
import sys
import uuid
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

import pytest
import torch.distributed as dist
import torch.distributed.run

from basics import entry_points
from processes import command_line, run_lock, startup_agreement
from processes.watchdog import Watchdog
from tests.support.workplace import PROJECT_DIR, Workplace

LONGEST_ERROR = 200  # characters, "Error: " included


class Exited(BaseException):
    """Raised by os._exit."""


def run_in_process(*arguments: str, under_torchrun: bool = False) -> CompletedProcess[str]:
    """Run ddp_train.py here, alone or as the only rank under torchrun, up to the first step."""
    stdout, stderr = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["ddp_train.py", *arguments])
        patch.setattr(os, "_exit", _raise_exited)
        patch.setattr(torch.distributed.run, "run", _refuse_to_train)
        for name, instead in (("start", lambda watchdog: watchdog),  # without thread and signals
                              ("stop", lambda watchdog: watchdog._peers.close()),
                              ("fail", lambda watchdog, error: watchdog._peers.close()),
                              ("expect_steps", _refuse_to_train)):
            patch.setattr(Watchdog, name, instead)
        patch.setattr(command_line, "end_with_torchrun", lambda: None)
        patch.setattr(entry_points, "keep_freed_memory", lambda: None)
        if under_torchrun:
            store = dist.HashStore()
            patch.setattr(startup_agreement, "_open_torchrun_store", lambda: store)
            for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}.items():
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
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else
            os.readlink(path) if path.is_symlink() else "" for path in root.rglob("*")}


def _raise_exited(status: int) -> NoReturn:
    raise Exited(status)


def _refuse_to_train(*_: object, **__: object) -> NoReturn:
    pytest.fail("the input was accepted: training would start now")
