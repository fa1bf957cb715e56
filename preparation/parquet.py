"""Read the text column of parquet files, a few rows at a time."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from basics.errors import UserError
from preparation.cutting import LARGE_DOCUMENT, BadShard, Piece, cut_document

MAX_ROWS = 64  # of a parquet file read at a time; fewer if the rows are large
BATCH_BYTES = 2**22  # of those rows, roughly


def text_bytes(path: Path, text_column: str) -> list[int]:
    """Return the uncompressed bytes of the text in each row group, as stated by the footer.

    Raises:
        BadShard: the file is not a complete parquet file.
        UserError: there is no such column.
    """
    with _naming(path):
        footer = pyarrow.parquet.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
        if text_column not in schema.names:
            raise UserError(f"{path}: has no column {text_column!r}; name one of its"
                            f" columns with --text-column: {', '.join(schema.names)[:80]}")
        kind = schema.field(text_column).type
        if not _is_text(kind):
            raise UserError(f"{path}: column {text_column!r} is of type {kind}; name"
                            " a column of text with --text-column")
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        index = paths.index(text_column)
        return [footer.row_group(i).column(index).total_uncompressed_size
                for i in range(footer.num_row_groups)]


def _is_text(kind: pyarrow.DataType) -> bool:
    kinds = pyarrow.types
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    return any(is_kind(kind) for is_kind in (
        kinds.is_string, kinds.is_large_string, kinds.is_string_view, kinds.is_null))


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


@functools.lru_cache(maxsize=2)  # a worker gets many tasks of the same file
def _footer(path: Path) -> Any:
    return pyarrow.parquet.read_metadata(path)


def parquet_pieces(path: Path, groups: list[int], text_column: str) -> Iterator[Piece]:
    """Read the documents of some row groups. Raises: BadShard."""
    with _naming(path):
        sizes = [_footer(path).row_group(group) for group in groups]
        row_bytes = sum(size.total_byte_size for size in sizes) // max(
            sum(size.num_rows for size in sizes), 1) + 1
        num_rows = min(max(BATCH_BYTES // row_bytes, 1), MAX_ROWS)
        # Buffered without read-ahead: this keeps a few rows in memory, not a whole row group.
        with pyarrow.parquet.ParquetFile(path, metadata=_footer(path), buffer_size=2**20,
                                         pre_buffer=False,
                                         page_checksum_verification=True) as file:
            for batch in file.iter_batches(num_rows, row_groups=groups,
                                           columns=[text_column], use_threads=False):
                yield from _column_pieces(batch.column(0))


def _column_pieces(column: pyarrow.Array) -> Iterator[Piece]:
    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        column = column.cast(pyarrow.large_string())
    longest = pyarrow.compute.max(pyarrow.compute.binary_length(column)).as_py() or 0
    if longest <= LARGE_DOCUMENT:
        with contextlib.suppress(UnicodeDecodeError):
            yield from [Piece(text or "", True) for text in column.to_pylist()]
            return
    for value in column:  # as buffers: a text of 100 MB never becomes one Python string
        yield from cut_document(memoryview(value.as_buffer()) if value.is_valid else b"")
