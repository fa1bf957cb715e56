"""Open files of documents: unpacked, and in UTF-8."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow

from preparation.cutting import NO_CHARACTER, REPLACEMENT, BadShard, to_bytes

BUFFER_BYTES = 2**20
PACKED_BYTES = 2**16  # of a file that is read at a time
XZ_MEMORY = 2**28  # bytes that unpacking may take; files of `xz -9` need 2**26
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, UnicodeError)


@contextlib.contextmanager
def opened(path: Path, encoding: str) -> Iterator[tuple[BinaryIO, Any]]:
    """Open a file; yield the stored file, whose position tells the progress, and its text.

    The text is a buffered reader of the unpacked bytes without a byte order mark; if an `encoding`
    is named, they are converted from it to UTF-8. Raises: BadShard: the file is damaged or cannot
    be read, also if this is found while the context reads it; or it is UTF-16 and no encoding is
    named.
    """
    try:
        with path.open("rb") as stored:
            file = _unpacked(stored, path.suffix.lower())
            if encoding:
                file = io.BufferedReader(_Blocks(_utf8_blocks(file, encoding)), BUFFER_BYTES)
            head = file.peek(3)
            if not encoding and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise BadShard(f"{path}: is UTF-16; wanted UTF-8, or --encoding utf-16")
            if head.startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield stored, file
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadShard(f"{path}: damaged or cannot be read: {reason}") from None


def _unpacked(stored: BinaryIO, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stored)
    if suffix == ".bz2":
        return bz2.BZ2File(stored)
    if suffix == ".xz":
        return io.BufferedReader(_Blocks(_xz_blocks(stored)), BUFFER_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), BUFFER_BYTES)
    return stored


def _xz_blocks(stored: BinaryIO) -> Iterator[bytes]:
    """Yield the content of an .xz file. Unlike lzma.LZMAFile, this limits the memory it takes."""
    packed = b""
    while True:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
        while not decoder.eof:
            if decoder.needs_input and not packed:
                packed = stored.read(PACKED_BYTES)
                if not packed:
                    raise EOFError("it ends in the middle of its data")
            yield decoder.decompress(packed, BUFFER_BYTES)
            packed = b""
        # Another stream may follow, after zeros, which may fill whole blocks.
        packed = decoder.unused_data.lstrip(b"\0")
        while not packed:
            block = stored.read(PACKED_BYTES)
            if not block:
                return
            packed = block.lstrip(b"\0")


def _utf8_blocks(file: Any, encoding: str) -> Iterator[bytes]:
    """Yield a file in another encoding as UTF-8.

    Bytes that are no character of the encoding become a byte that is not UTF-8 either, so that
    `cut_document` counts them as it counts damage in files that are not converted.
    """
    blocks = iter(partial(file.read, PACKED_BYTES), b"")
    for text in codecs.iterdecode(blocks, encoding, "replace"):
        yield to_bytes(text.replace(REPLACEMENT, NO_CHARACTER))


class _Blocks(io.RawIOBase):
    """A file whose content comes in blocks of any size."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
