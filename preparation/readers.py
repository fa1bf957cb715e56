"""How a shard's documents are cut into tasks: what a worker reads and encodes at a time."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json

from preparation.cutting import BadShard, Piece, cut_document, find_cuts, piece_of
from preparation.parquet import parquet_pieces, text_bytes

TASK_BYTES = 2**22  # of text in a task, roughly
LONGEST_LINE = 5 * 2**26  # bytes held at once: 100 MB of text with all of it escaped, and no more,
# for a small file may unpack to one endless line
LONG_LINE = 2**23  # bytes from which Arrow reads a line, in far less memory than Python does
WHOLE_GROUP_BYTES = 2**24  # a parquet row group up to this size is read by a worker


class Task(ABC):
    """What a worker encodes at a time. It is sent to another process."""

    num_bytes: int  # of its text, roughly

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Read the text. Raises: BadShard."""


@dataclass(frozen=True)
class Texts(Task):
    """Pieces that are in memory already."""

    texts: list[Piece]
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        yield from self.texts


@dataclass(frozen=True)
class Unreadable(Task):
    """What could not even be cut into tasks."""

    reason: str
    num_bytes: int = 0

    def pieces(self) -> Iterator[Piece]:
        raise BadShard(self.reason)


@dataclass(frozen=True)
class TextFiles(Task):
    """Files of which each is a document."""

    paths: list[Path]
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            try:
                yield from cut_document(path.read_bytes())
            except OSError as error:
                raise BadShard(f"{path}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class JsonLines(Task):
    """Whole lines of a JSON lines file, the first of which has this number."""

    path: Path
    first_line: int
    lines: bytes | bytearray
    text_column: str

    @property
    def num_bytes(self) -> int:
        return len(self.lines)

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(_lines_of(self.lines), start=self.first_line):
            data = _long_text(line, self.text_column) if len(line) > LONG_LINE else None
            if data is None:
                short = bytes(line)
                if not short.strip():
                    continue
                data = self._text_of(number, short)
            yield from cut_document(data)

    def _text_of(self, number: int, line: bytes) -> bytes:
        record: dict[str, Any] = {}
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8", "replace"))
            text = record[self.text_column]
            return ("" if text is None else text).encode(  # as in parquet
                "utf-8", "replace")  # JSON can hold half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = (f"; it has: {', '.join(record)[:60]} (--text-column)"
                     if isinstance(error, KeyError) and record else "")
            raise BadShard(f'{self.path}: line {number} is no JSON object with a'
                           f' "{self.text_column}" of text{found}') from None


def _lines_of(data: bytes | bytearray) -> Iterator[memoryview]:
    """Cut into lines, without a copy of them."""
    view, start = memoryview(data), 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        yield view[start:stop]
        start = stop


def _long_text(line: memoryview, text_column: str) -> memoryview | None:
    """Read the text of a line; None where Arrow does not find any, be it wrong or not."""
    options = {
        "read_options": pyarrow.json.ReadOptions(use_threads=False, block_size=len(line) + 1),
        "parse_options": pyarrow.json.ParseOptions(
            explicit_schema=pyarrow.schema([(text_column, pyarrow.string())]),
            unexpected_field_behavior="ignore"),
    }
    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(pyarrow.py_buffer(line)), **options)
    except pyarrow.ArrowException:
        return None
    if len(table) != 1 or not table[text_column][0].is_valid:  # Arrow takes several in one line
        return None
    return memoryview(table[text_column][0].as_buffer())


@dataclass(frozen=True)
class ParquetGroups(Task):
    """Row groups of a parquet file, small enough to be read by a worker."""

    path: Path
    groups: list[int]
    text_column: str
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        return parquet_pieces(self.path, self.groups, self.text_column)


def text_tasks(paths: Sequence[Path]) -> Iterator[Task]:
    """Let workers read small files; read large ones here, a few pieces at a time."""
    small: list[Path] = []
    size = 0
    for path in paths:
        try:
            num_bytes = path.stat().st_size
            if small and size + num_bytes > TASK_BYTES:
                yield TextFiles(small, size)
                small, size = [], 0
            if num_bytes > TASK_BYTES:
                yield from _texts(_file_pieces(path))
            else:
                small, size = [*small, path], size + num_bytes
        except OSError as error:
            yield Unreadable(f"{path}: cannot be read: {error.strerror}")
        except BadShard as error:
            yield Unreadable(str(error))
    if small:
        yield TextFiles(small, size)


def _file_pieces(path: Path) -> Iterator[Piece]:
    """Cut a file as cut_document would, without holding it."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(TASK_BYTES):
            data, start = memoryview(rest + block), 0
            for stop in find_cuts(data):
                yield piece_of(data[start:stop], ends_document=False)
                start = stop
            rest = bytes(data[start:])
            if len(rest) > LONGEST_LINE:
                raise BadShard(f"{path}: {LONGEST_LINE >> 20} MiB without a blank are no text")
    yield piece_of(memoryview(rest), ends_document=True)


def json_tasks(path: Path, text_column: str) -> Iterator[Task]:
    """Cut a JSON lines file, gzip or zstandard or neither, into tasks of whole lines."""
    first_line = 1
    try:
        for block in _blocks_of_lines(path):
            if len(block) > 2 * TASK_BYTES:  # a large document, cut into several tasks
                yield from _texts(JsonLines(path, first_line, block, text_column).pieces())
            else:
                yield JsonLines(path, first_line, bytes(block), text_column)
            first_line += block.count(b"\n")
            del block  # before there is another
    except BadShard as error:
        yield Unreadable(str(error))


def count_lines(path: Path) -> int:
    """Count the lines that are not blank. Raises: BadShard."""
    return sum(map(_count_in, _blocks_of_lines(path)))


def _count_in(block: bytearray) -> int:
    return sum(1 for line in _lines_of(block) if bytes(line[:99]).strip() or bytes(line).strip())


def _blocks_of_lines(path: Path) -> Iterator[bytearray]:
    try:
        with _open(path) as file:
            while block := bytearray(file.read(TASK_BYTES)):  # which grows without a copy
                while len(block) < LONGEST_LINE and (part := file.readline(TASK_BYTES)):
                    block += part
                    if part.endswith(b"\n"):
                        break
                if len(block) >= LONGEST_LINE:
                    raise BadShard(f"{path}: a line of more than {LONGEST_LINE >> 20} MiB")
                yield block
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise BadShard(f"{path}: damaged, or cannot be read: {str(error)[:80]}") from None


def _open(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"), TASK_BYTES)
    return path.open("rb")


def parquet_tasks(path: Path, text_column: str) -> Iterator[Task]:
    """Let workers read small row groups; read large ones here, a few rows at a time.

    Raises:
        UserError: there is no such column.
    """
    small: list[int] = []
    size = 0
    try:
        for group, num_bytes in enumerate(text_bytes(path, text_column)):
            is_large = num_bytes > WHOLE_GROUP_BYTES
            if small and (is_large or size + num_bytes > TASK_BYTES):
                yield ParquetGroups(path, small, text_column, size)
                small, size = [], 0
            if is_large:
                yield from _texts(parquet_pieces(path, [group], text_column))
            else:
                small, size = [*small, group], size + num_bytes
        if small:
            yield ParquetGroups(path, small, text_column, size)
    except BadShard as error:
        yield Unreadable(str(error))


def _texts(pieces: Iterator[Piece]) -> Iterator[Task]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += sys.getsizeof(piece.text)  # up to four bytes a character
        if size >= TASK_BYTES:
            yield Texts(batch, size)
            batch, size = [], 0
    if batch:
        yield Texts(batch, size)
