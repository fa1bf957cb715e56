"""Open files of documents: unpacked, and in UTF-8."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
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
    """Open a file: yield it as it is stored, whose position is the progress, and its text.

    The second one is a buffered reader of the unpacked bytes, in UTF-8 where an `encoding` is
    named, without a byte order mark. Raises: BadShard: the file is damaged or cannot be read, now
    or in the context, or it is UTF-16 and no encoding is named.
    """
    try:
        with path.open("rb") as stored:
            file = _unpacked(stored, path.suffix.lower())
            if encoding:
                file = io.BufferedReader(_InUtf8(file, encoding), BUFFER_BYTES)
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
        return io.BufferedReader(_Xz(stored), BUFFER_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(stored, "zstd"), BUFFER_BYTES)
    return stored


class _Xz(io.RawIOBase):
    """The content of an .xz file, which cannot make `XZ_MEMORY` larger, as lzma.LZMAFile's can."""

    def __init__(self, stored: BinaryIO) -> None:
        self._stored = stored
        self._decoder = self._new_decoder()

    def _new_decoder(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self._decoder.eof:  # another stream may follow, after zeros
                packed = self._decoder.unused_data or self._stored.read(PACKED_BYTES)
                packed = packed.lstrip(b"\0")
                if not packed:
                    return 0
                self._decoder = self._new_decoder()
            elif self._decoder.needs_input:
                packed = self._stored.read(PACKED_BYTES)
                if not packed:
                    raise EOFError("it ends in the middle of its data")
            data = self._decoder.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _InUtf8(io.RawIOBase):
    """A file in another encoding as UTF-8. What is none of its characters becomes a byte that is
    not UTF-8, so that it is counted like those of other files."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._file, self._data = file, memoryview(b"")
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            block = self._file.read(PACKED_BYTES)
            text = self._decoder.decode(block, final=not block)
            self._data = memoryview(to_bytes(text.replace(REPLACEMENT, NO_CHARACTER)))
            if not block:
                break
        size = min(len(buffer), len(self._data))
        buffer[:size] = self._data[:size]
        self._data = self._data[size:]
        return size
