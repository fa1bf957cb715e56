"""The directory of an unfinished preparation: what was asked, a line for each finished shard."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from basics.errors import DISK_FULL, UserError
from basics.failpoints import failpoint
from basics.files import append_whole, fsync, locked, write_atomically
from basics.text import gb
from preparation.findings import Findings
from preparation.sources import Record, Request, Shard
from preparation.token_stream import DATA_START, ENDS_DTYPE, Counts
from tokens.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer

TOKENS = "train.safetensors"  # all tokens, until the last ones are moved to the validation file
SOURCES = "sources"  # of a mix: a directory in which each has one of its own
ENDS = "document-ends.bin"  # `DocumentEnds`; in the end only a part has it


class Finished(Record):
    """What there is when a shard is finished, or when the documents have been split."""

    name: str = ""  # of the shard; empty after the split
    identity: str = ""
    counts: Counts = Counts()  # of this shard and all before it; after the split, for training
    validation: Counts | None = None  # after the split
    findings: Findings = Findings()  # the same; after the split, of both parts
    bad_files: list[str] = []  # of this shard: left out because they could not be read


class Journal:
    """The directory of an unfinished preparation, next to its output, and its progress file.

    Its `dataset/` becomes the output; `raw/` is for downloads, `sources/` for those of a mix, each
    of which has such a directory of its own.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.dir = output_dir.parent / f".{output_dir.name}.partial"
        self.dataset_dir = self.dir / "dataset"
        self.raw_dir = self.dir / "raw"
        self.path = self.dir / "journal.jsonl"
        self.ends_path = self.dir / ENDS
        self.sources_dir = self.dir / SOURCES
        self.request: Request | None = None  # of the earlier launch
        self.lines: list[Finished] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock the directory, and read what is in it. Raises: UserError."""
        with locked(
            self.dir,
            busy=f"{self.dir}: another process is preparing this dataset; wait"
            " for it, or name another output",
        ):
            self.read()
            try:
                yield
            finally:
                has_sources = any(self.sources_dir.glob(".*"))
                if not self.lines and not self.raw_dir.exists() and not has_sources:
                    # There is no work to resume.
                    shutil.rmtree(self.dir, ignore_errors=True)

    def read(self) -> None:
        """Read what an earlier launch has left. Begins again if its files are too short."""
        self.lines = []
        with contextlib.suppress(FileNotFoundError, ValueError):  # a kill has cut the last line
            first, *lines = self.path.read_bytes().splitlines()
            self.request = Request.model_validate_json(first)
            for line in lines:
                self.lines.append(Finished.model_validate_json(line))
        counts = self.last.counts
        if not counts.num_documents:  # all that was finished could not be read
            self.lines = []
        for path, num_bytes in (
            (self.dataset_dir / TOKENS, DATA_START + 2 * counts.num_tokens),
            (self.ends_path, ENDS_DTYPE.itemsize * counts.num_documents),
        ):
            if not path.exists() or path.stat().st_size < num_bytes:
                self.lines = []

    @property
    def last(self) -> Finished:
        return self.lines[-1] if self.lines else Finished()

    @property
    def shards(self) -> list[Finished]:
        return [line for line in self.lines if line.name]

    @property
    def is_split(self) -> bool:
        return self.last.validation is not None

    @property
    def bad_files(self) -> list[str]:
        return [name for line in self.lines for name in line.bad_files]

    def begin(self, request: Request, shards: Sequence[Shard], tokenizer: Tokenizer) -> None:
        """Start or continue with a request; write the tokenizer's file, if it has one.

        Files that are not finished yet may change: a damaged one may have been replaced. Raises:
        UserError: an earlier launch finished shards of another request, or of other files, or
        sources of a mix.
        """
        if self.sources_dir.exists():
            raise UserError(
                f"{self.dir}: an unfinished mix of sources; repeat its command, or delete it"
            )
        if self.lines:
            assert self.request is not None
            changes = request.difference(self.request)
            for line, shard in zip_longest(self.shards, shards[: len(self.shards)]):
                if shard is None or (shard.name, shard.identity) != (line.name, line.identity):
                    changes = changes or (
                        f"{line.name} has changed, or files before it were added or removed"
                    )
            if changes:
                raise UserError(
                    f"{self.dir}: an unfinished preparation differs: {changes}; repeat"
                    " its command, or delete it"
                )
        else:
            shutil.rmtree(self.dataset_dir, ignore_errors=True)  # of another request
        self.begin_dataset(tokenizer)
        records = [record.model_dump_json() + "\n" for record in (request, *self.lines)]
        write_atomically(self.path, "".join(records), durable=True)

    def begin_dataset(self, tokenizer: Tokenizer) -> None:
        """Create the directory of the dataset, with the tokenizer's file, if it has one."""
        self.dataset_dir.mkdir(exist_ok=True)
        if isinstance(tokenizer, FileTokenizer):
            write_atomically(self.dataset_dir / TOKENIZER_FILE, tokenizer.content, durable=True)

    def add(self, line: Finished) -> None:
        """Record that a shard is finished, or the split. Its tokens must have been fsynced."""
        append_whole(self.path, line.model_dump_json() + "\n")
        fsync(self.path)
        self.lines.append(line)

    def forget(self) -> None:
        """Drop what is finished: the next launch begins again, also with other files."""
        self.path.unlink()
        self.lines = []

    def publish(self) -> None:
        """Rename the finished dataset to its final name, and delete the journal."""
        failpoint("provide")
        self.dataset_dir.rename(self.output_dir)  # replaces an empty directory, never files
        fsync(self.output_dir.parent)
        shutil.rmtree(self.dir, ignore_errors=True)


def check_output_dir(output_dir: Path) -> Path:
    """Return the output directory with links resolved. Raises: UserError: it is not empty, or
    cannot be replaced."""
    output_dir = Path(os.path.realpath(output_dir))  # Path.resolve() raises on loops of links
    if output_dir.is_mount() or output_dir == Path.cwd():
        raise UserError(
            f"{output_dir}: is a mount point or the current directory; name a directory in it"
        )
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir}: is not empty; name another output, or delete it yourself")
    return output_dir


def check_disk_space(directory: Path, num_bytes: float, content: str) -> None:
    """Raise UserError if the disk has less free space than this."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(
            f"{directory.parent}: {gb(free)} free; {content} need {gb(num_bytes)} or"
            " more: free some space, or name an output on another disk",
            DISK_FULL,
        )
