"""Read documents: files are split into tasks, whose text worker processes read and encode."""

import codecs
import contextlib
import functools
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from basics.errors import UserError
from preparation.choosing import kind_of
from preparation.cutting import LARGE_DOCUMENT, BadShard, Cuts, Piece, cut_document

TASK_BYTES = 2**22  # of text in a task, roughly
LONGEST_LINE = 2**27  # bytes: a small compressed file may unpack to one endless line
WHOLE_BYTES = 2**24  # workers read text files and parquet row groups of up to this size
MAX_ROWS = 64  # of a parquet file read at a time; fewer if the rows are large
BATCH_BYTES = 2**22  # of those rows, roughly
TEXT_TYPES = ("string", "large_string", "string_view", "null")
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


def grouped(sizes: Iterable[tuple[T, int]], max_bytes: int,
            max_items: int = sys.maxsize) -> Iterator[tuple[list[T], int]]:
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


def file_tasks(paths: Sequence[Path], root: Path, text_column: str, cuts: Cuts) -> Iterator[Task]:
    """Split files of one kind, a single one unless they are text, into tasks.

    Raises: BadShard: one is damaged. UserError: there is no such column.
    """
    kind = kind_of(paths[0].name)
    if kind == "parquet":
        return parquet_tasks(paths[0], text_column, cuts)
    if kind == "JSON lines":
        return json_tasks(paths[0], text_column, cuts)
    return text_tasks(paths, root, cuts)


def text_tasks(paths: Sequence[Path], root: Path, cuts: Cuts) -> Iterator[Task]:
    """Leave files, one document each, to the workers; read a very large one here, in pieces.

    Raises: BadShard: a large one, which is alone in its shard, cannot be read.
    """
    sizes = ((path, path.stat().st_size if path.exists() else 0) for path in paths)
    for group, size in grouped(sizes, TASK_BYTES):
        if size <= WHOLE_BYTES:
            yield Task(partial(_read_texts, group, root), size, size)
        else:
            yield from _in_memory(cut_document(_text_blocks(group[0]), cuts, group[0]))


def _read_texts(paths: Sequence[Path], root: Path, reading: Reading) -> Iterator[Piece]:
    for path in paths:
        try:
            blocks = list(_text_blocks(path))
        except BadShard as error:
            reading.bad_files.append(BadFile(printable(path.relative_to(root)), str(error)))
        else:
            yield from cut_document(blocks, reading.cuts, path)


def _text_blocks(path: Path) -> Iterator[bytes]:
    """Read a file without its byte order mark. Raises: BadShard."""
    try:
        with path.open("rb") as file:
            block = file.read(TASK_BYTES)
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # noise as UTF-8
                raise BadShard(f"{path}: is UTF-16; wanted UTF-8")
            block = block.removeprefix(codecs.BOM_UTF8)
            while block:
                yield block
                block = file.read(TASK_BYTES)
    except OSError as error:
        raise BadShard(f"{path}: cannot be read: {error.strerror}") from None


def printable(path: Path) -> str:
    """Return the path as one line of valid Unicode, whatever bytes it contains."""
    return str(path).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")


def _in_memory(pieces: Iterator[Piece], share: float = 1) -> Iterator[Task]:
    """Yield tasks with text of a file, which has `share` bytes for each of text."""
    sizes = ((piece, sys.getsizeof(piece.text)) for piece in pieces)  # up to 4 bytes a character
    for batch, size in grouped(sizes, TASK_BYTES):
        yield Task(partial(_given, batch), size,
                   int(share * sum(len(piece.text.encode()) for piece in batch)))


def _given(pieces: Sequence[Piece], _: Reading) -> Iterator[Piece]:
    return iter(pieces)


def memory_tasks(texts: Sequence[bytes], cuts: Cuts) -> Iterator[Task]:
    return _in_memory(piece for text in texts for piece in cut_document([text], cuts, "texts"))


def json_tasks(path: Path, text_column: str, cuts: Cuts) -> Iterator[Task]:
    """Split a file (plain, gzip, zstandard) into tasks of whole lines. Raises: BadShard: damage."""
    first_line = 1
    for block, source_bytes in _blocks_of_lines(path):
        if len(block) > 2 * TASK_BYTES:  # a large document: split it into several tasks
            pieces = _read_lines(path, first_line, block, text_column, Reading(cuts, []))
            yield from _in_memory(pieces, source_bytes / len(block))
        else:
            yield Task(partial(_read_lines, path, first_line, bytes(block), text_column),
                       len(block), source_bytes)
        first_line += block.count(b"\n")
        del block  # frees its memory before the next one is read


