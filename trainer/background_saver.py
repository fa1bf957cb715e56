"""Asynchronous checkpoint saver: training goes on while a thread writes."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import checkpointing
from basics.errors import NON_FINITE, UserError, as_os_error, why_not_written
from basics.failpoints import failpoint
from basics.tensors import first_non_finite
from checkpointing import Checkpoint, CheckpointMeta, Snapshot, TrainingState, Validation
from reporting.metrics_file import fsync_records

POLL_SECONDS = 0.5  # between two looks at the files of a write that is waited for


class BackgroundSaver:
    """Copies a state to host memory and writes it in a thread, one write at a time. Rank 0.

    A crash during a write leaves the earlier checkpoints whole. A write that failed is reported by
    `pop_failure` and tried again by `retry`, or superseded by the next `save`. A state that is not
    finite is not written: the next call that waits raises a UserError.

    `newest` is the checkpoint that the run resumed from, which may still lack its validation; it is
    always kept. `heartbeat` is called while a write is waited for and makes progress, `after_write`
    in the thread after each write that has succeeded.
    """

    def __init__(
        self,
        checkpoints_dir: Path,
        *,
        keep: int | None = None,
        newest: Checkpoint | None = None,
        heartbeat: Callable[[], None] = lambda: None,
        after_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints_dir, self._keep = checkpoints_dir, keep
        self._protected = [newest.name] if newest else []
        self._buffers = checkpointing.SnapshotBuffers()
        self._heartbeat, self._after_write = heartbeat, after_write
        # Python waits for this thread after an exception, and `Trainer.end` before `leave`.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        self._unsaved: tuple[Snapshot, CheckpointMeta] | None = None
        self._newest: Checkpoint | Any = newest
        self.validation: Validation | Any = newest and newest.validation  # of the newest state
        self._failure = ""
        self.num_checkpoints, self.longest_write_seconds = 0, 0.0

    def save(self, state: TrainingState, meta: CheckpointMeta) -> None:
        """Take a snapshot when the last one is written; return as soon as it is taken."""
        self.wait()
        # A state that could not be written is superseded by this one; its validation is not.
        if self._unsaved is None:
            self.retry()
        failpoint("save.snapshot")
        self._unsaved, self.validation = (self._buffers.take(state), meta), None
        self._submit()

    def add_validation(self, validation: Validation) -> None:
        """Add a validation to the newest checkpoint, once that is whole on disk."""
        self.validation = validation
        self._submit()

    @property
    def is_behind(self) -> bool:
        """Whether something has not been written. Call it after `wait` or `retry`."""
        lacks_validation = self.validation and self._newest and self._newest.validation is None
        return self._unsaved is not None or bool(lacks_validation)

    def retry(self) -> None:
        """Wait for the last write; repeat it if it has failed."""
        self.wait()
        if self.is_behind:
            self._submit()
            self.wait()

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until the last write has ended; send heartbeats while its files appear and grow."""
        write, until, seen = self._write, time.monotonic() + timeout, [-1]
        while write is not None and not write.done() and time.monotonic() < until:
            wait([write], timeout=POLL_SECONDS)
            sizes = []
            with suppress(OSError):  # a file was renamed or removed meanwhile
                sizes = [path.lstat().st_size for path in self._checkpoints_dir.rglob("*")]
            if sizes != seen:
                seen = sizes
                self._heartbeat()
        if write is not None and write.done():
            self._heartbeat()
            self._write = None
            write.result()

    def pop_failure(self) -> str:
        """Return why the last write failed, once; empty if it did not."""
        failure, self._failure = self._failure, ""
        return failure

    def _submit(self) -> None:
        self._write = self._thread.submit(self._run, self._write)

    def _run(self, previous: Future[None] | None) -> None:
        """Write whatever is not on disk yet. In the thread."""
        if previous is not None:
            previous.result()  # an error that nobody has seen ends this write too
        began, what = time.perf_counter(), ""
        try:
            if self._unsaved is not None:
                snapshot, meta = self._unsaved
                what = f"the checkpoint of step {meta.global_step + 1:,}"
                if broken := first_non_finite(snapshot.weights | snapshot.moments):
                    raise UserError(
                        f"{what} was not saved: {broken} is not finite; resume from the"
                        " one before, perhaps with a lower learning_rate",
                        NON_FINITE,
                    )
                # The records first: a checkpoint without those of its steps would leave a gap.
                fsync_records(self._checkpoints_dir.parent)
                self._newest = checkpointing.save_checkpoint(self._checkpoints_dir, snapshot, meta)
                self._unsaved = None
                self.num_checkpoints += 1
            if self.is_behind:  # the checkpoint lacks its validation
                what = f"the validation loss of step {self._newest.meta.global_step + 1:,}"
                fsync_records(self._checkpoints_dir.parent)
                self._newest = checkpointing.add_validation(self._newest, self.validation)
        except (OSError, ValueError) as error:
            self._failure = f"{what} could not be written ({why_not_written(as_os_error(error))})"
            return
        self.tidy()
        # After the links: the command copies a directory whose `latest` is right.
        self._after_write()
        self.longest_write_seconds = max(self.longest_write_seconds, time.perf_counter() - began)

    def tidy(self) -> None:
        """Renew the links; remove the checkpoints that `keep_checkpoints` does not keep."""
        work = {"latest and best could not be renewed": checkpointing.renew_links}
        if self._keep is not None:  # also where a full disk has refused the links
            work["older checkpoints could not be removed"] = partial(
                checkpointing.prune, keep=self._keep, protected=self._protected
            )
        for failure, tidy in work.items():
            try:
                tidy(self._checkpoints_dir)
            except (OSError, UserError) as error:
                reason = why_not_written(error) if isinstance(error, OSError) else error
                self._failure = f"{failure} ({reason})"
