"""How a shard's documents are cut into tasks: what a worker reads and encodes at a time."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from preparation.cutting import LARGE_DOCUMENT, Piece, cut_document, find_cuts, piece_of
from run_config import UserError

TASK_BYTES = 2**22  # of text in a task, roughly
WHOLE_GROUP_BYTES = 2**26  # a parquet row group up to this size is read by a worker
ROWS_AT_A_TIME = 64  # of a larger one: FineWeb's documents are kilobytes, its largest megabytes


class BadShard(UserError):
    """A shard that is damaged, or does not hold what it should."""


class Task(Protocol):
    """What a worker encodes at a time. It is sent to another process."""

    def pieces(self) -> Iterator[Piece]:
        """Read the text. Raises: BadShard."""


@dataclass(frozen=True)
class Texts:
    """Pieces that are in memory already."""

    texts: list[Piece]

    def pieces(self) -> Iterator[Piece]:
        yield from self.texts


@dataclass(frozen=True)
class Unreadable:
    """What could not even be cut into tasks."""

    reason: str

    def pieces(self) -> Iterator[Piece]:
        raise BadShard(self.reason)


@dataclass(frozen=True)
class TextFiles:
    """Files of which each is a document."""

    paths: list[Path]

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            try:
                yield from cut_document(path.read_bytes())
            except OSError as error:
                raise BadShard(f"{path}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class JsonLines:
    """Whole lines of a JSON lines file, the first of which has this number."""

    path: Path
    first_line: int
    lines: bytes
    text_column: str

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(io.BytesIO(self.lines), start=self.first_line):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[self.text_column]
                text = "" if text is None else text  # as in parquet
                data = text.encode("utf-8", "replace")  # JSON can hold half of a surrogate pair
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise BadShard(f'{self.path}: line {number} is no JSON object with a'
                               f' "{self.text_column}" of text') from None
            del text
            yield from cut_document(data)


@dataclass(frozen=True)
class ParquetGroups:
    """Row groups of a parquet file, small enough to be read by a worker."""

    path: Path
    groups: list[int]
    text_column: str

    def pieces(self) -> Iterator[Piece]:
        return _parquet_pieces(self.path, self.groups, self.text_column)


def text_tasks(paths: Sequence[Path]) -> Iterator[Task]:
    """Let workers read small files; read large ones here, a few pieces at a time."""
    small: list[Path] = []
    size = 0
    for path in paths:
        try:
            num_bytes = path.stat().st_size
            if small and size + num_bytes > TASK_BYTES:
                yield TextFiles(small)
                small, size = [], 0
            if num_bytes > TASK_BYTES:
                yield from _texts(_file_pieces(path))
            else:
                small, size = [*small, path], size + num_bytes
        except OSError as error:
            yield Unreadable(f"{path}: cannot be read: {error.strerror}")
    if small:
        yield TextFiles(small)


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
    yield piece_of(memoryview(rest), ends_document=True)


def json_tasks(path: Path, text_column: str) -> Iterator[Task]:
    """Cut a JSON lines file, gzip or zstandard or neither, into tasks of whole lines."""
    first_line = 1
    try:
        for block in _blocks_of_lines(path):
            yield JsonLines(path, first_line, block, text_column)
            first_line += block.count(b"\n")
    except BadShard as error:
        yield Unreadable(str(error))


def count_lines(path: Path) -> int:
    """Count the lines that are not blank. Raises: BadShard."""
    return sum(1 for block in _blocks_of_lines(path) for line in io.BytesIO(block) if line.strip())


def _blocks_of_lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            while block := file.read(TASK_BYTES):
                yield block + file.readline()
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise BadShard(f"{path}: damaged, or cannot be read: {str(error)[:80]}") from None


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
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
                yield ParquetGroups(path, small, text_column)
                small, size = [], 0
            if is_large:
                yield from _texts(_parquet_pieces(path, [group], text_column))
            else:
                small, size = [*small, group], size + num_bytes
        if small:
            yield ParquetGroups(path, small, text_column)
    except BadShard as error:
        yield Unreadable(str(error))


def text_bytes(file: Path | Any, text_column: str, *, name: str = "") -> list[int]:
    """Give the bytes that the text takes in each row group, not compressed, by the footer.

    Raises:
        BadShard: it is no whole parquet file.
        UserError: there is no such column.
    """
    with _naming(name or file):
        footer = pyarrow.parquet.read_metadata(file)
        columns = [footer.schema.column(i).path for i in range(footer.num_columns)]
        if text_column not in columns:
            raise UserError(f"{name or file}: has no column {text_column!r}; it has:"
                            f" {', '.join(columns)[:100]}")
        index = columns.index(text_column)
        return [footer.row_group(i).column(index).total_uncompressed_size
                for i in range(footer.num_row_groups)]


def count_rows(file: Path | Any, *, name: str = "") -> int:
    """Read a parquet file's count from its footer. Raises: BadShard."""
    with _naming(name or file):
        return pyarrow.parquet.read_metadata(file).num_rows


@contextlib.contextmanager
def _naming(name: Path | str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into a BadShard that names it."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise BadShard(f"{name}: not a whole parquet file: {reason}") from None


@functools.lru_cache(maxsize=2)  # a worker reads the same file again and again
def _footer(path: Path) -> Any:
    return pyarrow.parquet.read_metadata(path)


def _parquet_pieces(path: Path, groups: list[int], text_column: str) -> Iterator[Piece]:
    with _naming(path):
        # Buffered and not read ahead: memory stays that of a few rows, whatever the group's size.
        with pyarrow.parquet.ParquetFile(path, metadata=_footer(path), buffer_size=2**20,
                                         pre_buffer=False,
                                         page_checksum_verification=True) as file:
            for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=groups,
                                           columns=[text_column], use_threads=False):
                yield from _column_pieces(_as_strings(batch.column(0), path))


def _as_strings(column: pyarrow.Array, path: Path) -> pyarrow.Array:
    kinds = pyarrow.types
    kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return column
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_null(kind):
        return column.cast(pyarrow.large_string())
    raise BadShard(f"{path}: a document is of type {column.type}; wanted text")


def _column_pieces(column: pyarrow.Array) -> Iterator[Piece]:
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= LARGE_DOCUMENT:
        for text in column.to_pylist():
            yield Piece(text or "", True)
        return
    for value in column:  # a text of 100 MB is never turned into one string
        yield from cut_document(memoryview(value.as_buffer()) if value.is_valid else b"")


def _texts(pieces: Iterator[Piece]) -> Iterator[Task]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= TASK_BYTES:
            yield Texts(batch)
            batch, size = [], 0
    if batch:
        yield Texts(batch)
