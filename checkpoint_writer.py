"""Checkpoints written behind training's back."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from checkpointing import CheckpointMeta, save_checkpoint
from training_step import Snapshot, SnapshotBuffers, TrainingState


class CheckpointWriter:
    """Copies a state to host memory and writes it in a thread, one at a time. Rank 0.

    A crash while it writes leaves what was whole before. An error of a write is raised where the
    next one begins, or by `wait`.
    """

    def __init__(self, checkpoints_dir: Path) -> None:
        self._checkpoints_dir = checkpoints_dir
        self._buffers = SnapshotBuffers()
        # Python waits for it before it ends, also after an exception elsewhere.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        self.num_checkpoints = 0
        self.longest_write_seconds = 0.0

    def save(self, state: TrainingState, meta: CheckpointMeta) -> None:
        """Take a snapshot once the last one is written; return as soon as it is taken."""
        self.wait()
        self.num_checkpoints += 1
        self._write = self._thread.submit(self._save, self._buffers.take(state), meta)

    def wait(self) -> None:
        """Wait until what was begun is written. Raises: what the write has raised."""
        if self._write is not None:
            self._write.result()
            self._write = None

    def _save(self, snapshot: Snapshot, meta: CheckpointMeta) -> None:
        began = time.perf_counter()
        save_checkpoint(self._checkpoints_dir, snapshot, meta)
        self.longest_write_seconds = max(self.longest_write_seconds, time.perf_counter() - began)
