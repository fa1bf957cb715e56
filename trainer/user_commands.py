"""Commands of the user: `--after-checkpoint` beside training, `--when-done` once a run is over."""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import torch

from basics.checkpoint_files import read_identity
from basics.errors import FAILED, STOP_SIGNALS, UserError, one_line, print_line
from basics.failpoints import failpoint
from checkpointing import best_of, list_checkpoints
from processes.beside import NORMAL, POLL_SECONDS, Beside, end_group, environment
from processes.launch import Process
from processes.signals import Deadlines, stop_signals
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
LOG = "after-checkpoint.log"  # in the run directory: what the last --after-checkpoint printed
GRACE_SECONDS = 5.0  # from a stop signal to SIGKILL; torchrun kills its processes after 30
OUTPUT_SECONDS = 1.0  # for the last output: a process that the command left behind may hold it open
MAX_LINE = 4096  # characters; longer lines are printed in parts


class AfterCheckpoint(Beside):
    """Runs a command, if there is one, after each checkpoint; again if a newer one came meanwhile.

    A failure is only a warning: the next checkpoint tries again.
    """

    grace_seconds = 1.0  # of the time that a stop signal leaves to this process

    def __init__(self, command: str | None, run: Run, *,
                 heartbeat: Callable[[], None] = lambda: None) -> None:
        super().__init__("after-checkpoint", "", run.run_dir, heartbeat=heartbeat,
                         advice=f"; {run.run_dir / LOG} has its output")
        self._command, self._run = command, run

    def start(self) -> None:
        """Run the command; if it runs already, again when it has ended."""
        if self._command is not None:
            super().start()

    def _launch(self) -> subprocess.Popen:
        facts = run_facts(self._run, read_summary(self._run))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK  # no pipe
        with open(os.open(self._run_dir / LOG, flags, 0o666), "w") as output:
            return start(self._command or "", facts, output, self._niceness)


def after_checkpoint_failed(failure: str) -> UserError:
    """Describe a launch that ends well, but whose last --after-checkpoint did not."""
    return UserError(f"--after-checkpoint: {failure}; the checkpoints are whole: run the same"
                     " command again", FAILED)


def run_when_done(prepared: PreparedRun, process: Process, *, stop_signal: int) -> None:
    """Run the command of --when-done if the run is over. Every rank; rank 0 runs it.

    Where the run was finished before this launch, --after-checkpoint is repeated first: the last
    one may have failed. Nothing else is left to do here: checkpoint, records and summary are on
    disk, and the process group is gone. The machine may be shut down under this process.

    Args:
        stop_signal: the signal that a process of this launch has received, or 0.

    Raises:
        UserError: a command failed, or a signal ended it.
    """
    command, run = prepared.options.when_done, prepared.run
    if prepared.is_finished and process.is_main:
        until = time.monotonic() + Deadlines.read().after_checkpoint
        with _stop_signals() as received:
            again = AfterCheckpoint(prepared.options.after_checkpoint, run)
            again.start()
            failure = again.finish(lambda: 0.0 if received else until)
        if received:
            raise UserError(f"{STOP_SIGNALS[received[0]]} ended --after-checkpoint",
                            128 + received[0])
        if failure:
            raise after_checkpoint_failed(failure)
    if command is None or not process.is_main:
        return
    summary = read_summary(run)
    if reason := _why_not(summary, stop_signal, has_trained=not prepared.is_finished):
        print_line(f"{PREFIX}not run: {reason}")
        return
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the command may need the GPU
    with suppress(OSError):
        fsync_records(run.run_dir)
    record_when_done(run, None)
    failpoint("when-done")
    print_line(f"{PREFIX}running {one_line(command)}")
    began = time.monotonic()
    status, stopped_by = run_command(command, run_facts(run, summary))
    record_when_done(run, status)
    print_line(f"{PREFIX}ended with status {status} after {duration(time.monotonic() - began)}")
    ended = f"the run is {summary['status']}, and --when-done"
    if stopped_by:
        raise UserError(f"{ended} was ended by {STOP_SIGNALS[stopped_by]}", 128 + stopped_by)
    if status:
        raise UserError(f"{ended} ended with status {status}", FAILED)


def _why_not(summary: dict[str, Any], stop_signal: int, *, has_trained: bool) -> str:
    """Return why the command is not run; empty if the run, or its budget, has come to its end.

    A launch of a run that was finished before runs it again unless it has succeeded.
    """
    if stop_signal:
        return f"{STOP_SIGNALS[stop_signal]} ended the launch"
    if summary.get("status") == FINISHED:
        has_succeeded = not has_trained and when_done_status(summary) == 0
        return "it has succeeded after an earlier launch" if has_succeeded else ""
    reason = summary.get("reason")
    if summary.get("stopped_by") == BUDGET:
        return ""
    return f"{reason} ended the launch" if reason else "the run has not ended"


def run_facts(run: Run, summary: dict[str, Any]) -> dict[str, str]:
    """Return what the command learns of a run, as environment variables; unknown ones are empty."""
    checkpoints = list_checkpoints(run.checkpoints_dir)
    best, newest = best_of(checkpoints), checkpoints[-1] if checkpoints else None
    if newest and "global_step" not in summary:  # it trains
        summary = summary | newest.meta.model_dump(include={"global_step", "tokens", "train_loss"})
        summary["validation_loss"] = newest.validation and newest.validation.loss
    loss = summary.get("validation_loss")
    identity = read_identity(run.run_dir)
    facts = {
        "RUN": run.name, "RUN_DIR": run.run_dir.absolute(), "IDENTITY": identity and identity.name,
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


def start(command: str, facts: dict[str, str], output: IO[str] | int,
          niceness: int) -> subprocess.Popen[str]:
    """Start a command by `sh -c`, in a session of its own that can be ended as a whole.

    Its environment is that of the launch, as far as it is known, and the facts; `{run}`,
    `{run_dir}`, `{checkpoint}` and `{identity}` in the command become the facts of that name.
    """
    kept = environment()
    if kept.get("OMP_NUM_THREADS") == "1":  # torchrun sets that
        del kept["OMP_NUM_THREADS"]
    command = re.sub(r"(?<!\$)\{(run|run_dir|checkpoint|identity)\}",
                     lambda found: shlex.quote(facts[f"DDP_TRAIN_{found[1].upper()}"]), command)
    return subprocess.Popen(
        ["nice", "-n", str(niceness), "sh", "-c", command], stdin=subprocess.DEVNULL,
        stdout=output, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        env=kept | facts, start_new_session=True)


def run_command(command: str, facts: dict[str, str]) -> tuple[int, int]:
    """Run a command and print what it prints; a stop signal ends it.

    Returns:
        Its exit status, 128 + n if signal n ended it; the stop signal that came meanwhile, or 0.
    """
    with _stop_signals() as received:
        process = start(command, facts, subprocess.PIPE, NORMAL)
        printer = threading.Thread(target=_print_all, args=(process.stdout,), daemon=True)
        printer.start()
        while process.poll() is None and not received:
            time.sleep(POLL_SECONDS)
        if received:
            end_group(process, GRACE_SECONDS)
        status = process.wait()
        printer.join(OUTPUT_SECONDS)
    return status if status >= 0 else 128 - status, received[0] if received else 0


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the stop signals that arrive inside, instead of ending this process."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number))
              for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_all(output: IO[str]) -> None:
    for line in iter(lambda: output.readline(MAX_LINE), ""):
        print_line(f"{PREFIX}{line.removesuffix(chr(10))}")
