"""Read documents: files are split into tasks, whose text worker processes read and encode."""

import codecs
import contextlib
import csv
import functools
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from basics.errors import MAX_CAUSE_LENGTH
from preparation.choosing import SourceOptions, is_plain_text, kind_of
from preparation.cutting import (
    LARGE_DOCUMENT,
    BadShard,
    Cuts,
    NoColumn,
    Piece,
    cut_document,
    split_documents,
    to_bytes,
)
from preparation.unpacking import opened

TASK_BYTES = 2**22  # of text in a task, roughly
LONGEST_LINE = 2**27  # bytes: a small compressed file may unpack to one endless line
BETWEEN_ELEMENTS: Any = re.compile(r"[\s,]*")  # of a JSON array; matches everywhere
WHOLE_BYTES = 2**24  # workers read text files and parquet row groups of up to this size
MAX_ROWS = 64  # of a parquet file read at a time; fewer if the rows are large
BATCH_BYTES = 2**22  # of those rows, roughly
TEXT_TYPES = ("STRING", "UNKNOWN", "NULL")  # logical ones; the latter two of columns of nulls
JSON = json.JSONDecoder(parse_int=float)  # Python refuses integers of more than 4,300 digits
T = TypeVar("T")
# A worker gets many tasks of the same file.
_footer = functools.lru_cache(maxsize=2)(pyarrow.parquet.read_metadata)


class BadFile(NamedTuple):
    """A text file that cannot be read."""

    name: str  # relative to the source
    reason: str


class Reading(NamedTuple):
    """How documents are read, and the files that are left out."""

    cuts: Cuts
    bad_files: list[BadFile]


class Task(NamedTuple):
    """The unit of work of a worker, pickled and sent to another process."""

    read: Callable[[Reading], Iterator[Piece]]  # raises BadShard
    num_bytes: int  # of text, roughly
    source_bytes: int  # of the files that it is read from, roughly


