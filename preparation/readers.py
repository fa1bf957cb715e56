"""Split the documents of a shard into tasks: the units that a worker reads and encodes."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json

from preparation.cutting import (
    BadFile,
    BadShard,
    Piece,
    cut_document,
    find_cuts,
    joined,
    last_piece,
    piece_before_cut,
)
from preparation.parquet import parquet_pieces, text_bytes
from preparation.tasks import Task, Texts, Unreadable

TASK_BYTES = 2**22  # of text in a task, roughly
# Bytes of a line that are held in memory: enough for 100 MB of text in which each character is
# escaped. A limit is needed because a small compressed file may unpack to one endless line.
LONGEST_LINE = 5 * 2**26
LONG_LINE = 2**23  # bytes; Arrow parses longer lines, in far less memory than Python's json
WHOLE_BYTES = 2**24  # workers read text files and parquet row groups of up to this size
MAX_UNCUT = 2**24  # characters that are encoded at once: a tokenizer's file needs 80 bytes for each


@dataclass(frozen=True)
class TextFiles(Task):
    """Files with one document each; one that cannot be read is left out."""

    paths: list[Path]
    num_bytes: int
    root: Path  # of the source

    def pieces(self) -> Iterator[Piece]:
        for path in self.paths:
            try:
                data = path.read_bytes()
                check_encoding(path, data)
            except (OSError, BadShard) as error:
                name = printable(path.relative_to(self.root))
                yield Piece("", True, bad_file=BadFile(name, _reason(path, error)))
            else:
                yield from cut_document(data)


def check_encoding(path: Path, start: bytes) -> None:
    """Refuse text in UTF-16, which would be read as noise. Raises: BadShard."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise BadShard(f"{path}: is UTF-16; wanted UTF-8")


def printable(path: Path) -> str:
    """Return the path as one line of valid Unicode, whatever bytes it contains."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text.replace("\n", "\\n")


def _reason(path: Path, error: OSError | BadShard) -> str:
    if isinstance(error, BadShard):
        return str(error)
    return f"{path}: cannot be read: {error.strerror}"


@dataclass(frozen=True)
class JsonLines(Task):
    """Whole lines of a JSON lines file; `first_line` is the number of the first one."""

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
            return ("" if text is None else text).encode(  # a null is an empty document
                "utf-8", "replace")  # JSON can hold half of a surrogate pair
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = (f"; its keys are {', '.join(record)[:60]} (--text-column)"
                     if isinstance(error, KeyError) and record else "")
            raise BadShard(f'{self.path}: line {number} is not a JSON object with a'
                           f' text in "{self.text_column}"{found}') from None


def _lines_of(data: bytes | bytearray) -> Iterator[memoryview]:
    """Split into lines without copying them."""
    view, start = memoryview(data), 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        yield view[start:stop]
        start = stop


def _long_text(line: memoryview, text_column: str) -> memoryview | None:
    """Read the text of a line with Arrow; None if it finds none, even if Python's json might."""
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
    if len(table) != 1 or not table[text_column][0].is_valid:  # Arrow accepts several per line
        return None
    return memoryview(table[text_column][0].as_buffer())


@dataclass(frozen=True)
class ParquetGroups(Task):
    """Row groups of a parquet file that are small enough to be read by a worker."""

    path: Path
    groups: list[int]
    text_column: str
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        return parquet_pieces(self.path, self.groups, self.text_column)


def text_tasks(paths: Sequence[Path], root: Path) -> Iterator[Task]:
    """Leave files to the workers; read very large ones here, a few pieces at a time."""
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
            yield from _texts(_file_pieces(path))
        except (OSError, BadShard) as error:
            yield Unreadable(_reason(path, error))
    if small:
        yield TextFiles(small, size, root)


def _file_pieces(path: Path) -> Iterator[Piece]:
    """Cut a file as cut_document would, without loading all of it."""
    rest = b""
    with path.open("rb") as file:
        check_encoding(path, file.read(2))
        file.seek(0)
        while block := file.read(TASK_BYTES):
            data, start = memoryview(rest + block), 0
            for stop in find_cuts(data):
                yield piece_before_cut(data, start, stop)
                start = stop
            rest = bytes(data[start:])
            if len(rest) > LONGEST_LINE:
                raise BadShard(f"{path}: {LONGEST_LINE >> 20} MiB without a space; wanted text")
    yield last_piece(memoryview(rest))


def json_tasks(path: Path, text_column: str) -> Iterator[Task]:
    """Split a JSON lines file (plain, gzip or zstandard) into tasks of whole lines."""
    first_line = 1
    try:
        for block in _blocks_of_lines(path):
            if len(block) > 2 * TASK_BYTES:  # a large document: split it into several tasks
                yield from _texts(JsonLines(path, first_line, block, text_column).pieces())
            else:
                yield JsonLines(path, first_line, bytes(block), text_column)
            first_line += block.count(b"\n")
            del block  # frees its memory before the next one is read
    except BadShard as error:
        yield Unreadable(str(error))


def count_lines(path: Path) -> int:
    """Count the lines that are not blank. Raises: BadShard."""
    return sum(map(_count_lines_in, _blocks_of_lines(path)))


def _count_lines_in(block: bytearray) -> int:
    return sum(1 for line in _lines_of(block) if bytes(line[:99]).strip() or bytes(line).strip())


def _blocks_of_lines(path: Path) -> Iterator[bytearray]:
    try:
        with _open(path) as file:
            while block := bytearray(file.read(TASK_BYTES)):  # a bytearray grows without a copy
                while len(block) < LONGEST_LINE and (part := file.readline(TASK_BYTES)):
                    block += part
                    if part.endswith(b"\n"):
                        break
                if len(block) >= LONGEST_LINE:
                    raise BadShard(f"{path}: a line of more than {LONGEST_LINE >> 20} MiB")
                yield block
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        raise BadShard(f"{path}: damaged or cannot be read: {str(error)[:80]}") from None


def _open(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"), TASK_BYTES)
    return path.open("rb")


def parquet_tasks(path: Path, text_column: str) -> Iterator[Task]:
    """Leave small row groups to the workers; read large ones here, a few rows at a time.

    Raises:
        UserError: there is no such column.
    """
    small: list[int] = []
    size = 0
    try:
        for group, num_bytes in enumerate(text_bytes(path, text_column)):
            is_large = num_bytes > WHOLE_BYTES
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


def uncut(tasks: Iterable[Task], name: str, *, at_safe_cuts: bool) -> Iterator[Task]:
    """Join the pieces of a shard that are in several tasks, as `joined` does."""
    held: list[Piece] = []
    for task in tasks:
        if not isinstance(task, Texts):
            yield task
            continue
        held = list(joined([*held, *task.texts], at_safe_cuts=at_safe_cuts))
        last = held[-1]
        is_whole = last.ends_document or (last.ends_safely and not at_safe_cuts)
        ready, held = (held, []) if is_whole else (held[:-1], held[-1:])
        if held and len(held[0].text) > MAX_UNCUT:
            yield Unreadable(f"{name}: a document of more than {MAX_UNCUT >> 20} million characters"
                             " in which the tokenizer allows no cut")
            return
        if ready:
            yield Texts(ready, sum(sys.getsizeof(piece.text) for piece in ready))


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
