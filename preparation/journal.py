"""The progress of a preparation on disk: what was asked, then a line for each finished shard."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from basics.errors import DISK_FULL, UserError
from basics.failpoints import failpoint
from basics.files import append_whole, fsync, locked, write_atomically
from basics.text import gb

if TYPE_CHECKING:
    from preparation.sources import Shard

MAX_BAD_NAMES = 10  # kept of files that were left out
HEADER_BYTES = 4096  # reserved in token files for the header, which is known only at the end
DATA_START = 8 + HEADER_BYTES
DOCUMENT_BYTES = 24  # of a row in the table of documents
TOKENS, TABLE, PART_FILE = "train.safetensors", "documents.bin", "part.json"


class Line(BaseModel):
    """What is written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(Line):
    """What a preparation was asked for, besides the files of its source."""

    source: str
    tokenizer: str = Field(pattern="^(gpt2|bytes|sha256:.*)$")
    revision: str = ""
    asked_revision: str = ""  # what --revision said, perhaps a branch; `revision` is its commit
    text_column: str = ""
    validation_fraction: float = Field(0.01, gt=0, lt=1)
    max_documents: int | None = Field(None, ge=1)
    part: str = ""  # such as 2/4, of a preparation that several machines share

    def difference(self, earlier: Request) -> str:
        """Say how it differs from an earlier one; empty if it does not."""
        changes = [f"{key.replace('_', ' ')} was {value or 'none'}, is {new or 'none'}"
                   for key, value in earlier if key != "asked_revision"
                   and value != (new := getattr(self, key))]
        return ", ".join(changes)


class SplitCount(Line):
    """The contents of one token file so far."""

    num_documents: NonNegativeInt = 0
    num_tokens: NonNegativeInt = 0
    max_token_id: NonNegativeInt = 0
    num_text_bytes: NonNegativeInt | None = None  # as UTF-8; None if unknown, as of imported tokens

    def __add__(self, more: SplitCount) -> SplitCount:
        is_unknown = self.num_text_bytes is None or more.num_text_bytes is None
        return SplitCount(
            num_documents=self.num_documents + more.num_documents,
            num_tokens=self.num_tokens + more.num_tokens,
            max_token_id=max(self.max_token_id, more.max_token_id),
            num_text_bytes=None if is_unknown else self.num_text_bytes + more.num_text_bytes)

    def metadata(self) -> dict[str, str]:
        """Return the counts as metadata of a token file."""
        return {key: str(value) for key, value in self.model_dump(exclude_none=True).items()}


class Progress(Line):
    """The sums over all finished shards. Before the documents are split, all are in `train`, and
    its largest token id is not known."""

    train: SplitCount = SplitCount(num_text_bytes=0)
    validation: SplitCount = SplitCount(num_text_bytes=0)
    num_characters: NonNegativeInt = 0
    num_empty: NonNegativeInt = 0  # documents without text, counted at the end
    num_bad_files: NonNegativeInt = 0  # left out because they could not be read
    bad_files: list[str] = []  # the first of them

    @property
    def total(self) -> SplitCount:
        return self.train + self.validation

    def changed(self, **values: object) -> Progress:
        return self.model_copy(update=values)

    def without(self, *names: str) -> Progress:
        """Return the progress with files that were left out."""
        return self.changed(num_bad_files=self.num_bad_files + len(names),
                            bad_files=[*self.bad_files, *names][:MAX_BAD_NAMES])


class Origin(Line):
    """What the dataset card says about a source."""

    title: str
    licence: str | list[str] = "unknown"
    languages: list[str] = ["en"]
    hub_name: str | None = None


class _Finished(Line):
    name: str  # of a shard; empty when the documents have been split
    identity: str
    progress: Progress


