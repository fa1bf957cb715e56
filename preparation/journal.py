"""The progress of a preparation on disk: the request, then one line per finished shard."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from basics.directory_lock import lock_directory
from basics.errors import UserError
from basics.files import append_whole, fsync, write_atomically
from preparation.token_file_writer import DATA_START

MAX_BAD_NAMES = 10  # kept of files that were left out
DOCUMENT_BYTES = 24  # of a row in the table of documents


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFacts(_Line):
    """The identity of a shard, and how much it contains."""

    name: str
    identity: str
    num_documents: int | None  # None if only reading all of it could tell
    num_text_bytes: int | None = None  # the same
    is_bad: bool = False  # could not be counted and is skipped


class Request(_Line):
    """Everything that determines the bytes of the output."""

    source: str
    revision: str
    text_column: str
    tokenizer: str
    validation_fraction: float
    max_documents: int | None
    num_documents: int | None  # of all shards together, at most max_documents
    shards: list[ShardFacts]
    part: str = ""  # such as 2/4, of a preparation that several machines share
    asked_revision: str = ""  # what --revision said, perhaps a branch; `revision` is its commit


class SplitCount(_Line):
    """The contents of one token file so far."""

    num_documents: int = 0
    num_tokens: int = 0
    max_token_id: int = 0
    num_text_bytes: int | None = None  # as UTF-8; None if unknown, as of imported tokens

    def with_more(self, tokens: np.ndarray, *, num_documents: int,
                  num_text_bytes: int | None = None) -> SplitCount:
        """Return the counts after tokens were appended, (n,) uint16. Unknown bytes stay unknown."""
        is_unknown = self.num_text_bytes is None or num_text_bytes is None
        return SplitCount(
            num_documents=self.num_documents + num_documents,
            num_tokens=self.num_tokens + tokens.size,
            max_token_id=max(self.max_token_id, int(tokens.max(initial=0))),
            num_text_bytes=None if is_unknown else self.num_text_bytes + num_text_bytes)

    def metadata(self) -> dict[str, str]:
        """Return the counts as metadata of a token file."""
        return {key: str(value) for key, value in self.model_dump(exclude_none=True).items()}


class Progress(_Line):
    """The sums over all shards finished so far."""

    num_shards: int = 0
    num_documents: int = 0  # with those of the files that were left out
    train: SplitCount = SplitCount(num_text_bytes=0)
    validation: SplitCount = SplitCount(num_text_bytes=0)
    num_bytes: int = 0  # of text, as UTF-8
    num_characters: int = 0
    num_bad_files: int = 0  # left out because they could not be read
    bad_files: list[str] = []  # the first of them

    def of(self, split: str) -> SplitCount:
        return self.train if split == "train" else self.validation

    def without(self, *names: str) -> Progress:
        """Return the progress with files that were left out."""
        return self.model_copy(update={"num_bad_files": self.num_bad_files + len(names),
                                       "bad_files": [*self.bad_files, *names][:MAX_BAD_NAMES]})


class Origin(_Line):
    """What the dataset card says about a source."""

    title: str
    licence: str | list[str]
    languages: list[str]
    hub_name: str | None = None


class Journal:
    """The directory of an unfinished preparation, next to its output, and its progress file.

    A context manager: one process at a time can enter it. The subdirectory `dataset/` becomes the
    output; `raw/` is for downloads.
    """

    def __init__(self, output_dir: Path) -> None:
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir = self.dir / "dataset"
        self.raw_dir = self.dir / "raw"
        self.path = self.dir / "journal.jsonl"
        self._counts_path = self.dir / "counts.jsonl"
        self.request: Request | None = None  # of the earlier launch
        self.counted: list[ShardFacts] = []  # by an earlier launch, before it had a request
        self.progress = Progress()

    def __enter__(self) -> Journal:
        """Create and lock the directory, and read the progress of an earlier launch.

        Raises:
            UserError: another process has locked it.
            OSError: it cannot be created.
        """
        self.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_directory(self.dir)
        except BlockingIOError:
            raise UserError(f"{self.dir}: another process is preparing this dataset; wait for it,"
                            " or name another output") from None
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self.request is None and not self.counted:  # no work to resume
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._lock)

    def begin(self, request: Request) -> None:
        """Start or continue with a request.

        Raises:
            UserError: an earlier launch finished shards of another request.
        """
        if self.request is not None and self.progress.num_shards:
            if changes := differences(self.request, request, self.progress.num_shards):
                raise UserError(
                    f"{self.dir}: an unfinished preparation differs: {changes}; repeat its command"
                    " to finish it, or delete that directory to begin again"
                )
        if not self.progress.num_shards and self.dataset_dir.exists():  # files of another request
            shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir(exist_ok=True)
        lines = [request, *([self.progress] if self.progress.num_shards else [])]
        write_atomically(self.path, "".join(map(_line, lines)), durable=True)
        self._counts_path.unlink(missing_ok=True)  # the request contains them
        self.request = request

    def token_path(self, split: str) -> Path:
        """Return the path of a split's tokens; all tokens of a part are in one file."""
        name = "tokens" if self.request is not None and self.request.part else split
        return self.dataset_dir / f"{name}.safetensors"

    @property
    def table_path(self) -> Path:
        """The table of documents, which belongs to the output if that is a part."""
        is_part = self.request is not None and self.request.part
        return (self.dataset_dir if is_part else self.dir) / "documents.bin"

    def begin_anew(self) -> None:
        """Make an empty directory for a dataset whose work is not continued after a kill.

        Raises:
            UserError: there is a preparation here that can be continued.
        """
        if self.request is not None or self.counted:
            raise UserError(f"{self.dir}: contains an unfinished preparation; name another"
                            " output, or delete that directory")
        shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir()

    def note_count(self, facts: ShardFacts) -> None:
        """Record the counts of one shard, before there is a request with all of them."""
        append_whole(self._counts_path, "\n" + _line(facts))  # a kill may have cut the line before
        fsync(self._counts_path)
        self.counted.append(facts)

    def add(self, progress: Progress) -> None:
        """Record that a shard is finished. Its tokens must have been fsynced."""
        append_whole(self.path, _line(progress))
        fsync(self.path)
        self.progress = progress

    def publish(self, output_dir: Path) -> None:
        """Rename the finished dataset to its final name, and delete the journal."""
        self.dataset_dir.rename(output_dir)  # replaces an empty directory, never one with files
        fsync(output_dir.parent)
        shutil.rmtree(self.dir, ignore_errors=True)

    def _read(self) -> None:
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        with contextlib.suppress(IndexError, ValidationError):  # the last line was cut by a kill
            self.request = Request.model_validate_json(lines[0])
            for line in lines[1:]:
                self.progress = Progress.model_validate_json(line)
        if self._counts_path.exists():
            for line in self._counts_path.read_bytes().splitlines():
                with contextlib.suppress(ValidationError):  # a line cut by a kill
                    self.counted.append(ShardFacts.model_validate_json(line))
        self._check_token_files()

    def _check_token_files(self) -> None:
        """Begin again if the files are shorter than the journal says."""
        counts = {split: self.progress.of(split).num_tokens for split in ("train", "validation")}
        wanted = {self.token_path(split): DATA_START + 2 * num_tokens
                  for split, num_tokens in counts.items() if num_tokens}
        if self.progress.num_documents:
            wanted[self.table_path] = DOCUMENT_BYTES * self.progress.num_documents
        if any(not path.exists() or path.stat().st_size < size for path, size in wanted.items()):
            self.progress = Progress()


