"""Commands of the user: `--after-checkpoint` starts one, `--when-done` runs one after the end."""

import gc
import math
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from basics.checkpoint_files import read_identity
from basics.device import free_cache
from basics.errors import FAILED, UserError, drop_unwritable_output, one_line, print_line
from basics.failpoints import failpoint
from checkpointing import best_of, list_checkpoints
from processes.background import POLL_SECONDS, end_group, environment
from processes.command_line import Options
from processes.distributed import Process
from processes.signals import Deadlines, stop_signals
from reporting.metrics_file import fsync_records
from reporting.summary import BEHIND, BUDGET, FINISHED, duration, read_summary, record_when_done
from run_config import Run

GRACE_SECONDS = 5.0  # from a stop signal to SIGKILL; torchrun kills its processes after 30


def command_failed(name: str, how: str, status: int = FAILED) -> UserError:
    return UserError(f"the launch is over, and {name} {how}; run the same command again", status)


def execute_when_done(
    run: Run, options: Options, process: Process, *, was_finished: bool, stop_signal: int
) -> None:
    """Execute the command of --when-done if the run is over. Every rank; rank 0 does it.

    If the run was finished before this launch, --after-checkpoint is repeated first: the last
    one may have failed. All files are on disk, and the process group is gone. The machine may be
    shut down under this process.

    Raises: UserError: a command failed, or a signal ended it.
    """
    if not process.is_main:
        return
    if was_finished and options.after_checkpoint:
        execute(
            "--after-checkpoint",
            options.after_checkpoint,
            run,
            limit_seconds=Deadlines.read().after_checkpoint,
        )
    if options.when_done is None:
        return
    if reason := _why_not(read_summary(run), stop_signal, has_trained=not was_finished):
        return print_line(f"when-done: not run: {reason}")
    gc.collect()
    free_cache()  # the command may need the GPU
    with suppress(OSError):
        fsync_records(run.run_dir)
    record_when_done(run, None)
    failpoint("when-done")
    print_line(f"when-done: running {one_line(options.when_done)}")
    drop_unwritable_output()  # else the command fails where it prints
    began = time.monotonic()
    execute(
        "--when-done", options.when_done, run, record=lambda status: record_when_done(run, status)
    )
    print_line(f"when-done: ended with status 0 after {duration(time.monotonic() - began)}")


def _why_not(summary: dict[str, Any], stop_signal: int, *, has_trained: bool) -> str:
    """Return why the command is not run; empty if the run or its budget is over, or it is behind.

    A launch of a run that was finished before runs it again unless it has succeeded.
    """
    if stop_signal:
        return f"{signal.Signals(stop_signal).name} ended the launch"
    if summary.get("status") == FINISHED:
        has_succeeded = not has_trained and summary.get("when_done") == {"status": 0}
        return "it has succeeded after an earlier launch" if has_succeeded else ""
    if summary.get("stopped_by") in (BUDGET, BEHIND):
        return ""
    reason = summary.get("reason")
    return f"{reason} ended the launch" if reason else "the run has not ended"


def facts_of(run: Run) -> dict[str, str]:
    """Return what a command learns of a run, as environment variables; unknown ones are empty."""
    summary, checkpoints = read_summary(run), list_checkpoints(run.checkpoints_dir)
    best, newest = best_of(checkpoints), checkpoints[-1] if checkpoints else None
    if newest and "global_step" not in summary:  # it trains
        summary = summary | newest.meta.model_dump(include={"global_step", "tokens", "train_loss"})
        summary["validation_loss"] = newest.validation and newest.validation.loss
    loss = summary.get("validation_loss")
    identity = read_identity(run.run_dir)
    facts = {
        "RUN": run.name,
        "RUN_DIR": run.run_dir.absolute(),
        "IDENTITY": identity and identity.name,
        "STATUS": summary.get("status"),
        "REASON": summary.get("reason"),
        "STEP": summary.get("global_step", -1) + 1,
        "NUM_STEPS": summary.get("num_steps"),
        "TOKENS": summary.get("tokens"),
        "LOSS": summary.get("train_loss") if loss is None else loss,
        "CHECKPOINT": newest and newest.path.absolute(),
        "BEST": best and best.path.absolute(),
        "SECONDS": sum((summary.get("seconds") or {}).values()),
        "USD": (summary.get("usd") or {}).get("total"),
    }
    return {
        f"DDP_TRAIN_{name}": "" if value is None else str(value) for name, value in facts.items()
    }


def start_command(
    command: str, facts: dict[str, str], output: IO[str] | None = None, *, priority: list[str]
) -> subprocess.Popen[bytes]:
    """Start a command by `sh -c`, in a session of its own that can be ended as a whole.

    Its environment is that of the launch, as far as it is known, and the facts; `{run}`,
    `{run_dir}`, `{checkpoint}` and `{identity}` in the command become the facts of that name.
    """
    command = re.sub(
        r"(?<!\$)\{(run|run_dir|checkpoint|identity)\}",
        lambda found: shlex.quote(facts[f"DDP_TRAIN_{found[1].upper()}"]),
        command,
    )
    return subprocess.Popen(
        [*priority, "sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment() | facts,
        start_new_session=True,
    )


def execute(
    name: str,
    command: str,
    run: Run,
    *,
    limit_seconds: float = math.inf,
    record: Callable[[int], None] = lambda status: None,
) -> None:
    """Execute a command; a stop signal ends it. What it prints goes where this process prints.

    `record` is called with its exit status, 128 + n if signal n ended it.

    Raises: UserError: it failed, or a stop signal came.
    """
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in stop_signals()
    }
    try:
        process = start_command(command, facts_of(run), priority=[])
        until = time.monotonic() + limit_seconds
        while process.poll() is None and not received and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if process.poll() is None:
            end_group(process, GRACE_SECONDS)
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = status if status >= 0 else 128 - status
    record(status)
    if received:
        raise command_failed(
            name, f"was ended by {signal.Signals(received[0]).name}", 128 + received[0]
        )
    if status:
        raise command_failed(name, f"ended with status {status}")
