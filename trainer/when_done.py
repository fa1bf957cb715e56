"""`--when-done`: a command that runs once a run is over and all of it is on disk."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import torch

from basics.errors import FAILED, STOP_SIGNALS, UserError, one_line, print_line
from basics.failpoints import failpoint
from checkpointing import best_of, list_checkpoints
from processes.heartbeat import EARLIER
from processes.launch import Process
from processes.run_lock import HANDOVER
from reporting.clock import SPENT_VARIABLE
from reporting.metrics_file import fsync_records
from reporting.summary import (
    BUDGET,
    FINISHED,
    duration,
    read_summary,
    record_when_done,
    when_done_status,
)
from run_config import Run
from trainer.startup import PreparedRun

PREFIX = "when-done: "
GRACE_SECONDS = 5.0  # from a stop signal to SIGKILL; torchrun kills its processes after 30
POLL_SECONDS = 0.2
OUTPUT_SECONDS = 1.0  # for the last output: a process that the command left behind may hold it open
MAX_LINE = 4096  # characters; longer lines are printed in parts
# What torchrun and a launch tell their own processes: another launch would take it for its own.
PRIVATE = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE",
           "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
           "TORCH_NCCL_ASYNC_ERROR_HANDLING", HANDOVER, EARLIER, SPENT_VARIABLE}


def run_when_done(prepared: PreparedRun, process: Process, *, stop_signal: int) -> None:
    """Run the command of --when-done if the run is over. Every rank; rank 0 runs it.

    Nothing else is left to do here: checkpoint, records and summary are on disk, and the process
    group is gone. torchrun waits for this process, and the machine may be shut down under it. The
    run stays locked.

    Args:
        stop_signal: the signal that a process of this launch has received, or 0.

    Raises:
        UserError: the command failed, or a signal ended it.
    """
    command, run = prepared.options.when_done, prepared.run
    if command is None or not process.is_main:
        return
    summary = read_summary(run)
    if reason := _why_not(summary, stop_signal, has_trained=not prepared.is_finished):
        print_line(f"{PREFIX}not run: {reason}")
        return
    _free_memory()
    with suppress(OSError):
        fsync_records(run.metrics_path)
    record_when_done(run, command, None)
    failpoint("when-done")
    print_line(f"{PREFIX}running {one_line(command)}")
    began = time.monotonic()
    status, stopped_by = run_command(command, environment_of(run_facts(run, summary)))
    record_when_done(run, command, status)
    print_line(f"{PREFIX}ended with status {status} after {duration(time.monotonic() - began)}")
    end = f"the run is {summary['status']}, and --when-done"
    if stopped_by:
        raise UserError(f"{end} was ended by {STOP_SIGNALS[stopped_by]}", 128 + stopped_by)
    if status:
        raise UserError(f"{end} ended with status {status}", FAILED)


def _why_not(summary: dict[str, Any], stop_signal: int, *, has_trained: bool) -> str:
    """Return why the command is not run; empty if the run, or its budget, has come to its end.

    Args:
        has_trained: this launch did. Another one, of a run that was finished before, runs the
            command only if none has succeeded yet: it may have failed, or been interrupted, also
            before it began.
    """
    status, reason = summary.get("status"), summary.get("reason")
    if stop_signal:
        return f"{STOP_SIGNALS[stop_signal]} ended the launch"
    if status == FINISHED:
        has_succeeded = not has_trained and when_done_status(summary) == 0
        return "it has succeeded after an earlier launch" if has_succeeded else ""
    if summary.get("stopped_by") == BUDGET:
        return ""
    return f"{reason} ended the launch" if reason else "the run has not ended"


def _free_memory() -> None:
    """Free what training has used: the command may need the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def run_facts(run: Run, summary: dict[str, Any]) -> dict[str, str]:
    """Return what the command learns of a run, as environment variables; unknown ones are empty."""
    checkpoints = list_checkpoints(run.checkpoints_dir)
    best, newest = best_of(checkpoints), checkpoints[-1] if checkpoints else None
    loss = summary.get("validation_loss")
    facts = {
        "RUN": run.name, "RUN_DIR": run.run_dir.absolute(),
        "STATUS": summary.get("status"), "REASON": summary.get("reason"),
        "STEP": summary.get("global_step", -1) + 1, "NUM_STEPS": summary.get("num_steps"),
        "TOKENS": summary.get("tokens"),
        "LOSS": summary.get("train_loss") if loss is None else loss,
        "CHECKPOINT": newest and newest.path.absolute(), "BEST": best and best.path.absolute(),
        "SECONDS": sum((summary.get("seconds") or {}).values()),
        "USD": (summary.get("usd") or {}).get("total"),
    }
    return {f"DDP_TRAIN_{name}": "" if value is None else str(value)
            for name, value in facts.items()}


def environment_of(facts: dict[str, str]) -> dict[str, str]:
    """Return the environment in which the launch began, as far as it is known, and the facts."""
    kept = {name: value for name, value in os.environ.items()
            if name not in PRIVATE and not name.startswith("TORCHELASTIC_")}
    if kept.get("OMP_NUM_THREADS") == "1":  # torchrun sets that
        del kept["OMP_NUM_THREADS"]
    return kept | facts


def run_command(command: str, environment: dict[str, str]) -> tuple[int, int]:
    """Run a command by `sh -c`, and print what it prints; a stop signal ends it.

    It is the leader of a process group, which a signal ends as a whole.

    Returns:
        Its exit status, 128 + n if signal n ended it; the stop signal that came meanwhile, or 0.
    """
    with _stop_signals() as received:
        process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", env=environment,
            start_new_session=True)
        printer = threading.Thread(target=_print_all, args=(process.stdout,), daemon=True)
        printer.start()
        status = _wait(process, received)
        printer.join(OUTPUT_SECONDS)
    return status if status >= 0 else 128 - status, received[0] if received else 0


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the stop signals that arrive inside, instead of ending this process."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number))
              for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[str], received: list[int]) -> int:
    """Return the status of a process; after a stop signal, end its group."""
    kill_at = math.inf
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=POLL_SECONDS)
        if received and kill_at == math.inf:
            kill_at = time.monotonic() + GRACE_SECONDS
            os.killpg(process.pid, signal.SIGTERM)
        elif time.monotonic() > kill_at:
            os.killpg(process.pid, signal.SIGKILL)


def _print_all(output: IO[str]) -> None:
    for line in iter(lambda: output.readline(MAX_LINE), ""):
        print_line(f"{PREFIX}{line.removesuffix(chr(10))}")
