"""The second copy of a run, `--sync-to DIR`, kept up to date by a process beside training."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from basics.errors import FAILED, UserError, cannot_be_written, describe
from processes.deadlines import Deadlines
from processes.helper_process import failure_of, kill, start_module
from run_config import Run
from trainer.copy_process import Job
from trainer.stale_copies import mark_stale, stale_from

POLL_SECONDS = 0.1  # between two looks at a copy that is waited for


class SecondCopy:
    """Keeps the second copy of a run up to date, one process at a time. Rank 0. Any thread.

    Training never waits for it before its end, and only the process touches the place. A failure is
    returned as text by `take_failure`; the next checkpoint tries again.

    Args:
        place: of the copy; None for none.
        from_step: the first step of the launch; the run has left what the copy has from there on.
        heartbeat: called while the copy is waited for.
    """

    def __init__(self, run: Run, place: Path | None, *, from_step: int,
                 heartbeat: Callable[[], None] = lambda: None) -> None:
        self._run, self._heartbeat, self._from_step = run, heartbeat, from_step
        self._place = place and place.absolute()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_behind = False  # something is new since the process began
        self._failure = ""

    def leave_behind(self) -> None:
        """Record, until the copy has set them aside, which of its checkpoints the run leaves.

        Raises:
            UserError: it could not be written.
        """
        if self._place is not None:
            try:
                mark_stale(self._run.run_dir, self._place, self._from_step)
            except OSError as error:
                raise cannot_be_written(self._run.run_dir, error) from None

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

    def finish(self, limit_seconds: Callable[[], float]) -> str:
        """Wait until everything is copied; return what failed. A copy beyond the limit is ended.

        Args:
            limit_seconds: counted from this call; it may change.
        """
        self.update()
        began = time.monotonic()
        while self._is_copying():
            self._heartbeat()
            waited = time.monotonic() - began
            if waited >= limit_seconds():
                kill(self._process)
                self._process = None
                return (f"it was waited for {waited:.1f} s; the next launch with --sync-to"
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
        if self._process is None and self._is_behind:
            self._is_behind = False
            try:
                self._process = start_module("trainer.copy_process", self._job(), str(os.getpid()))
            except Exception as error:  # it must not end training
                self._failure = describe(error)

    def _job(self) -> str:
        """Return the job of the process. Nothing here may look at the place: it may hang."""
        return Job(str(self._run.run_dir.resolve()), str(self._place),
                   keep=self._run.train.keep_checkpoints,
                   from_step=stale_from(self._run.run_dir, self._place)).text()


def complete(run: Run, place: Path | None, *, from_step: int) -> None:
    """Bring the second copy of a finished run up to date, if it has one. Rank 0.

    Raises:
        UserError: it lacks something.
    """
    seconds = Deadlines.read().second_copy
    failure = SecondCopy(run, place, from_step=from_step).finish(lambda: seconds)
    if failure:
        raise not_copied(place, failure)


def not_copied(place: Path, failure: str) -> UserError:
    """Describe a launch that ends, but whose second copy is not complete."""
    return UserError(f"the second copy is not complete; run the same command again ({place}:"
                     f" {failure})", FAILED)
