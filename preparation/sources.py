"""Where documents come from: what a command line names, and what every source offers."""

import codecs
import contextlib
import hashlib
import io
import resource
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil
from pydantic import BaseModel, ConfigDict, Field

from basics.errors import UserError
from basics.text import counted
from preparation.cutting import Cuts, Piece, cut_document

STDLIB_PIECE_CHARACTERS = 3000
CHUNK_BYTES = 2**20  # of text that is read at once, of small documents
WARNING_SHARE = 0.001  # characters that replace others, for each byte of text
MAX_READER_BYTES = 2**32  # of memory, beyond what there is when reading begins
MAX_NAMES = 5  # that are printed, of files that are left out; a dataset's card has all
IS_EMPTY = "is empty"  # why a file is left out
OLD_TEXT = "text of an older Windows program: --encoding cp1252"
TOO_LARGE = (
    f"reading it needs more than {MAX_READER_BYTES >> 30} GiB of memory; wanted smaller rows, and"
    " JSON lines instead of a large array"
)
FACTS = ("title", "licence", "languages", "hub_name")  # may differ
T = TypeVar("T")


def _checked_encoding(_: click.Context, option: click.Parameter, name: str) -> str:
    """Return the name of an encoding, empty for UTF-8. Raises: UserError: there is none."""
    try:
        io.TextIOWrapper(io.BytesIO(), name or "utf-8")  # refuses hex too, which is none of text
    except LookupError:
        raise UserError(
            f"{option.opts[0]} {name}: is no encoding that Python knows; wanted one"
            " such as cp1252, latin-1, utf-16 or shift_jis"
        ) from None
    return "" if codecs.lookup(name or "utf-8").name == "utf-8" else name


