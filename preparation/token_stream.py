"""Token files that are written in a stream, and the index of their documents."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

import numpy as np

from basics.files import fsync

HEADER_BYTES = 4096  # reserved in token files for the header, which is known only at the end
DATA_START = 8 + HEADER_BYTES
CHUNK_NUMBERS = 2**23  # tokens that are read at a time
CHUNK_ROWS = 2**18  # of an index
TOKEN_DTYPE = np.dtype("<u2")
ROW_DTYPE = np.dtype("<u8")
# The columns of an index: sums over all documents up to the end of each.
TOKENS, TEXT_BYTES, REPLACED, DIGEST = range(4)
NUM_COLUMNS = 4
ROW_BYTES = NUM_COLUMNS * ROW_DTYPE.itemsize


@dataclass(frozen=True)
class Counts:
    """What is in some tokens."""

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0  # as UTF-8

    def __add__(self, more: "Counts") -> "Counts":
        return Counts(
            self.num_documents + more.num_documents,
            self.num_tokens + more.num_tokens,
            self.num_text_bytes + more.num_text_bytes,
        )


class NumberFile:
    """A file of numbers of one type, which need not fit in memory.

    The first `num_kept`, of an earlier launch, are kept.
    """

    def __init__(self, path: Path, dtype: np.dtype, *, start: int, num_kept: int) -> None:
        self.path = path
        self._dtype = dtype
        self._file = path.open("r+b" if num_kept else "wb")
        self._file.truncate(start + dtype.itemsize * num_kept)  # `start` is in bytes
        self._file.seek(0, os.SEEK_END)
        self.close = self._file.close

    def add(self, numbers: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).data)

    def sync(self) -> None:
        self._file.flush()
        fsync(self.path)


class TokenFileWriter(NumberFile):
    """A safetensors file of uint16 tokens, whose first `num_tokens` are kept.

    The header is written last, so a partial file is never valid.
    """

    def __init__(self, path: Path, *, num_tokens: int = 0) -> None:
        super().__init__(path, TOKEN_DTYPE, start=DATA_START, num_kept=num_tokens)

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header, and close the file; the metadata must fit into HEADER_BYTES.

        Source: the safetensors format: a length, JSON padded with blanks, then the data.
        """
        num_tokens = (self._file.tell() - DATA_START) // 2
        facts = {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]}
        parts = {"__metadata__": metadata, "tokens": facts}
        header = json.dumps(parts, ensure_ascii=False).encode()
        assert len(header) <= HEADER_BYTES, f"the header has {len(header)} bytes"
        self.sync()
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self.sync()
        self.close()


class IndexWriter(NumberFile):
    """The index of the documents of a token file: a row of sums up to the end of each document.

    The text of each split cannot be counted from its tokens: a tokenizer may add spaces to a text
    or change it.
    """

    def __init__(self, path: Path, *, num_documents: int = 0) -> None:
        super().__init__(path, ROW_DTYPE, start=0, num_kept=NUM_COLUMNS * num_documents)


class Index:
    """A written index; its rows need not fit in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def counts(self, num_documents: int) -> Counts:
        """Return what the first documents have."""
        if not num_documents:
            return Counts()
        row = self._rows(num_documents - 1, 1)[0]
        return Counts(num_documents, int(row[TOKENS]), int(row[TEXT_BYTES]))

    def documents(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield what each document has by itself, in blocks of (n, 4) uint64."""
        before = self._rows(start - 1, 1) if start else np.zeros((1, NUM_COLUMNS), ROW_DTYPE)
        for place in range(start, stop, CHUNK_ROWS):
            rows = np.concatenate([before, self._rows(place, min(CHUNK_ROWS, stop - place))])
            yield rows[1:] - rows[:-1]  # of digests, modulo 2**64
            before = rows[-1:]

    def num_repeated(self, num_training: int, num_documents: int) -> int:
        """Return how many validation documents, the last ones, are among the others too."""
        parts = [with_text(rows) for rows in self.documents(num_training, num_documents)]
        digests, counts = np.unique(np.concatenate(parts), return_counts=True)
        found = np.zeros(len(digests), dtype=bool)
        for rows in self.documents(0, num_training):
            found |= np.isin(digests, with_text(rows))
        return int(counts[found].sum())

    def _rows(self, start: int, count: int) -> np.ndarray:
        numbers = np.fromfile(self._path, ROW_DTYPE, NUM_COLUMNS * count, offset=ROW_BYTES * start)
        return numbers.reshape(-1, NUM_COLUMNS)


def with_text(rows: np.ndarray) -> np.ndarray:
    """Return the digests of the documents that have text."""
    return rows[rows[:, TEXT_BYTES] > 0, DIGEST]


def digest_of(tokens: np.ndarray) -> int:
    """Return 64 bits that are the same for the same tokens, (n,) uint16, and hardly for others."""
    return int.from_bytes(blake2b(tokens.data, digest_size=8).digest(), "little")


def read_tokens(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the tokens of a written file in chunks, each (n,) uint16."""
    for place in range(start, stop, CHUNK_NUMBERS):
        count = min(CHUNK_NUMBERS, stop - place)
        yield np.fromfile(path, TOKEN_DTYPE, count, offset=DATA_START + 2 * place)


def num_training_documents(num_documents: int, validation_fraction: float) -> int:
    """Return how many documents (of one, how many tokens) are for training; both splits get one.

    Source: the slice `train[:99%]` of Hugging Face's datasets: rounded, half to even.
    """
    share = 1 - Fraction(str(validation_fraction))
    return min(max(round(num_documents * share), 1), num_documents - 1)
