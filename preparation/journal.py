"""How far a preparation has come: what was asked for, then a line for each whole shard."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from basics.errors import UserError
from preparation.token_file_writer import DATA_START


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFacts(_Line):
    """What tells that a shard is the same as before, and what it holds."""

    name: str
    identity: str
    num_documents: int
    num_text_bytes: int | None = None  # None where only reading it all would tell
    is_bad: bool = False  # could not be counted, and is left out


class Request(_Line):
    """All that the bytes of the output follow from."""

    source: str
    revision: str
    text_column: str
    tokenizer: str
    validation_fraction: float
    max_documents: int | None
    num_documents: int  # in all, no more than max_documents
    shards: list[ShardFacts]


class SplitCount(_Line):
    """What stands in one token file so far."""

    num_documents: int = 0
    num_tokens: int = 0
    max_token_id: int = 0

    def metadata(self) -> dict[str, str]:
        """Give the counts as a token file's metadata."""
        return {key: str(value) for key, value in self.model_dump().items()}


class Progress(_Line):
    """What all shards so far have come to."""

    num_shards: int = 0
    train: SplitCount = SplitCount()
    validation: SplitCount = SplitCount()
    num_bytes: int = 0  # of text, as UTF-8
    num_characters: int = 0
    bad_shards: list[str] = []

    def of(self, split: str) -> SplitCount:
        return self.train if split == "train" else self.validation


class Journal:
    """The directory of an unfinished preparation, beside its output, and the file that says how
    far it is. A context: one process at a time can be in it.

    `dataset/` in it is what will be the output; `raw/` is for what is fetched on the way.
    """

    def __init__(self, output_dir: Path) -> None:
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir = self.dir / "dataset"
        self.raw_dir = self.dir / "raw"
        self.path = self.dir / "journal.jsonl"
        self._counts_path = self.dir / "counts.jsonl"
        self.request: Request | None = None  # of the earlier start
        self.counted: list[ShardFacts] = []  # by one that had no request yet
        self.progress = Progress()

    def __enter__(self) -> Journal:
        """Take the directory, and read how far an earlier start came.

        Raises:
            UserError: another process is at it.
            OSError: it cannot be made.
        """
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.dir}: another process is preparing this dataset; wait for it,"
                            " or name another output") from None
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self.request is None and not self.counted:  # nothing was begun
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._lock)

    def begin(self, request: Request) -> None:
        """Go on with a request, or start with it.

        Raises:
            UserError: the earlier start was asked for something else.
        """
        if self.request is not None and self.progress.num_shards:  # else nothing is lost
            if changes := differences(self.request, request, self.progress.num_shards):
                raise UserError(
                    f"{self.dir}: an unfinished preparation differs: {changes}; repeat its command"
                    " to finish it, or delete that directory to start again"
                )
        self.dataset_dir.mkdir(exist_ok=True)
        whole = self.path.with_suffix(".new")
        with whole.open("wb") as file:
            _write_line(file, request)  # with the shards that have been mended
            if self.progress.num_shards:
                _write_line(file, self.progress)
        whole.replace(self.path)
        self._counts_path.unlink(missing_ok=True)  # they are in the request
        self.request = request

    def note_count(self, facts: ShardFacts) -> None:
        """Keep what a shard was counted to hold, before there is a request with all of them."""
        with self._counts_path.open("ab") as file:
            file.write(b"\n")  # behind what a kill may have left of a line
            _write_line(file, facts)
        self.counted.append(facts)

    def add(self, progress: Progress) -> None:
        """Note that a shard is done. What it came to must be on the disk."""
        with self.path.open("ab") as file:
            _write_line(file, progress)
        self.progress = progress

    def publish(self, output_dir: Path) -> None:
        """Give the dataset its name, and forget how it was made."""
        self.dataset_dir.rename(output_dir)  # takes the place of an empty directory, no other
        directory = os.open(output_dir.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _read(self) -> None:
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        with contextlib.suppress(IndexError, ValidationError):  # killed while a line was written
            self.request = Request.model_validate_json(lines[0])
            for line in lines[1:]:
                self.progress = Progress.model_validate_json(line)
        if self._counts_path.exists():
            for line in self._counts_path.read_bytes().splitlines():
                with contextlib.suppress(ValidationError):  # of a line cut short
                    self.counted.append(ShardFacts.model_validate_json(line))
        self._keep_only_what_is_there()

    def _keep_only_what_is_there(self) -> None:
        """Begin anew where the token files do not hold what the journal says."""
        for split in ("train", "validation"):
            path = self.dataset_dir / f"{split}.safetensors"
            num_tokens = self.progress.of(split).num_tokens
            wanted = DATA_START + 2 * num_tokens
            if num_tokens and (not path.exists() or path.stat().st_size < wanted):
                self.progress = Progress()


def unfinished_request(output_dir: Path) -> Request | None:
    """Give what an unfinished preparation was asked for; None, if there is none."""
    journal = Journal(output_dir)
    journal._read()
    return journal.request


def differences(before: Request, now: Request, num_shards: int) -> str:
    """Say what changed between two requests; empty where nothing did that matters. Behind the
    shards that are done, one may have been mended, if it has as many documents."""
    changes = [f"{key.replace('_', ' ')} was {getattr(before, key)}, is {getattr(now, key)}"
               for key in Request.model_fields if key not in ("shards", "num_documents")
               and getattr(before, key) != getattr(now, key)]
    facts_before, facts_now = ({shard.name: shard for shard in request.shards}
                               for request in (before, now))
    undone = {shard.name for shard in before.shards[num_shards:]}
    for name in facts_before | facts_now:
        if name not in facts_now:
            changes.append(f"{name} is gone")
        elif name not in facts_before:
            changes.append(f"{name} is new")
        elif facts_before[name].identity != facts_now[name].identity and (
                name not in undone
                or facts_before[name].num_documents != facts_now[name].num_documents):
            changes.append(f"{name} has changed")
    return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")


def _write_line(file: BinaryIO, line: BaseModel) -> None:
    file.write(line.model_dump_json().encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
