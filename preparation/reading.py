"""Read documents: files are split into tasks, whose text worker processes read and encode."""

import codecs
import contextlib
import gzip
import io
import json
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from preparation.cutting import (
    BadShard,
    Cuts,
    Piece,
    cut_document,
    find_cuts,
    joined,
    last_piece,
    piece_before_cut,
)
from preparation.parquet import parquet_pieces, text_bytes

TASK_BYTES = 2**22  # of text in a task, roughly
LONGEST_LINE = 2**27  # bytes: a small compressed file may unpack to one endless line
WHOLE_BYTES = 2**24  # workers read text files and parquet row groups of up to this size


class BadFile(NamedTuple):
    """A text file that cannot be read."""

    name: str  # relative to the source
    reason: str


class Task(ABC):
    """The unit of work of a worker. It is pickled and sent to another process."""

    num_bytes: int  # of text, roughly
    source_bytes: int  # of the files that it is read from, roughly
    bad_files: Sequence[BadFile] = ()  # that `pieces` had to leave out

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Read the text. Raises: BadShard."""


@dataclass(frozen=True)
class Texts(Task):
    """Pieces of text that are already in memory."""

    texts: list[Piece]
    num_bytes: int
    source_bytes: int = 0

    def pieces(self) -> Iterator[Piece]:
        yield from self.texts


@dataclass(frozen=True)
class TextFiles(Task):
    """Files with one document each; one that cannot be read is left out."""

    paths: list[Path]
    num_bytes: int
    root: Path  # of the source
    bad_files: list[BadFile] = field(default_factory=list)

    @property
    def source_bytes(self) -> int:
        return self.num_bytes

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            try:
                data = path.read_bytes()
                start = _text_start(path, data)
            except (OSError, BadShard) as error:
                name = printable(path.relative_to(self.root))
                self.bad_files.append(BadFile(name, _reason(path, error)))
            else:
                yield from cut_document(memoryview(data)[start:])


@dataclass(frozen=True)
class JsonLines(Task):
    """Whole lines of a JSON lines file; `first_line` is the number of the first one."""

    path: Path
    first_line: int
    lines: bytes | bytearray
    text_column: str
    source_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.lines)

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(io.BytesIO(self.lines), start=self.first_line):
            if line.strip():
                yield from cut_document(self._text_of(number, line))

    def _text_of(self, number: int, line: bytes) -> bytes:
        record: dict[str, Any] = {}
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8", "replace"))
            text = record[self.text_column]
            return ("" if text is None else text).encode(  # a null is an empty document
                "utf-8", "replace")  # JSON can hold half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = (f"; its keys are {', '.join(record)[:60]} (--text-column)"
                     if isinstance(error, KeyError) and record else "")
            raise BadShard(f'{self.path}: line {number} is not a JSON object with a'
                           f' text in "{self.text_column}"{found}') from None


@dataclass(frozen=True)
class ParquetGroups(Task):
    """Row groups of a parquet file that are small enough to be read by a worker."""

    path: Path
    groups: list[int]
    text_column: str
    num_bytes: int
    source_bytes: int

    def pieces(self) -> Iterator[Piece]:
        return parquet_pieces(self.path, self.groups, self.text_column)


def text_tasks(paths: Sequence[Path], root: Path, cuts: Cuts = "any") -> Iterator[Task]:
    """Leave files to the workers; read very large ones here, a few pieces at a time.

    Raises:
        BadShard: a large one, which is alone in its shard, cannot be read.
    """
    small: list[Path] = []
    size = 0
    for path in paths:
        num_bytes = path.stat().st_size if path.exists() else 0
        is_large = num_bytes > WHOLE_BYTES
        if small and (is_large or size + num_bytes > TASK_BYTES):
            yield TextFiles(small, size, root)
            small, size = [], 0
        if not is_large:
            small, size = [*small, path], size + num_bytes
            continue
        try:
            for task in _texts(_file_pieces(path), cuts, path):
                yield replace(task, source_bytes=sum(
                    len(piece.text.encode()) for piece in task.texts))
        except OSError as error:
            raise BadShard(_reason(path, error)) from None
    if small:
        yield TextFiles(small, size, root)


def _file_pieces(path: Path) -> Iterator[Piece]:
    """Cut a file as cut_document would, without loading all of it."""
    rest = b""
    with path.open("rb") as file:
        file.seek(_text_start(path, file.read(len(codecs.BOM_UTF8))))
        while block := file.read(TASK_BYTES):
            data, start = memoryview(rest + block), 0
            for stop in find_cuts(data):
                yield piece_before_cut(data, start, stop)
                start = stop
            rest = bytes(data[start:])
            if len(rest) > LONGEST_LINE:
                raise BadShard(f"{path}: {LONGEST_LINE >> 20} MiB without a space; wanted text")
    yield last_piece(memoryview(rest))


def _text_start(path: Path, start: bytes) -> int:
    """Return where text begins: after a byte order mark.

    Raises:
        BadShard: it is UTF-16, which would be read as noise.
    """
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadShard(f"{path}: is UTF-16; wanted UTF-8")
    return len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0


def printable(path: Path) -> str:
    """Return the path as one line of valid Unicode, whatever bytes it contains."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text.replace("\n", "\\n")