def grouped(
    sizes: Iterable[tuple[T, int]], max_bytes: int, max_items: int = sys.maxsize
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


def file_tasks(
    paths: Sequence[Path], root: Path, options: SourceOptions, cuts: Cuts
) -> Iterator[Task]:
    """Split files into tasks: a single file, or several of text that is not packed.

    Raises: BadShard: one is damaged, or has no such column.
    """
    kind = kind_of(paths[0].name)
    if kind == "parquet":
        return parquet_tasks(paths[0], options, cuts)
    if kind == "CSV":
        return csv_tasks(paths[0], options, cuts)
    if kind == "text":
        return text_tasks(paths, root, options, cuts)
    return json_tasks(paths[0], options, cuts)


def check_column(path: Path, options: SourceOptions) -> None:
    """Raise BadShard if a parquet or CSV file is damaged at its place, or has no such column."""
    kind = kind_of(path.name)
    if kind == "parquet":
        with _naming(path):
            _text_leaf(path, options.text_column)
    elif kind == "CSV":
        with opened(path, options.encoding) as (_, file):
            next(_csv_texts(file, path, options.text_column), None)


def text_tasks(
    paths: Sequence[Path], root: Path, options: SourceOptions, cuts: Cuts
) -> Iterator[Task]:
    """Leave small files to the workers; read a packed or very large one here, in pieces.

    Raises: BadShard: such a file, which is alone in its shard, cannot be read.
    """
    sizes = ((path, path.stat().st_size if path.exists() else 0) for path in paths)
    for group, size in grouped(sizes, TASK_BYTES):
        path = group[0]
        if size <= WHOLE_BYTES and is_plain_text(path):
            yield Task(partial(_read_texts, group, root, options), size, size)
        else:
            with opened(path, options.encoding) as (stored, file):
                yield from _streamed(_text_pieces(_blocks(file), path, options, cuts), stored)


def _read_texts(
    paths: Sequence[Path], root: Path, options: SourceOptions, reading: Reading
) -> Iterator[Piece]:
    for path in paths:
        try:
            with opened(path, options.encoding) as (_, file):
                blocks = list(_blocks(file))
        except BadShard as error:
            reading.bad_files.append(BadFile(printable(path.relative_to(root)), str(error)))
        else:
            yield from _text_pieces(blocks, path, options, reading.cuts)


def _blocks(file: Any) -> Iterator[bytes]:
    return iter(partial(file.read, TASK_BYTES), b"")


def _text_pieces(
    blocks: Iterable[bytes], path: Path, options: SourceOptions, cuts: Cuts
) -> Iterator[Piece]:
    """Yield the documents of a text file: one, or those between separators."""
    documents: Iterable[Iterable[bytes]] = [blocks]
    if options.document_separator:
        documents = split_documents(blocks, options.document_separator.encode())
    for document in documents:
        yield from cut_document(document, cuts, path)


def printable(path: Path) -> str:
    """Return the path as one line of valid Unicode, whatever bytes it contains."""
    return str(path).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def _in_memory(pieces: Iterator[Piece], share: float = 1) -> Iterator[Task]:
    """Yield tasks with text of a file, which has `share` bytes for each of text."""
    for batch, size in _batches(pieces):
        num_bytes = sum(len(piece.text.encode()) for piece in batch)
        yield Task(partial(_given, batch), size, int(share * num_bytes))


def _streamed(pieces: Iterator[Piece], stored: BinaryIO) -> Iterator[Task]:
    """Yield tasks with text that is read from a stored file meanwhile."""
    position = 0
    for batch, size in _batches(pieces):
        yield Task(partial(_given, batch), size, stored.tell() - position)
        position = stored.tell()


def _batches(pieces: Iterator[Piece]) -> Iterator[tuple[list[Piece], int]]:
    # A character of a text takes up to 4 bytes.
    return grouped(((piece, sys.getsizeof(piece.text)) for piece in pieces), TASK_BYTES)


def _given(pieces: Sequence[Piece], _: Reading) -> Iterator[Piece]:
    return iter(pieces)


def memory_tasks(texts: Sequence[bytes], cuts: Cuts) -> Iterator[Task]:
    return _in_memory(_row_pieces(texts, "texts", cuts))


def json_tasks(path: Path, options: SourceOptions, cuts: Cuts) -> Iterator[Task]:
    """Split JSON lines into tasks of whole lines; read the objects of an array here.

    Raises: BadShard: the file is damaged.
    """
    with opened(path, options.encoding) as (stored, file):
        if file.peek(1).lstrip().startswith(b"["):
            objects = _array_texts(file, path, options.text_column)
            yield from _streamed(_row_pieces(objects, path, cuts), stored)
            return
        first_line = 1
        for block, source_bytes in _blocks_of_lines(path, stored, file):
            read = partial(_read_lines, path, options.text_column, first_line)
            if len(block) > 2 * TASK_BYTES:  # a large document: split it into several tasks
                pieces = read(block, Reading(cuts, []))
                yield from _in_memory(pieces, source_bytes / len(block))
            else:
                yield Task(partial(read, bytes(block)), len(block), source_bytes)
            first_line += block.count(b"\n")
            del block  # frees its memory before the next one is read


def _row_pieces(texts: Iterable[bytes], name: object, cuts: Cuts) -> Iterator[Piece]:
    for text in texts:
        yield from cut_document([text], cuts, name)


def _blocks_of_lines(path: Path, stored: BinaryIO, file: Any) -> Iterator[tuple[bytearray, int]]:
    """Yield whole lines, and how many bytes of the stored file they took. Raises: BadShard."""
    position = 0
    while block := bytearray(file.read(TASK_BYTES)):  # a bytearray grows without a copy
        while len(block) < LONGEST_LINE and (part := file.readline(TASK_BYTES)):
            block += part
            if part.endswith(b"\n"):
                break
        if len(block) >= LONGEST_LINE:
            raise BadShard(f"{path}: a line of more than {LONGEST_LINE >> 20} MiB")
        yield block, stored.tell() - position
        position = stored.tell()


def _read_lines(
    path: Path, text_column: str, first_line: int, lines: bytes | bytearray, reading: Reading
) -> Iterator[Piece]:
    for number, line in enumerate(io.BytesIO(lines), start=first_line):
        if line.strip():
            try:
                content = line.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
                record = JSON.decode(content)
            except (ValueError, RecursionError):
                record = None
            text = _text_of(record, f"{path}: line {number}", text_column)
            yield from cut_document([text], reading.cuts, path)


def _text_of(record: Any, place: str, text_column: str) -> bytes:
    """Return the text under a key, or under keys inside of each other. Raises: BadShard."""
    wanted = f'{place} is not a JSON object with a text in "{text_column}"'
    try:
        keys = [text_column] if text_column in record else text_column.split(".")
        text = record
        for key in keys:
            text = text[key]
        return to_bytes("" if text is None else text)  # a null is an empty document
    except KeyError:
        found = f"; its keys are {', '.join(record)[:60]} (--text-column)" if record else ""
        raise NoColumn(wanted + found) from None
    except (TypeError, AttributeError):
        raise BadShard(wanted) from None


def _array_texts(file: Any, path: Path, text_column: str) -> Iterator[bytes]:
    """Yield the texts of a JSON array, which need not fit in memory. Raises: BadShard."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    buffer = decoder.decode(file.read(TASK_BYTES)).lstrip().removeprefix("[")
    start = 0  # of an element in the buffer
    number = 1  # of the element
    while True:
        start = BETWEEN_ELEMENTS.match(buffer, start).end()
        if buffer.startswith("]", start):
            break
        try:
            record, start = JSON.raw_decode(buffer, start)
        except (ValueError, RecursionError):  # perhaps its end is not read yet
            # As much again: however long an object is, it is decoded few times.
            block = file.read(max(TASK_BYTES, len(buffer) - start))
            if not block or len(buffer) - start > LONGEST_LINE:
                raise BadShard(f"{path}: element {number} is not a whole JSON object") from None
            buffer = buffer[start:] + decoder.decode(block)
            start = 0
        else:
            yield _text_of(record, f"{path}: element {number}", text_column)
            number += 1
    rest = buffer[start + 1 :] + decoder.decode(file.read(TASK_BYTES))
    if rest.strip():
        raise BadShard(f"{path}: goes on after the end of its JSON array")


def csv_tasks(path: Path, options: SourceOptions, cuts: Cuts) -> Iterator[Task]:
    """Read the rows of a file here. Raises: BadShard: it is damaged, or has no such column."""
    with opened(path, options.encoding) as (stored, file):
        texts = _csv_texts(file, path, options.text_column)
        yield from _streamed(_row_pieces(texts, path, cuts), stored)


def _csv_texts(file: Any, path: Path, text_column: str) -> Iterator[bytes]:
    """Yield the texts of a column, which the first row names. Raises: BadShard."""
    lines = iter(partial(file.readline, LONGEST_LINE), b"")
    rows = csv.reader((line.decode("utf-8", "surrogateescape") for line in lines), strict=True)
    csv.field_size_limit(LONGEST_LINE)
    try:
        columns = next(rows, [])
        place = _place_of(text_column, columns, path)
        for row in rows:
            if row and len(row) != len(columns):
                raise BadShard(
                    f"{path}: line {rows.line_num} ends a row of {len(row)} fields; its"
                    f" first row has {len(columns)}"
                )
            if row:
                yield to_bytes(row[place])
    except csv.Error as error:
        raise BadShard(f"{path}: line {rows.line_num}: {error}") from None


def _place_of(text_column: str, columns: list[str], path: Path) -> int:
    """Return the place of the column of text. Raises: BadShard: there is none, or are several."""
    count = columns.count(text_column)
    if count > 1:
        raise BadShard(f"{path}: has {count} columns {text_column!r}; rename all but one of them")
    if not count:
        raise NoColumn(
            f"{path}: has no column {text_column!r}; name one of its columns with"
            f" --text-column: {', '.join(columns)[:80]}"
        )
    return columns.index(text_column)


def parquet_tasks(path: Path, options: SourceOptions, cuts: Cuts) -> Iterator[Task]:
    """Leave small row groups to the workers; read large ones here, a few rows at a time.

    Raises: BadShard: it is not a complete parquet file, or has no such column of text.
    """
    text_column = options.text_column
    with _naming(path):
        footer, leaf = _text_leaf(path, text_column)
        sizes = [
            footer.row_group(group).column(leaf).total_uncompressed_size
            for group in range(footer.num_row_groups)
        ]
    share = path.stat().st_size / max(sum(sizes), 1)  # of the file, for each byte of text
    for groups, size in grouped(enumerate(sizes), TASK_BYTES):
        read = partial(_read_groups, path, groups, text_column)
        if size > WHOLE_BYTES:
            yield from _in_memory(read(Reading(cuts, [])), share)
        else:
            yield Task(read, size, int(size * share))


def _text_leaf(path: Path, text_column: str) -> tuple[pyarrow.parquet.FileMetaData, int]:
    """Return a file's footer, and the place of the text among its columns, also nested ones.

    Raises: BadShard: there is no such column of text.
    """
    footer = pyarrow.parquet.read_metadata(path)
    leaves = [footer.schema.column(place) for place in range(footer.num_columns)]
    place = _place_of(text_column, [leaf.path for leaf in leaves], path)
    leaf = leaves[place]
    kind = leaf.logical_type.type
    is_in_list = leaf.max_repetition_level > 0
    if kind not in TEXT_TYPES or is_in_list:
        kind = leaf.physical_type if kind == "NONE" else kind
        in_list = " in a list" if is_in_list else ""
        raise BadShard(
            f"{path}: column {text_column!r} is of type {kind}{in_list}; name a column"
            " of text with --text-column"
        )
    return footer, place


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Replace pyarrow's errors for a damaged file by a BadShard that names the file."""
    try:
        yield
    except pyarrow.ArrowMemoryError:  # the file is not damaged
        raise
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:MAX_CAUSE_LENGTH]
        raise BadShard(f"{path}: not a complete parquet file: {reason}") from None


