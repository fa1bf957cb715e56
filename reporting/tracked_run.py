"""What trackers need to know of a run: its records as they come, and what they have of it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from basics.files import open_regular, read_regular_file, write_atomically
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
        """Send what has been taken, as far as that needs no waiting."""

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Take the figures of the end, and wait until all has been sent."""


@dataclass(frozen=True)
class Start:
    """Where a launch begins.

    Attributes:
        num_bytes: of metrics.jsonl when it began: records of earlier launches.
        first_step: the global step that it begins with.
    """

    num_bytes: int
    first_step: int

    def earlier(self, other: Start | None) -> Start:
        """Return where the first of two launches begins, as far as the second has kept that."""
        return self if other is None else Start(min(self.num_bytes, other.num_bytes),
                                                min(self.first_step, other.first_step))


class Sent(BaseModel):
    """How many of a run's records a tracker has: at least `num_logged`, at most `num_sent`.

    Attributes:
        start: of the first launch that the tracker has not been told of.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_logged: int = 0
    num_sent: int = 0
    start: Start | None = None


class TrackedRun(BaseModel):
    """`tracker.json`: under which id trackers know a run, and what each of them has of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(pattern=r"^[0-9a-f-]{1,40}$")
    trackers: dict[str, Sent] = {}

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

    def sent_to(self, tracker: str) -> Sent:
        return self.trackers.get(tracker, Sent())

    def at_launch(self, tracker: str, start: Start) -> TrackedRun:
        """Return this tracked run when a launch begins, of which no tracker has been told yet."""
        known = {tracker: Sent()} | self.trackers
        return self.model_copy(update={"trackers": {
            name: sent.model_copy(update={"start": start.earlier(sent.start)})
            for name, sent in known.items()}})

    def save(self, run_dir: Path, tracker: str, sent: Sent) -> None:
        """Record what a tracker has. Raises: OSError."""
        changed = self.model_copy(update={"trackers": self.trackers | {tracker: sent}})
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
        if self._descriptor < 0:
            try:
                self._descriptor = open_regular(self._path)
            except FileNotFoundError:
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

    def _check_same_file(self) -> None:
        found = self._path.stat(follow_symlinks=False)
        if not os.path.samestat(found, os.fstat(self._descriptor)) or found.st_size < self.offset:
            raise OSError(f"{self._path.name} was replaced by another launch")


class Feed:
    """Sends a run's records to a tracker, each of them once.

    Records that an earlier launch has sent are counted and left out. Where more were sent than are
    left, the run was killed: their steps come again.

    Args:
        sent: what the tracker has.
        save: called with the same before each change.

    Attributes:
        num_new: how many records the tracker has been given.
    """

    def __init__(self, path: Path, tracker: Tracker, sent: Sent, *,
                 save: Callable[[Sent], None]) -> None:
        self._reader, self._tracker = RecordReader(path), tracker
        self._sent, self._save = sent, save
        self._num_read = self.num_new = 0

    def begin(self) -> None:
        """Send what the tracker lacks of earlier launches; tell it of steps that come again."""
        if (start := self._sent.start) is None:
            return
        num_logged, offset = self._sent.num_logged, -1
        while offset < self._reader.offset < start.num_bytes:
            offset = self._reader.offset
            self._send(self._reader.read(end=start.num_bytes), num_logged=num_logged)
        if self._sent.num_sent > self._num_read:
            self._tracker.repeat_from(start.first_step + 1)
        self._change(Sent(num_logged=min(num_logged, self._num_read), num_sent=self._num_read))

    def send_new(self) -> None:
        """Send all records that have come."""
        while records := self._reader.read():
            # What came before these has arrived a while ago: after a kill, a tracker rather gets
            # records twice than not at all.
            self._send(records, num_logged=max(self._sent.num_logged, self._num_read))

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Send what is left and the figures of the end; close the tracker."""
        self.send_new()
        self._tracker.finish(status, figures)
        self._change(Sent(num_logged=self._num_read, num_sent=self._num_read))
        self._reader.close()

    def _send(self, records: list[dict[str, Any]], *, num_logged: int) -> None:
        """Send records; that they may have been is saved first, for a kill meanwhile."""
        first_new = max(self._sent.num_logged, self._num_read) + 1
        self._change(self._sent.model_copy(update={
            "num_logged": num_logged,
            "num_sent": max(self._sent.num_sent, self._num_read + len(records))}))
        for record in records:
            self._num_read += 1
            if self._num_read >= first_new and (metrics := metrics_of(record)):
                self._tracker.log(shown_step(record), metrics)
                self.num_new += 1
        self._tracker.flush()

    def _change(self, sent: Sent) -> None:
        if sent != self._sent:
            self._save(sent)
            self._sent = sent
