"""What ddp_train.py checks before it imports torch, which takes seconds."""

import gc
import os

from basics.cli import exit_with
from processes.command_line import read_command_line
from processes.run_lock import LockedError, announce, lock_run
from processes.signals import end_with_torchrun
from run_config import load_run


def check_before_torch() -> None:
    """Answer --help, mistakes on the command line and a locked run at once; lock the run.

    Under torchrun only rank 0 checks, and only a locked run ends it here: all ranks find the
    other errors again later, together, so that one line reports them.
    """
    gc.disable()  # collecting while modules are imported takes a tenth of the start-up time
    rank = os.environ.get("RANK")
    if rank is not None:
        end_with_torchrun()
    if rank not in (None, "0"):
        return
    try:
        options = read_command_line()
        run_dir = load_run(options.runs_dir, options.run).run_dir
        if not (options.find_max_microbatch or options.prefetch):
            lock_run(run_dir)
            if not options.find_learning_rate:
                announce(run_dir)
    except Exception as error:
        if rank is None or isinstance(error, LockedError):
            exit_with(error)
