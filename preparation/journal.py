"""The progress of a preparation on disk: what was asked, then a line for each finished shard."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from basics.errors import DISK_FULL, UserError
from basics.failpoints import failpoint
from basics.files import append_whole, fsync, lock_directory, write_atomically
from basics.text import gb

if TYPE_CHECKING:
    from preparation.sources import Shard

MAX_BAD_NAMES = 10  # kept of files that were left out
HEADER_BYTES = 4096  # reserved in token files for the header, which is known only at the end
DATA_START = 8 + HEADER_BYTES
DOCUMENT_BYTES = 24  # of a row in the table of documents
TOKENS, TABLE, PART_FILE = "train.safetensors", "documents.bin", "part.json"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Line):
    """What a preparation was asked for, besides the files of its source."""

    source: str
    tokenizer: str
    revision: str = ""
    asked_revision: str = ""  # what --revision said, perhaps a branch; `revision` is its commit
    text_column: str = ""
    validation_fraction: float = 0.01
    max_documents: int | None = None
    part: str = ""  # such as 2/4, of a preparation that several machines share


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
    """The sums over all finished shards. Before the documents are split, all are in `train`."""

    train: SplitCount = SplitCount(num_text_bytes=0)
    validation: SplitCount = SplitCount(num_text_bytes=0)
    num_characters: int = 0
    num_empty: int = 0  # documents without text, counted at the end
    num_bad_files: int = 0  # left out because they could not be read
    bad_files: list[str] = []  # the first of them

    @property
    def num_documents(self) -> int:
        return self.train.num_documents + self.validation.num_documents

    @property
    def num_tokens(self) -> int:
        return self.train.num_tokens + self.validation.num_tokens

    @property
    def num_bytes(self) -> int:
        """The bytes of text; 0 if unknown."""
        return (self.train.num_text_bytes or 0) + (self.validation.num_text_bytes or 0)

    def of(self, split: str) -> SplitCount:
        return self.train if split == "train" else self.validation

    def changed(self, **values: object) -> Progress:
        return self.model_copy(update=values)

    def without(self, *names: str) -> Progress:
        """Return the progress with files that were left out."""
        return self.changed(num_bad_files=self.num_bad_files + len(names),
                            bad_files=[*self.bad_files, *names][:MAX_BAD_NAMES])


class Origin(_Line):
    """What the dataset card says about a source."""

    title: str
    licence: str | list[str]
    languages: list[str]
    hub_name: str | None = None


class _Finished(_Line):
    name: str  # of a shard; empty when the documents have been split
    identity: str
    progress: Progress


class Journal:
    """The directory of an unfinished preparation, next to its output, and its progress file.

    A context manager: one process at a time can enter it. The subdirectory `dataset/` becomes the
    output; `raw/` is for downloads.
    """

    def __init__(self, output_dir: Path) -> None:
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir, self.raw_dir = self.dir / "dataset", self.dir / "raw"
        self.path = self.dir / "journal.jsonl"
        self.request: Request | None = None  # of the earlier launch
        self._lines: list[_Finished] = []

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
        self.read()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if self.request is None:  # no work to resume
            shutil.rmtree(self.dir, ignore_errors=True)
        os.close(self._lock)

    @property
    def progress(self) -> Progress:
        return self._lines[-1].progress if self._lines else Progress()

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

        Raises:
            UserError: an earlier launch finished shards of another request, or of other files.
        """
        if self._lines and (changes := self._differences(request, shards)):
            raise UserError(f"{self.dir}: an unfinished preparation differs: {changes}; repeat its"
                            " command to finish it, or delete that directory to begin again")
        if not self._lines and self.dataset_dir.exists():  # files of another request
            shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir(exist_ok=True)
        # A kill may have cut the last line.
        write_atomically(self.path, "".join(map(_line, [request, *self._lines])), durable=True)
        self.request = request

    def begin_anew(self) -> None:
        """Make an empty directory for a dataset whose work is not continued after a kill.

        Raises:
            UserError: there is a preparation here that can be continued.
        """
        if self.request is not None:
            raise UserError(f"{self.dir}: contains an unfinished preparation; name another"
                            " output, or delete that directory")
        shutil.rmtree(self.dataset_dir, ignore_errors=True)
        self.dataset_dir.mkdir()

    def add(self, progress: Progress, *, name: str = "", identity: str = "") -> None:
        """Record that a shard is finished. Its tokens must have been fsynced."""
        line = _Finished(name=name, identity=identity, progress=progress)
        append_whole(self.path, _line(line))
        fsync(self.path)
        self._lines.append(line)

    def publish(self, output_dir: Path) -> None:
        """Rename the finished dataset to its final name, and delete the journal."""
        failpoint("provide")
        self.dataset_dir.rename(output_dir)  # replaces an empty directory, never one with files
        fsync(output_dir.parent)
        shutil.rmtree(self.dir, ignore_errors=True)

    def read(self) -> None:
        """Read what an earlier launch has left. Begins again if its files are too short."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        self._lines = []
        with contextlib.suppress(IndexError, ValidationError):  # the last line was cut by a kill
            self.request = Request.model_validate_json(lines[0])
            for line in lines[1:]:
                self._lines.append(_Finished.model_validate_json(line))
        wanted = {self.dataset_dir / f"{split}.safetensors": DATA_START + 2 * count.num_tokens
                  for split in ("train", "validation")
                  if (count := self.progress.of(split)).num_tokens}
        wanted[self.table_path] = DOCUMENT_BYTES * self.progress.train.num_documents
        if any(size and (not path.exists() or path.stat().st_size < size)
               for path, size in wanted.items()):
            self._lines = []

    def _differences(self, request: Request, shards: Sequence[Shard]) -> str:
        """Describe the changes that matter; empty if there are none.

        Files that are not finished yet may change: a damaged one may have been replaced.
        """
        assert self.request is not None
        changes = [f"{key.replace('_', ' ')} was {shown(getattr(self.request, key))}, is"
                   f" {shown(getattr(request, key))}"
                   for key in Request.model_fields
                   if key != "asked_revision"
                   and getattr(self.request, key) != getattr(request, key)]
        for number, line in enumerate(self._lines[:self.num_finished]):
            if number >= len(shards) or shards[number].name != line.name:
                changes.append(f"{line.name} is missing, or there are new files before it")
                break
            if shards[number].identity != line.identity:
                changes.append(f"{line.name} has changed")
        return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if changes[3:] else "")


def shown(value: object) -> str:
    """Return the value of an option for an error line."""
    return "none" if value == "" else str(value)


def _line(line: BaseModel) -> str:
    return line.model_dump_json() + "\n"


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
