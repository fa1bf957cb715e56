"""Checkpoints written behind training's back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from basics.failpoints import failpoint
from checkpointing import PARTIAL_PREFIX, CheckpointMeta, prune, save_checkpoint
from reporting.metrics_file import fsync_records
from trainer.step import Snapshot, SnapshotBuffers, TrainingState

LOOK_SECONDS = 0.5  # between two looks at a write that is waited for


class BackgroundSaver:
    """Copies a state to host memory and writes it in a thread, one at a time. Rank 0.

    A crash while it writes leaves what was whole before. What the disk refuses is told by
    `take_failure`, and tried again with `retry` or by the next `save`.

    Args:
        sign: called while a write is waited for, as often as it goes forward.

    Attributes:
        is_behind: whether the newest state is not on the disk, and no longer on its way there.
    """

    def __init__(self, checkpoints_dir: Path, *, keep: int | None = None,
                 protected: Collection[str] = (),
                 sign: Callable[[], None] = lambda: None) -> None:
        self._checkpoints_dir, self._keep, self._protected = checkpoints_dir, keep, protected
        self._buffers, self._sign = SnapshotBuffers(), sign
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
        """Remove the checkpoints that are not to be kept; of a failure `take_failure` tells."""
        try:
            if self._keep is not None:
                prune(self._checkpoints_dir, keep=self._keep, protected=self._protected)
        except OSError as error:
            self._failure = f"older checkpoints could not be removed ({error.strerror or error})"

    def retry(self) -> None:
        """Write the last snapshot once more, where that has failed."""
        self.wait()
        if self.is_behind:
            self._write = self._thread.submit(self._save, *self._last)
            self.wait()

    def facts(self) -> dict[str, float]:
        """Give what a summary says of the checkpoints of this start."""
        return {"saved": self.num_checkpoints, "longest_write_seconds": self.longest_write_seconds}

    def wait(self, timeout: float = math.inf) -> None:
        """Wait until what was begun is written, or has failed.

        However long it takes, it is alive as long as files come and grow.
        """
        write, waited, seen = self._write, 0.0, None
        while write is not None and not write.done() and waited < timeout:
            wait([write], timeout=LOOK_SECONDS)
            waited += LOOK_SECONDS
            if (progress := self._progress()) != seen:
                seen = progress
                self._sign()
        if write is not None and write.done():
            self._sign()
            self._write = None
            write.result()

    def _progress(self) -> list[tuple[str, int]]:
        """Give what is to be seen of a write: its files and their sizes."""
        with suppress(OSError):  # one has got its name meanwhile
            files = self._checkpoints_dir.glob(f"{PARTIAL_PREFIX}*/*")
            return sorted((str(path), path.stat().st_size) for path in files)
        return []

    def take_failure(self) -> str:
        """Give what the last write has failed of, once; else nothing."""
        failure, self._failure = self._failure, ""
        return failure

    def _save(self, snapshot: Snapshot, meta: CheckpointMeta) -> None:
        began = time.perf_counter()
        self.is_behind = True
        try:
            fsync_records(self._checkpoints_dir.parent / "metrics.jsonl")
            saved = save_checkpoint(self._checkpoints_dir, snapshot, meta)
        except OSError as error:
            self._failure = f"the checkpoint of step {meta.global_step + 1:,} could not be written"
            self._failure += f" ({error.strerror or error})"
            return
        self.is_behind = False
        self.num_checkpoints += 1
        if saved.remark:
            self._failure = (f"the checkpoint of step {meta.global_step + 1:,} is whole, but latest"
                             f" and best could not be renewed ({saved.remark})")
        self.prune()
        self.longest_write_seconds = max(self.longest_write_seconds, time.perf_counter() - began)