def _read_groups(
    path: Path, groups: list[int], text_column: str, reading: Reading
) -> Iterator[Piece]:
    with _naming(path):
        footer = _footer(path)
        row_groups = [footer.row_group(group) for group in groups]
        num_bytes = sum(group.total_byte_size for group in row_groups)
        num_rows = sum(group.num_rows for group in row_groups)
        row_bytes = num_bytes // max(num_rows, 1) + 1
        num_rows_at_once = min(max(BATCH_BYTES // row_bytes, 1), MAX_ROWS)
        # Buffered without read-ahead: this keeps a few rows in memory, not a whole row group.
        with pyarrow.parquet.ParquetFile(
            path,
            metadata=footer,
            buffer_size=2**20,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as file:
            for batch in file.iter_batches(
                num_rows_at_once,
                row_groups=groups,
                columns=[text_column],
                use_threads=False,
            ):
                yield from _column_pieces(_column_in(batch, text_column), reading.cuts, path)


def _column_in(batch: pyarrow.RecordBatch, text_column: str) -> pyarrow.Array:
    """Return a column of that name, or the field of a column: b of a for a.b."""
    if text_column in batch.schema.names:
        return batch.column(text_column)
    first, *fields = text_column.split(".")
    return pyarrow.compute.struct_field(batch.column(first), fields)


def _column_pieces(column: pyarrow.Array, cuts: Cuts, path: Path) -> Iterator[Piece]:
    if column.type not in (pyarrow.string(), pyarrow.large_string()):
        column = column.cast(pyarrow.large_string())
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= LARGE_DOCUMENT:
        with contextlib.suppress(UnicodeDecodeError):
            yield from [Piece(text or "", True) for text in column.to_pylist()]
            return
    for value in column:  # as buffers: a text of 100 MB never becomes one Python string
        blocks = [memoryview(value.as_buffer())] if value.is_valid else []
        yield from cut_document(blocks, cuts, path)