class Journal:
    """The directory of an unfinished preparation, next to its output, and its progress file.

    The subdirectory `dataset/` becomes the output; `raw/` is for downloads.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir, self.raw_dir = self.dir / "dataset", self.dir / "raw"
        self.path = self.dir / "journal.jsonl"
        self.request: Request | None = None  # of the earlier launch
        self._lines: list[_Finished] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock the directory, and read the progress of an earlier launch.

        Raises:
            UserError: another process has locked it, or it cannot be created.
        """
        with locked(self.dir, busy=f"{self.dir}: another process is preparing this dataset; wait"
                                   " for it, or name another output"):
            self.read()
            try:
                yield
            finally:
                if self.request is None:  # no work to resume
                    shutil.rmtree(self.dir, ignore_errors=True)

    def read(self) -> None:
        """Read what an earlier launch has left. Begins again if its files are too short."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        self._lines = []
        with contextlib.suppress(IndexError, ValidationError):  # the last line was cut by a kill
            self.request = Request.model_validate_json(lines[0])
            for line in lines[1:]:
                self._lines.append(_Finished.model_validate_json(line))
        progress = self.progress
        for path, size in (
                (self.dataset_dir / TOKENS, DATA_START + 2 * progress.train.num_tokens),
                (self.dataset_dir / "validation.safetensors",
                 (DATA_START + 2 * progress.validation.num_tokens) * self.is_split),
                (self.table_path, DOCUMENT_BYTES * progress.train.num_documents)):
            if size and (not path.exists() or path.stat().st_size < size):
                self._lines = []

    @property
    def progress(self) -> Progress:
        return self._lines[-1].progress if self._lines else Progress()

    @property
    def is_split(self) -> bool:
        return self.progress.validation.num_tokens > 0

    @property
    def num_finished(self) -> int:
        """The number of finished shards."""
        return sum(1 for line in self._lines if line.name)

    @property
    def table_path(self) -> Path:
        """The table of documents, which belongs to the output if that is a part."""
        is_part = self.request is not None and self.request.part
        return (self.dataset_dir if is_part else self.dir) / TABLE

    def begin(self, request: Request, shards: Sequence[Shard]) -> None:
        """Start or continue with a request.

        Files that are not finished yet may change: a damaged one may have been replaced.

        Raises:
            UserError: an earlier launch finished shards of another request, or of other files.
        """
        if self._lines:
            assert self.request is not None
            changes = request.difference(self.request)
            for number, line in enumerate(self._lines[:self.num_finished]):
                if number >= len(shards) or shards[number].name != line.name:
                    changes = changes or f"{line.name} is missing, or there are new files before it"
                elif shards[number].identity != line.identity:
                    changes = changes or f"{line.name} has changed"
            if changes:
                raise UserError(f"{self.dir}: an unfinished preparation differs: {changes}; repeat"
                                " its command to finish it, or delete that directory to begin"
                                " again")
        elif self.dataset_dir.exists():  # files of another request
            shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir(exist_ok=True)
        # A kill may have cut the last line.
        lines = [line.model_dump_json() + "\n" for line in (request, *self._lines)]
        write_atomically(self.path, "".join(lines), durable=True)
        self.request = request

    def begin_anew(self, num_bytes: float) -> None:
        """Make an empty directory for a dataset whose work is not continued after a kill.

        Raises:
            UserError: there is a preparation here that can be continued, or the disk is too small.
        """
        if self.request is not None:
            raise UserError(f"{self.dir}: contains an unfinished preparation; name another"
                            " output, or delete that directory")
        shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir()
        check_disk_space(self.dir, num_bytes, "tokens")

    def add(self, progress: Progress, shard: Shard | None = None) -> None:
        """Record that a shard is finished, or the split. Its tokens must have been fsynced."""
        line = _Finished(name=shard.name if shard else "",
                         identity=shard.identity if shard else "", progress=progress)
        append_whole(self.path, line.model_dump_json() + "\n")
        fsync(self.path)
        self._lines.append(line)

    def publish(self) -> None:
        """Rename the finished dataset to its final name, and delete the journal."""
        failpoint("provide")
        self.dataset_dir.rename(self.output_dir)  # replaces an empty directory, never files
        fsync(self.output_dir.parent)
        shutil.rmtree(self.dir, ignore_errors=True)


def check_output_dir(output_dir: Path) -> Path:
    """Return the output directory with links resolved; it must be empty or missing.

    Raises:
        UserError: it is not empty, or it cannot be replaced.
    """
    try:
        output_dir = output_dir.resolve()
    except RuntimeError:  # raised by Python 3.11
        raise UserError(f"{output_dir}: is a loop of links; name another output") from None
    if output_dir.is_mount() or output_dir == Path.cwd():
        raise UserError(f"{output_dir}: is a mount point or the current directory; name a directory"
                        " in it")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir}: is not empty; name another output, or delete it yourself")
    return output_dir


def check_disk_space(directory: Path, num_bytes: float, content: str) -> None:
    """Raise UserError if the disk has less free space than this."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(f"{directory.parent}: {gb(free)} free; {content} need {gb(num_bytes)} or"
                        " more: free some space, or name an output on another disk", DISK_FULL)
