"""The second copy of a run, `--sync-to DIR`: fetched from at a launch, kept up to date after it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from basics.checkpoint_names import BEST, LATEST
from basics.errors import DISK_FULL, UserError, cannot_be_written, describe, print_line
from basics.manifest import read_manifest
from basics.verified_copy import copy_checkpoint, copy_record
from checkpointing import Checkpoint, best_of, find_oversized, list_checkpoints
from processes.command_line import Options
from processes.helper_process import failure_of, kill, start_module
from reporting.metrics_file import check_records
from run_config import Run, check_inside
from trainer.copy_process import MAX_RECORD_BYTES, OWN, RECORDS, Job
from trainer.resuming import check_identity

FETCHED = [name for name in RECORDS if name not in ("model.json", "train.json")]
POLL_SECONDS = 0.1  # between two looks at a copy that is waited for


def fetch(run: Run, options: Options, data: dict[str, str]) -> None:
    """Fetch the newest checkpoint and the records from the second copy, if that is newer. Rank 0.

    The best checkpoint comes with it. A run that is as new wins, and one that starts over.

    Args:
        data: the fingerprints of the token files.

    Raises:
        UserError: the place cannot be used, or holds another run, or nothing that can be read.
    """
    place = options.sync_to / run.name
    _check_place(place, options.sync_to, run)
    theirs = list_checkpoints(place / "checkpoints")
    if theirs:
        _check_same_run(theirs[-1], run, data)
    if options.fresh or options.began_at is not None:
        return
    candidates = _candidates(theirs, run, options.checkpoint)
    if not candidates:
        return
    _fetch_records(place, run)
    fetched, reason = None, ""
    while candidates and fetched is None:
        checkpoint = candidates.pop(0)
        reason = _try_to_fetch(checkpoint, run)
        if reason:
            print_line(f"warning: {checkpoint.path}: not fetched: {reason}")
        else:
            fetched = checkpoint
    if fetched is None:
        raise UserError(f"{place}: no checkpoint could be fetched: {reason}; restore one, or leave"
                        " --sync-to out")
    best = best_of(theirs)
    if best.name != fetched.name and not (run.checkpoints_dir / best.name).exists():
        _try_to_fetch(best, run)
    print_line(f"{run.name}: {fetched.name} and the records were fetched from {place}")


def _check_place(place: Path, root: Path, run: Run) -> None:
    """Refuse a place that cannot be written to, or that is no second copy."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(place if place.is_dir() else root, os.W_OK | os.X_OK):
            raise UserError(f"{root}: --sync-to cannot be written to; name another directory")
        for path in (place, place / "checkpoints", place / "set-aside"):
            check_inside(path, root, "--sync-to")
        is_in_use = (place / "checkpoints" / LATEST).exists() or any(
            (place / name).exists() for name in RECORDS)
        if is_in_use and not (place / OWN).is_file():
            raise UserError(f"{place}: is no second copy that --sync-to has made: it has no {OWN};"
                            " name another directory with --sync-to")
    except OSError as error:
        raise cannot_be_written(root, error) from None


def _check_same_run(theirs: Checkpoint, run: Run, data: dict[str, str]) -> None:
    try:
        check_identity(theirs, run, data)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{theirs.path.parents[1]}: is the copy of another run: {reason}; name"
                        " another --sync-to") from None


def _candidates(theirs: list[Checkpoint], run: Run, wanted: str | None) -> list[Checkpoint]:
    """Return the checkpoints to fetch one of, the first choice first."""
    if wanted not in (None, LATEST, BEST):
        return [found for found in theirs
                if found.name == wanted and not (run.checkpoints_dir / wanted).exists()]
    ours = list_checkpoints(run.checkpoints_dir)
    reached = ours[-1].meta.global_step if ours else -1
    return [found for found in reversed(theirs) if found.meta.global_step > reached]


def _fetch_records(place: Path, run: Run) -> None:
    for name in FETCHED:
        check_records(place / name)
        if name == "evaluations.jsonl" and (run.run_dir / name).exists():
            continue  # made here since
        try:
            copy_record(place / name, run.run_dir / name, max_bytes=MAX_RECORD_BYTES)
        except OSError as error:
            raise cannot_be_written(run.run_dir / name, error) from None


def _try_to_fetch(checkpoint: Checkpoint, run: Run) -> str:
    """Fetch a checkpoint; return why it could not be. Raises: UserError if the disk is full."""
    try:
        if oversized := find_oversized(read_manifest(checkpoint.path), run.model):
            return oversized
        run.checkpoints_dir.mkdir(exist_ok=True)
        copy_checkpoint(checkpoint.path, run.checkpoints_dir)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            failed = cannot_be_written(run.checkpoints_dir, error)
            if failed.status == DISK_FULL:
                raise failed from None
        return getattr(error, "strerror", None) or str(error)[:80]
    return ""


class SecondCopy:
    """Keeps the second copy of a run up to date, one process at a time. Rank 0. Any thread.

    Training never waits for it before its end. A failure is returned as text by `take_failure`;
    the next checkpoint tries again.

    Args:
        place: of the copy; None for none.
        from_step: the first step of the launch; the run has left what the copy has from there on.
        heartbeat: called while the copy is waited for.
    """

    def __init__(self, run: Run, place: Path | None, *, from_step: int,
                 heartbeat: Callable[[], None] = lambda: None) -> None:
        self._run, self._place, self._heartbeat = run, place, heartbeat
        self._from_step: int | None = from_step
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_behind = False  # something is new since the process began
        self._failure = ""

    def update(self) -> None:
        """Start to copy what is new, unless a copy is going on; then it is repeated after that."""
        if self._place is None:
            return
        with self._lock:
            self._is_behind = True
            self._go_on()

    def take_failure(self) -> str:
        """Return why the last copy failed, once; empty if it did not."""
        with self._lock:
            self._go_on()
            failure, self._failure = self._failure, ""
            return failure

    def finish(self, limit_seconds: float) -> str:
        """Wait until everything is copied; return what failed. A copy beyond the limit is ended."""
        self.update()
        deadline = time.monotonic() + limit_seconds
        while self._is_copying():
            self._heartbeat()
            if time.monotonic() > deadline:
                kill(self._process)
                self._process = None
                return (f"it was waited for {limit_seconds:g} s; the next launch with --sync-to"
                        " completes it")
            time.sleep(POLL_SECONDS)
        return self.take_failure()

    def _is_copying(self) -> bool:
        with self._lock:
            self._go_on()
            return self._process is not None

    def _go_on(self) -> None:
        """Note the end of the process; start another one if the copy is behind."""
        if self._process is not None and self._process.poll() is not None:
            process, self._process = self._process, None
            self._failure = failure_of(process, "copying")
            if not self._failure:
                self._from_step = None
        if self._process is None and self._is_behind:
            self._is_behind = False
            try:
                self._process = start_module("trainer.copy_process", self._job(), str(os.getpid()))
            except Exception as error:  # it must not end training
                self._failure = describe(error)

    def _job(self) -> str:
        return Job(str(self._run.run_dir.resolve()), str(self._place.resolve()),
                   keep=self._run.train.keep_checkpoints, from_step=self._from_step).text()