def _blocks_of_lines(path: Path) -> Iterator[tuple[bytearray, int]]:
    """Yield whole lines, and how many bytes of the file they took."""
    position, suffix = 0, path.suffix.lower()
    try:
        with path.open("rb") as packed:
            file: Any = packed
            if suffix == ".gz":
                file = gzip.GzipFile(fileobj=packed)
            elif suffix == ".zst":
                file = io.BufferedReader(pyarrow.CompressedInputStream(packed, "zstd"), TASK_BYTES)
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


def _read_lines(path: Path, first_line: int, lines: bytes | bytearray, text_column: str,
                reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(io.BytesIO(lines), start=first_line):
        if line.strip():
            text = _text_of(line, f"{path}: line {number}", text_column)
            yield from cut_document([text], reading.cuts, path)


def _text_of(line: bytes, place: str, text_column: str) -> bytes:
    record: dict[str, Any] = {}
    try:
        record = json.loads(line.decode("utf-8", "replace").removeprefix("\ufeff"))
        text = record[text_column]
        return ("" if text is None else text).encode(  # a null is an empty document
            "utf-8", "replace")  # JSON can hold half of a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = (f"; its keys are {', '.join(record)[:60]} (--text-column)"
                 if isinstance(error, KeyError) and record else "")
        raise BadShard(
            f'{place} is not a JSON object with a text in "{text_column}"{found}') from None


def parquet_tasks(path: Path, text_column: str, cuts: Cuts) -> Iterator[Task]:
    """Leave small row groups to the workers; read large ones here, a few rows at a time.

    Raises: BadShard: it is not a complete parquet file. UserError: there is no such column.
    """
    with _naming(path):
        footer = pyarrow.parquet.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
        if text_column not in schema.names:
            raise UserError(f"{path}: has no column {text_column!r}; name one of its columns with"
                            f" --text-column: {', '.join(schema.names)[:80]}")
        kind = schema.field(text_column).type
        if str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) not in TEXT_TYPES:
            raise UserError(f"{path}: column {text_column!r} is of type {kind}; name a column of"
                            " text with --text-column")
        columns = [footer.schema.column(i).path for i in range(footer.num_columns)]
        sizes = [footer.row_group(group).column(columns.index(text_column)).total_uncompressed_size
                 for group in range(footer.num_row_groups)]
    share = path.stat().st_size / max(sum(sizes), 1)  # of the file, for each byte of text
    for groups, size in grouped(enumerate(sizes), TASK_BYTES):
        read = partial(_read_groups, path, groups, text_column)
        if size > WHOLE_BYTES:
            yield from _in_memory(read(Reading(cuts, [])), share)
        else:
            yield Task(read, size, int(size * share))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Replace pyarrow's errors for a damaged file by a BadShard that names the file."""
    try:
        yield
    except pyarrow.ArrowMemoryError:  # the file is not damaged
        raise
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:100]
        raise BadShard(f"{path}: not a complete parquet file: {reason}") from None


def _read_groups(path: Path, groups: list[int], text_column: str,
                 reading: Reading) -> Iterator[Piece]:
    with _naming(path):
        sizes = [_footer(path).row_group(group) for group in groups]
        row_bytes = sum(size.total_byte_size for size in sizes) // max(
            sum(size.num_rows for size in sizes), 1) + 1
        num_rows = min(max(BATCH_BYTES // row_bytes, 1), MAX_ROWS)
        # Buffered without read-ahead: this keeps a few rows in memory, not a whole row group.
        with pyarrow.parquet.ParquetFile(path, metadata=_footer(path), buffer_size=2**20,
                                         pre_buffer=False, page_checksum_verification=True) as file:
            for batch in file.iter_batches(num_rows, row_groups=groups, columns=[text_column],
                                           use_threads=False):
                yield from _column_pieces(batch.column(0), reading.cuts, path)


def _column_pieces(column: pyarrow.Array, cuts: Cuts, path: Path) -> Iterator[Piece]:
    if str(column.type) not in TEXT_TYPES[:2]:
        column = column.cast(pyarrow.large_string())
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= LARGE_DOCUMENT:
        with contextlib.suppress(UnicodeDecodeError):
            yield from [Piece(text or "", True) for text in column.to_pylist()]
            return
    for value in column:  # as buffers: a text of 100 MB never becomes one Python string
        blocks = [memoryview(value.as_buffer())] if value.is_valid else []
        yield from cut_document(blocks, cuts, path)