def source_options(command: Callable) -> Callable:
    """Add the options to a command that `SourceOptions` has."""
    for option in (
        click.option(
            "--document-separator",
            default="",
            metavar="TEXT",
            help="What stands between the documents of a text file, such as '<|endoftext|>'.",
        ),
        click.option(
            "--encoding",
            default="",
            metavar="NAME",
            callback=_checked_encoding,
            help="Of text, JSON and CSV files, such as cp1252 or utf-16.",
        ),
        click.option(
            "--text-column",
            default="text",
            show_default=True,
            help="Column that holds the text; a.b is b inside of a.",
        ),
        click.option("--revision", default="", help="Commit, branch or tag on the hub."),
        click.option("--split", default="", help="Split of the dataset.  [default: train]"),
        click.option("--config", "--subset", default="", help="Config of the dataset."),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class SourceOptions:
    """The part of a command line that names documents; empty if it is not given."""

    source: str
    config: str = ""
    split: str = ""
    revision: str = ""  # a commit, branch or tag of a dataset on the hub
    text_column: str = "text"
    encoding: str = ""  # of files that are not parquet; empty for UTF-8
    document_separator: str = ""  # in text files

    def label(self) -> str:
        """Return the name of the source with its config and split, as valid Unicode on a line."""
        label = self.source
        if self.config:
            label += f" {self.config}"
        if self.split:
            label += f" split {self.split}"
        return printable(label)


class Record(BaseModel):
    """What is written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(Record):
    """What a preparation was asked for."""

    source: str
    revision: str = ""  # the commit of a hub dataset
    files: str = ""  # the digest of the names, sizes and times of the files
    text_column: str = ""
    encoding: str = ""
    document_separator: str = ""
    tokenizer: str = Field(default="", pattern="^(gpt2|bytes|sha256:.*|)$")
    validation_fraction: float = Field(default=0.01, gt=0, lt=1)
    max_documents: int | None = Field(default=None, ge=1)
    # What the dataset card says about the source.
    title: str = ""
    licence: str | list[str] = "unknown"
    languages: list[str] = []
    hub_name: str | None = None

    def changed(self, **values: object) -> "Request":
        return self.model_copy(update=values)

    def difference(self, earlier: "Request") -> str:
        """Say how it differs from an earlier one; empty if it does not."""
        changes = []
        for key, value in earlier:
            new = getattr(self, key)
            if key not in FACTS and value != new:
                name = key.replace("_", " ")
                is_now = str(new or "none")[:12]
                changes.append(f"{name} was {value or 'none'}, is {is_now}")
        return ", ".join(changes)


@dataclass(frozen=True)
class Chunk:
    """Some documents in a row."""

    position: Any  # JSON: from there `Source.chunks` yields this chunk, and all that follow
    pieces: Iterable[Piece]
    place: str  # where that is in the source, for people
    left_out: dict[str, str] = field(default_factory=dict)  # files and reasons


class Source(ABC):
    """Documents in a fixed order."""

    is_text = False  # files of text: --encoding and --document-separator are for them
    num_text_bytes = 0  # at least, as far as it is known

    def __init__(self, request: Request, left_out: dict[str, str] | None = None) -> None:
        self.request = request  # as far as it says which documents these are
        self.left_out = left_out or {}  # files that are not read, and reasons

    @abstractmethod
    def chunks(self, position: Any, cuts: Cuts) -> Iterator[Chunk]:
        """Yield all documents from a position on, None for the first. Raises: UserError.

        The same source yields the same pieces, whichever position it begins at.
        """


class Texts(Source):
    """Texts in memory, one document each."""

    def __init__(self, request: Request, texts: Sequence[str]) -> None:
        self._texts = [text.encode("utf-8", "replace") for text in texts]
        super().__init__(request.changed(files=hashlib.sha256(b"\0".join(self._texts)).hexdigest()))
        self.num_text_bytes = sum(map(len, self._texts))

    def chunks(self, position: Any, cuts: Cuts) -> Iterator[Chunk]:
        first = position or 0
        sizes = ((text, len(text)) for text in self._texts[first:])
        for group, _ in grouped(sizes, CHUNK_BYTES):
            pieces = (piece for text in group for piece in cut_document([text], cuts, "a text"))
            yield Chunk(first, pieces, "")
            first += len(group)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let allocations fail that would give this process much more memory than it has now.

    A file of 1 MB that was not made for good may unpack to one row of any size.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = psutil.Process().memory_info().data + MAX_READER_BYTES
    if resource.RLIM_INFINITY != before[1] < limit:
        limit = before[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def first_left_out(left_out: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return files that are left out, with the reasons: a few to print, empty ones last."""
    return sorted(left_out.items(), key=lambda found: found[1] == IS_EMPTY)[:MAX_NAMES]


def warnings(
    source: Source, num_replaced: int, num_text_bytes: int, markers: Set[str]
) -> Iterator[str]:
    """Yield what may be wrong with a source, as far as it is read."""
    request = source.request
    if num_replaced > WARNING_SHARE * num_text_bytes:
        yield (
            f"bytes that are not {request.encoding or 'UTF-8'}:"
            f" {counted(num_replaced, 'character')} became U+FFFD"
            + ("" if request.encoding else f"; if this is {OLD_TEXT}")
        )
    if markers and source.is_text and not request.document_separator:
        marker = min(markers)
        yield (
            f"there is {marker} in the text, where it is encoded as any other text: if it stands"
            f" between documents, start again with --document-separator '{marker}'"
        )


def python_stdlib() -> Source:
    """Return the source code and reference documentation of Python's standard library.

    Files are cut at blank lines into pieces of some 3,000 characters, in a fixed shuffled order (by
    hash): training reads a token file from front to back, and a small batch should not come from
    one module. Raises: UserError: this installation of Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",  # tables of code points
    }
    pieces: set[str] = set()
    for path in root.rglob("*.py"):
        is_build_data = path.name.startswith("_sysconfigdata")  # differs between machines
        if is_build_data or skipped & set(path.relative_to(root).parts):
            continue
        piece = ""
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines(keepends=True):
            piece += line
            # At a blank line half the length is enough; without one a piece ends after any line.
            enough = STDLIB_PIECE_CHARACTERS if line.strip() else STDLIB_PIECE_CHARACTERS // 2
            if len(piece) >= enough:
                pieces.add(piece)
                piece = ""
        if piece.strip():
            pieces.add(piece)
    if not pieces:
        raise UserError(f"{root}: no Python source files; install Python with its library")
    shuffled = sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())
    name = "Python's standard library"
    return Texts(Request(source=name, title=name, licence="other", languages=["en"]), shuffled)


def grouped(
    sizes: Iterable[tuple[T, int]], max_bytes: int, max_items: int = 1000
) -> Iterator[tuple[list[T], int]]:
    """Group items in their order, with the sum of their sizes; a larger one is alone."""
    group: list[T] = []
    total = 0
    for item, size in sizes:
        if group and (total + size > max_bytes or len(group) == max_items):
            yield group, total
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group, total


def printable(name: str) -> str:
    """Return a name as one line of valid Unicode, whatever bytes it contains."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
