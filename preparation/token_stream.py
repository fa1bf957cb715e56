"""Token files that are written in a stream, what is in them, and where they are divided."""

import json
import operator
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

import numpy as np

from basics.files import fsync

HEADER_BYTES = 4096  # reserved in token files for the header, which is known only at the end
DATA_START = 8 + HEADER_BYTES
CHUNK_NUMBERS = 2**23  # tokens or ends that are read at a time
TOKEN_DTYPE = np.dtype("<u2")
ENDS_DTYPE = np.dtype("<i8")  # of `DocumentEnds`


@dataclass(frozen=True)
class Numbers:
    """Numbers that are added and subtracted field by field."""

    def __add__(self, more: Self) -> Self:
        return type(self)(*map(operator.add, astuple(self), astuple(more)))

    def __sub__(self, part: Self) -> Self:
        return type(self)(*map(operator.sub, astuple(self), astuple(part)))


@dataclass(frozen=True)
class Counts(Numbers):
    """What is in some tokens."""

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0  # as UTF-8


class NumberFile:
    """A file of numbers of one type, which need not fit in memory.

    The first `num_kept`, of an earlier launch, are kept.
    """

    def __init__(self, path: Path, dtype: np.dtype, *, start: int, num_kept: int) -> None:
        self.path = path
        self._dtype = dtype
        self._start = start  # of the numbers in the file, in bytes
        self._file = path.open("r+b" if num_kept else "wb")
        self.truncate(num_kept)
        self.close = self._file.close

    def add(self, numbers: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(numbers, dtype=self._dtype).data)

    def truncate(self, num_kept: int) -> None:
        """Keep only the first numbers."""
        self._file.truncate(self._start + self._dtype.itemsize * num_kept)
        self._file.seek(0, os.SEEK_END)

    def sync(self) -> None:
        self._file.flush()
        fsync(self.path)


class DocumentEnds(NumberFile):
    """The bytes of text up to the end of each document, int64.

    They tell how much text each split has. Its tokens do not: a tokenizer may add spaces to a text
    or change it.
    """

    def __init__(self, path: Path, *, num_documents: int = 0) -> None:
        super().__init__(path, ENDS_DTYPE, start=0, num_kept=num_documents)


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


def read_tokens(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the tokens of a written file in chunks, each (n,) uint16."""
    return _read(path, TOKEN_DTYPE, DATA_START, start, stop)


def read_ends(path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the entries of a written `DocumentEnds` in chunks, each (n,) int64."""
    return _read(path, ENDS_DTYPE, 0, start, stop)


def num_text_bytes(path: Path, num_documents: int) -> int:
    """Return the bytes of text of the first documents, from a written `DocumentEnds`."""
    last = max(num_documents - 1, 0)
    return sum(int(ends[0]) for ends in read_ends(path, last, num_documents))


def _read(path: Path, dtype: np.dtype, offset: int, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the numbers from `start` to `stop` of a file, whose first one is at byte `offset`."""
    for place in range(start, stop, CHUNK_NUMBERS):
        count = min(CHUNK_NUMBERS, stop - place)
        yield np.fromfile(path, dtype, count, offset=offset + dtype.itemsize * place)


def start_of_last(path: Path, num_tokens: int, num_documents: int, end_of_text: int) -> int:
    """Return where the last documents of a written file begin; there must be others before."""
    stop = num_tokens - 1  # without the last document's end
    while True:
        start = max(0, stop - CHUNK_NUMBERS)
        (tokens,) = read_tokens(path, start, stop)
        ends = np.flatnonzero(tokens == end_of_text)
        if len(ends) >= num_documents:
            return start + int(ends[-num_documents]) + 1
        num_documents -= len(ends)
        stop = start


def num_training_documents(num_documents: int, validation_fraction: float) -> int:
    """Return how many documents (of one, how many tokens) are for training; both splits get one.

    Source: the slice `train[:99%]` of Hugging Face's datasets: rounded, half to even.
    """
    share = 1 - Fraction(str(validation_fraction))
    return min(max(round(num_documents * share), 1), num_documents - 1)
