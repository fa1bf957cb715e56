"""What ddp_train.py checks before it imports torch, which takes seconds."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from basics.errors import (
    UserError,
    cannot_be_written,
    exit_status,
    no_answer,
    no_directory,
    print_error,
    print_line,
    print_traceback,
)
from basics.json_files import MAX_BYTES
from basics.spinning import limit_spinning
from basics.time_limit import within
from basics.verified_copy import copy_record
from processes.command_line import Options, read_command_line
from processes.deadlines import Deadlines
from processes.heartbeat import announce
from processes.run_lock import LockedError, end_with_torchrun, lock_run
from run_config import RUN_NAME, load_run


def check_before_torch() -> None:
    """Answer --help, mistakes on the command line and a locked run at once; lock the run.

    Under torchrun only rank 0 checks, and only a locked run ends it here: all ranks find the
    other errors again later, together, so that one line reports them.
    """
    limit_spinning()
    gc.disable()  # collecting while modules are imported takes a tenth of the start-up time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save
    rank = os.environ.get("RANK")
    if rank is not None:
        end_with_torchrun()
    if rank not in (None, "0"):
        return
    try:
        options = read_command_line()
        fetch_configs(options)
        run_dir = load_run(options.runs_dir, options.run).run_dir
        if not (options.find_max_microbatch or options.prefetch):
            lock_run(run_dir)
            if not options.find_learning_rate:
                announce(run_dir)
    except Exception as error:
        if rank is None or isinstance(error, LockedError):
            exit_with(error)


def fetch_configs(options: Options) -> None:
    """Fetch the two configs from the run's second copy, if the run is not on this machine.

    Raises:
        UserError: they cannot be copied, or the place is not there or does not answer.
    """
    run_dir = options.runs_dir / options.run
    if options.sync_to is None or not RUN_NAME.fullmatch(options.run) or (
            run_dir / "train.json").exists():
        return
    seconds = Deadlines.read().fetch
    try:
        within(seconds, lambda: _fetch_configs(options.sync_to, run_dir))
    except TimeoutError:
        raise no_answer(options.sync_to, seconds) from None
    except OSError as error:
        raise cannot_be_written(run_dir, error) from None


def _fetch_configs(root: Path, run_dir: Path) -> None:
    place = root / run_dir.name
    if not root.is_dir():
        raise no_directory(root)
    if not (place / "train.json").is_file():
        return  # `load_run` reports what is missing
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("model.json", "train.json"):  # in this order: a kill may come between
        if not (run_dir / name).exists():
            copy_record(place / name, run_dir / name, max_bytes=MAX_BYTES)
    print_line(f"{run_dir}: model.json and train.json were fetched from {place}")


def exit_with(error: Exception) -> NoReturn:
    """Print an error's line, or its traceback if nobody expects it, and exit with its status."""
    if isinstance(error, UserError):
        print_error(error.line())
    else:
        print_traceback(error)  # not Python's own: a terminal would obey what it prints
    sys.exit(exit_status(error))
