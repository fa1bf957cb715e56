"""Token files that are written in a stream, and a table of where their documents end."""

import json
import os
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from basics.errors import UserError
from basics.files import fsync
from preparation.journal import DATA_START, DOCUMENT_BYTES, HEADER_BYTES, Progress, SplitCount

CHUNK_TOKENS = 2**23
CHUNK_DOCUMENTS = 2**19


class DocumentTable:
    """A file with a row for each document: tokens, bytes and characters until its end, int64.

    Args:
        num_rows: of an earlier launch, to keep; the file is truncated after them.
    """

    dtype, start, row_bytes = "<i8", 0, DOCUMENT_BYTES

    def __init__(self, path: Path, *, num_rows: int = 0) -> None:
        self.path = path
        self._file = path.open("r+b" if num_rows else "wb")
        self.truncate(num_rows)

    def add(self, rows: np.ndarray) -> None:
        """Append rows."""
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)

    def truncate(self, num_rows: int) -> None:
        """Keep only the first rows, and overwrite a header with zeros."""
        self._file.truncate(self.start + self.row_bytes * num_rows)
        self._file.seek(0)
        self._file.write(bytes(self.start))
        self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        """Write all rows so far to the disk, with fsync."""
        self._file.flush()
        fsync(self.path)

    def close(self) -> None:
        self._file.close()


class TokenFileWriter(DocumentTable):
    """A safetensors file of uint16 tokens, which need not fit in memory; a row is a token.

    The header is written last, so a partial file is never valid.
    """

    dtype, start, row_bytes = "<u2", DATA_START, 2

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header and close the file."""
        header = token_file_header(metadata, (self._file.tell() - self.start) // self.row_bytes)
        self.sync()
        self._file.seek(0)
        self._file.write(header)
        self.sync()
        self.close()


def token_file_header(metadata: dict[str, str], num_tokens: int) -> bytes:
    """Return the first DATA_START bytes of a token file.

    Source: the safetensors format: a length, JSON padded with blanks, then the data.

    Raises:
        ValueError: the metadata does not fit into the reserved bytes.
    """
    description = {
        "__metadata__": metadata,
        "tokens": {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]},
    }
    header = json.dumps(description, ensure_ascii=False).encode()
    if len(header) > HEADER_BYTES:
        raise ValueError(f"the header has {len(header)} bytes; at most {HEADER_BYTES} fit")
    return struct.pack("<Q", HEADER_BYTES) + header.ljust(HEADER_BYTES)


class TokenStream:
    """The tokens of documents, in a token file without or with a header, and their table."""

    def __init__(self, token_path: Path, table_path: Path) -> None:
        self._token_path, self._table_path = token_path, table_path
        self.num_documents = table_path.stat().st_size // DOCUMENT_BYTES

    def _rows(self, first: int, stop: int) -> np.ndarray:
        """Read rows of the table, (stop - first, 3) int64."""
        return np.fromfile(self._table_path, dtype="<i8", count=3 * (stop - first),
                           offset=DOCUMENT_BYTES * first).reshape(-1, 3)

    def end(self, num_documents: int) -> tuple[int, int, int]:
        """Return the tokens, bytes and characters of the first documents."""
        if not num_documents:
            return (0, 0, 0)
        return tuple(self._rows(num_documents - 1, num_documents)[0].tolist())

    def num_empty(self, num_documents: int) -> int:
        """Return how many of the first documents have no text."""
        count = 0
        for row in range(0, num_documents, CHUNK_DOCUMENTS):
            ends = self._rows(row, min(row + CHUNK_DOCUMENTS, num_documents))[:, 1]
            count += len(ends) - np.count_nonzero(np.diff(ends, prepend=self.end(row)[1]))
        return count

    def copy(self, first: int, stop: int, writer: TokenFileWriter | None = None) -> SplitCount:
        """Count the documents from `first` up to `stop` (not included), and write their tokens."""
        start, end, max_token_id = self.end(first), self.end(stop), 0
        for place in range(start[0], end[0], CHUNK_TOKENS):
            tokens = np.fromfile(self._token_path, dtype="<u2", offset=DATA_START + 2 * place,
                                 count=min(CHUNK_TOKENS, end[0] - place))
            max_token_id = max(max_token_id, int(tokens.max()))
            if writer is not None:
                writer.add(tokens)
        return SplitCount(num_documents=stop - first, num_tokens=end[0] - start[0],
                          max_token_id=max_token_id, num_text_bytes=end[1] - start[1])


def copy_documents(streams: Sequence[TokenStream], first: int, stop: int,
                   writer: TokenFileWriter | None = None) -> SplitCount:
    """Count, and write, documents of streams that follow each other; see `TokenStream.copy`."""
    count = SplitCount(num_text_bytes=0)
    for stream in streams:
        own_first, own_stop = max(first, 0), min(stop, stream.num_documents)
        if own_first < own_stop:
            count += stream.copy(own_first, own_stop, writer)
        first, stop = first - stream.num_documents, stop - stream.num_documents
    return count


def num_training_documents(num_documents: int, validation_fraction: float) -> int:
    """Return the number of training documents; both splits get at least one document.

    The same of tokens, if there is one document.

    Source: the slice `train[:99%]` of Hugging Face's datasets: rounded, half to even.
    """
    share = 1 - Fraction(str(validation_fraction))
    return min(max(round(num_documents * share), 1), num_documents - 1)


def check_documents(progress: Progress, num_documents: int, source: str) -> None:
    """Refuse a source without text, or one that cannot fill both splits. Raises: UserError."""
    if num_documents < 2:
        found = "1 document" if num_documents else "no documents"
        bad = f"; left out: {', '.join(progress.bad_files)}" if progress.bad_files else ""
        raise UserError(f"{source}: {found} found; wanted at least 2, for training and validation"
                        f" (JSON lines: one document per line){bad}")
    if not progress.num_characters:
        raise UserError(f"{source}: has no text: all of its {num_documents:,} documents are empty")