def unfinished_request(output_dir: Path) -> Request | None:
    """Return the request of an unfinished preparation; None if there is none."""
    journal = Journal(output_dir)
    journal._read()
    return journal.request


def differences(before: Request, now: Request, num_shards: int) -> str:
    """Describe the changes between two requests that matter; empty if there are none.

    The content of a shard that is not finished yet may change if its number of documents does not:
    a damaged file may have been replaced.
    """
    changes = [f"{key.replace('_', ' ')} was {shown(getattr(before, key))}, is"
               f" {shown(getattr(now, key))}"
               for key in Request.model_fields
               if key not in ("shards", "num_documents", "asked_revision")
               and getattr(before, key) != getattr(now, key)]
    facts_before, facts_now = ({shard.name: shard for shard in request.shards}
                               for request in (before, now))
    unfinished = {shard.name for shard in before.shards[num_shards:]}
    for name in facts_before | facts_now:
        if name not in facts_now:
            changes.append(f"{name} is missing")
        elif name not in facts_before:
            changes.append(f"{name} is new")
        elif facts_before[name].num_documents != facts_now[name].num_documents or (
                name not in unfinished
                and facts_before[name].identity != facts_now[name].identity):
            changes.append(f"{name} has changed")
    return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")


def shown(value: object) -> str:
    """Return the value of an option for an error line."""
    return "none" if value == "" else str(value)


def _line(line: BaseModel) -> str:
    return line.model_dump_json() + "\n"