def _reason(path: Path, error: OSError | BadShard) -> str:
    if isinstance(error, BadShard):
        return str(error)
    return f"{path}: cannot be read: {error.strerror}"


def json_tasks(path: Path, text_column: str, cuts: Cuts = "any") -> Iterator[Task]:
    """Split a JSON lines file (plain, gzip or zstandard) into tasks of whole lines.

    Raises:
        BadShard: it is damaged.
    """
    first_line = 1
    for block, source_bytes in _blocks_of_lines(path):
        if len(block) > 2 * TASK_BYTES:  # a large document: split it into several tasks
            pieces = JsonLines(path, first_line, block, text_column).pieces()
            yield from _texts(pieces, cuts, path, source_bytes)
        else:
            yield JsonLines(path, first_line, bytes(block), text_column, source_bytes)
        first_line += block.count(b"\n")
        del block  # frees its memory before the next one is read


def _blocks_of_lines(path: Path) -> Iterator[tuple[bytearray, int]]:
    """Yield whole lines, and how many bytes of the file they took. Raises: BadShard."""
    position = 0
    try:
        with path.open("rb") as packed, _unpacked(packed, path.suffix.lower()) as file:
            while block := bytearray(file.read(TASK_BYTES)):  # a bytearray grows without a copy
                while len(block) < LONGEST_LINE and (part := file.readline(TASK_BYTES)):
                    block += part
                    if part.endswith(b"\n"):
                        break
                if len(block) >= LONGEST_LINE:
                    raise BadShard(f"{path}: a line of more than {LONGEST_LINE >> 20} MiB")
                yield block, packed.tell() - position
                position = packed.tell()
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise BadShard(f"{path}: damaged or cannot be read: {str(error)[:80]}") from None


def _unpacked(packed: Any, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=packed)
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"), TASK_BYTES)
    return contextlib.nullcontext(packed)


def parquet_tasks(path: Path, text_column: str, cuts: Cuts = "any") -> Iterator[Task]:
    """Leave small row groups to the workers; read large ones here, a few rows at a time.

    Raises:
        BadShard: it is damaged.
        UserError: there is no such column.
    """
    sizes = text_bytes(path, text_column)
    share = path.stat().st_size / max(sum(sizes), 1)  # of the file, for each byte of text
    small: list[int] = []
    size = 0
    for group, num_bytes in enumerate(sizes):
        is_large = num_bytes > WHOLE_BYTES
        if small and (is_large or size + num_bytes > TASK_BYTES):
            yield ParquetGroups(path, small, text_column, size, int(size * share))
            small, size = [], 0
        if is_large:
            yield from _texts(parquet_pieces(path, [group], text_column), cuts, path,
                              int(num_bytes * share))
        else:
            small, size = [*small, group], size + num_bytes
    if small:
        yield ParquetGroups(path, small, text_column, size, int(size * share))


def _texts(pieces: Iterator[Piece], cuts: Cuts, path: Path,
           source_bytes: int = 0) -> Iterator[Texts]:
    batch: list[Piece] = []
    size = 0
    for piece in joined(pieces, cuts, name=str(path)):
        batch.append(piece)
        size += sys.getsizeof(piece.text)  # up to four bytes a character
        if size >= TASK_BYTES:
            yield Texts(batch, size)
            batch, size = [], 0
    yield Texts(batch, size, source_bytes)
