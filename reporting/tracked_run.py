"""What trackers need to know of a run: its records as they come, and what they have of it."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.files import read_regular_file, write_atomically
from reporting.metric_names import metrics_of, shown_step
from reporting.metrics_file import valid_records

STATE_NAME = "tracker.json"  # in the run directory
PIECE_BYTES = 2**20  # of metrics.jsonl that are read at once
MAX_NAME_LENGTH = 80  # of a run, in the names that trackers have for it


class Tracker(Protocol):
    """Shows a run elsewhere. Its methods raise any error of the tracker's package."""

    def repeat_from(self, step: int) -> None:
        """Prepare for steps that come again, from `step` on, after a kill."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the numbers of one record."""

    def flush(self) -> None:
        """Pass on what has been taken, as far as that needs no waiting."""

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Take the figures of the end, and wait until all has been passed on."""


class TrackedRun(BaseModel):
    """`tracker.json`: under which id trackers know a run, and how many of its records they have."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(pattern=r"^[0-9a-f-]{1,40}$")
    num_logged: dict[str, int] = {}  # records, by tracker

    @classmethod
    def load(cls, run_dir: Path, *, starts_over: bool = False) -> TrackedRun:
        """Return the tracked run of a run directory; a new one if there is none to go on with."""
        try:
            if not starts_over:
                return cls.model_validate_json(read_regular_file(run_dir / STATE_NAME))
        except (OSError, ValidationError):
            pass  # none yet, or damaged
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        return cls(id=f"{began}-{secrets.token_hex(2)}")

    def save(self, run_dir: Path, tracker: str, num_logged: int) -> None:
        """Record how many records a tracker has. Raises: OSError."""
        counts = self.num_logged | {tracker: num_logged}
        changed = self.model_copy(update={"num_logged": counts})
        write_atomically(run_dir / STATE_NAME, changed.model_dump_json() + "\n")

    def name_of(self, run_name: str) -> str:
        """Return a name that no other tracked run has."""
        return f"{run_name[:MAX_NAME_LENGTH]}-{self.id}"


class RecordReader:
    """Reads the records of a `metrics.jsonl` while they are appended.

    Attributes:
        offset: how many bytes have been read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor, self.offset = path, -1, 0

    def read(self, *, end: int | None = None) -> list[dict[str, Any]]:
        """Return the next records, about a MiB; empty if there are none.

        Args:
            end: do not read beyond this offset.

        Raises:
            OSError: it is not a plain file, or a new launch has replaced it.
        """
        if self._descriptor < 0 and not self._open():
            return []
        size = PIECE_BYTES if end is None else min(PIECE_BYTES, end - self.offset)
        piece = os.pread(self._descriptor, size, self.offset)
        whole = piece[:piece.rfind(b"\n") + 1]
        if not whole and (len(piece) == PIECE_BYTES or end is not None):
            whole = piece  # no record is so long, or the last one is cut off
        self.offset += len(whole)
        if not piece:
            self._check_same_file()
        return valid_records(whole.decode(errors="replace"))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self) -> bool:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise OSError(f"{self._path.name} is not a plain file")
        return True

    def _check_same_file(self) -> None:
        found = self._path.stat(follow_symlinks=False)
        if not os.path.samestat(found, os.fstat(self._descriptor)) or found.st_size < self.offset:
            raise OSError(f"{self._path.name} was replaced by another launch")


@dataclass(frozen=True)
class Start:
    """Where a launch begins.

    Attributes:
        num_bytes: of metrics.jsonl when it began: records of earlier launches.
        first_step: the global step that it begins with.
    """

    num_bytes: int
    first_step: int


class Feed:
    """Passes a run's records on to a tracker, each of them once.

    Records that an earlier launch has passed on are counted and left out. Where more were passed
    on than are left, the run was killed: their steps come again.

    Args:
        num_known: how many records the tracker has.
        save: called with the same after each change.

    Attributes:
        num_passed_on: how many records the tracker has been given.
    """

    def __init__(self, path: Path, tracker: Tracker, *, num_known: int,
                 save: Callable[[int], None]) -> None:
        self._reader, self._tracker = RecordReader(path), tracker
        self._num_known, self._save = num_known, save
        self._num_read = self._num_flushed = self.num_passed_on = 0

    def begin(self, start: Start) -> None:
        """Pass on what the tracker lacks of the earlier launches."""
        offset = -1
        while offset < self._reader.offset < start.num_bytes:
            offset = self._reader.offset
            self._pass_on(self._reader.read(end=start.num_bytes))
        if self._num_known > self._num_read:
            self._tracker.repeat_from(start.first_step + 1)
        self._save(min(self._num_known, self._num_read))
        self._num_known = self._num_flushed = self._num_read

    def pass_on_new(self) -> None:
        """Pass on all records that have come."""
        while records := self._reader.read():
            self._pass_on(records)
            # What came before these has been flushed a while ago: after a kill, a tracker rather
            # gets records twice than not at all.
            self._save(self._num_flushed)
            self._num_flushed = self._num_read

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Pass on what is left and the figures of the end; close the tracker."""
        self.pass_on_new()
        self._tracker.finish(status, figures)
        self._save(self._num_read)
        self._reader.close()

    def _pass_on(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self._num_read += 1
            if self._num_read > self._num_known and (metrics := metrics_of(record)):
                self._tracker.log(shown_step(record), metrics)
                self.num_passed_on += 1
        self._tracker.flush()
