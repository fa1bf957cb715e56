"""Where each document of a token file ends, so that documents can be divided into splits later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from basics.files import fsync
from preparation.journal import DOCUMENT_BYTES, SplitCount
from preparation.token_file_writer import DATA_START, TokenFileWriter

CHUNK_TOKENS = 2**23
CHUNK_DOCUMENTS = 2**19


class DocumentTable:
    """A file with a row for each document: tokens, bytes and characters until its end, int64.

    A document that could not be read ends where the one before it does.

    Args:
        num_documents: rows of an earlier launch to keep.
    """

    def __init__(self, path: Path, *, num_documents: int = 0) -> None:
        self.path = path
        self._file = path.open("r+b" if num_documents else "wb")
        self.truncate(num_documents)

    def add(self, ends: np.ndarray) -> None:
        """Append rows, (n, 3) int64."""
        self._file.write(np.ascontiguousarray(ends, dtype="<i8").data)

    def truncate(self, num_documents: int) -> None:
        self._file.truncate(DOCUMENT_BYTES * num_documents)
        self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        self._file.flush()
        fsync(self.path)

    def close(self) -> None:
        self._file.close()


class TokenStream:
    """The tokens of documents, in a token file without or with a header, and their table."""

    def __init__(self, token_path: Path, table_path: Path) -> None:
        self._token_path, self._table_path = token_path, table_path
        self.num_documents = table_path.stat().st_size // DOCUMENT_BYTES

    def end(self, num_documents: int) -> tuple[int, int, int]:
        """Return the tokens, bytes and characters of the first documents."""
        if not num_documents:
            return (0, 0, 0)
        (row,) = self._rows(num_documents - 1, num_documents)
        return tuple(row.tolist())

    def copy(self, first: int, stop: int, count: SplitCount,
             writer: TokenFileWriter | None = None) -> SplitCount:
        """Count the documents from `first` up to `stop` (not included), and write their tokens.

        Args:
            count: of the documents before them in the same split.
        """
        start, end = self.end(first), self.end(stop)
        for tokens in self._tokens(start[0], end[0]):
            if writer is not None:
                writer.add(tokens)
            count = count.with_more(tokens, num_documents=0, num_text_bytes=0)
        num_documents = 0
        for row in range(first, stop, CHUNK_DOCUMENTS):
            ends = self._rows(row, min(row + CHUNK_DOCUMENTS, stop))[:, 0]
            num_documents += np.count_nonzero(np.diff(ends, prepend=self.end(row)[0]))
        return count.with_more(np.empty(0, np.uint16), num_documents=num_documents,
                               num_text_bytes=end[1] - start[1])

    def ends_with(self, end_of_text: int, num_tokens: int) -> bool:
        """Return whether the files are whole and an end-of-text token ends each document."""
        if not (self._token_path.is_file() and self._table_path.is_file()) or (
                self._token_path.stat().st_size != DATA_START + 2 * num_tokens):
            return False
        tokens = self._map(num_tokens)
        for row in range(0, self.num_documents, CHUNK_DOCUMENTS):
            rows = self._rows(row, min(row + CHUNK_DOCUMENTS, self.num_documents))
            before = np.vstack([self.end(row), rows[:-1]])
            ends = rows[:, 0]
            if np.any(rows < before) or ends[-1] > num_tokens:  # a difference could overflow
                return False
            if np.any(tokens[ends[ends > 0] - 1] != end_of_text):
                return False
        return self.end(self.num_documents)[0] == num_tokens

    def _rows(self, first: int, stop: int) -> np.ndarray:
        """Read rows of the table, (stop - first, 3) int64."""
        return np.fromfile(self._table_path, dtype="<i8", count=3 * (stop - first),
                           offset=DOCUMENT_BYTES * first).reshape(-1, 3)

    def _tokens(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for first in range(start, stop, CHUNK_TOKENS):
            yield np.fromfile(self._token_path, dtype="<u2", offset=DATA_START + 2 * first,
                              count=min(CHUNK_TOKENS, stop - first))

    def _map(self, num_tokens: int) -> np.ndarray:
        if not num_tokens:
            return np.empty(0, dtype=np.uint16)
        return np.memmap(self._token_path, dtype="<u2", mode="r", offset=DATA_START,
                         shape=(num_tokens,))
