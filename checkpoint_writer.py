"""Checkpoints written behind training's back."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from checkpointing import CheckpointMeta, prune, save_checkpoint
from failpoints import failpoint
from training_step import Snapshot, SnapshotBuffers, TrainingState


class CheckpointWriter:
    """Copies a state to host memory and writes it in a thread, one at a time. Rank 0.

    A crash while it writes leaves what was whole before. What the disk refuses is told by
    `take_failure`, and tried again with `retry` or by the next `save`.

    Attributes:
        is_behind: whether the newest state is not on the disk, and no longer on its way there.
    """

    def __init__(self, checkpoints_dir: Path, *, keep: int | None = None,
                 protected: Collection[str] = ()) -> None:
        self._checkpoints_dir, self._keep, self._protected = checkpoints_dir, keep, protected
        self._buffers = SnapshotBuffers()
        # Python waits for it before it ends, also after an exception elsewhere.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        self._last: tuple[Snapshot, CheckpointMeta] | None = None
        self._failure = ""
        self.is_behind = False
        self.num_checkpoints = 0
        self.longest_write_seconds = 0.0

    def save(self, state: TrainingState, meta: CheckpointMeta) -> None:
        """Take a snapshot once the last one is written; return as soon as it is taken."""
        self.wait()
        failpoint("save.snapshot")
        self._last = self._buffers.take(state), meta
        self._write = self._thread.submit(self._save, *self._last)

    def prune(self) -> None:
        """Remove the checkpoints that are not to be kept."""
        if self._keep is not None:
            prune(self._checkpoints_dir, keep=self._keep, protected=self._protected)

    def retry(self) -> None:
        """Write the last snapshot once more, where that has failed."""
        self.wait()
        if self.is_behind:
            self._save(*self._last)

    def facts(self) -> dict[str, float]:
        """Give what a summary says of the checkpoints of this start."""
        return {"saved": self.num_checkpoints, "longest_write_seconds": self.longest_write_seconds}

    def wait(self, timeout: float | None = None) -> None:
        """Wait until what was begun is written, or has failed."""
        if self._write is not None:
            wait([self._write], timeout=timeout)
            if self._write.done():
                self._write.result()
                self._write = None

    def take_failure(self) -> str:
        """Give what the last write has failed of, once; else nothing."""
        failure, self._failure = self._failure, ""
        return failure

    def _save(self, snapshot: Snapshot, meta: CheckpointMeta) -> None:
        began = time.perf_counter()
        self.is_behind = True
        try:
            save_checkpoint(self._checkpoints_dir, snapshot, meta)
            self.prune()
        except OSError as error:
            self._failure = f"the checkpoint of step {meta.global_step + 1:,} could not be written"
            self._failure += f" ({error.strerror or error})"
            return
        self.is_behind = False
        self.num_checkpoints += 1
        self.longest_write_seconds = max(self.longest_write_seconds, time.perf_counter() - began)
