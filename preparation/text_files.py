"""Files of text: each is a document, or divided by separators, whatever its suffix."""

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.compression import compr

from basics.errors import UserError, first_line
from preparation.cutting import (
    NO_CHARACTER,
    REPLACEMENT,
    Cuts,
    Piece,
    cut_document,
    decoded,
    split_documents,
    to_bytes,
)
from preparation.sources import (
    CHUNK_BYTES,
    IS_EMPTY,
    OLD_TEXT,
    TOO_LARGE,
    Chunk,
    Request,
    Source,
    SourceOptions,
    grouped,
    printable,
)

BLOCK_BYTES = 2**20  # of text that is read at a time
JUDGED_BYTES = 2**20  # of the beginning of a file, which tells whether it is text
MAX_UNDECODABLE = 0.01  # of the bytes of a text file, with those that are 0; more are no text
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
LFS_POINTER = b"version https://git-lfs"
IS_POINTER = "is a Git LFS pointer; fetch its content with: git lfs pull"


class TextFile(NamedTuple):
    """A regular file, or one on the hub, which may hold text."""

    name: str  # for people
    path: str  # also hf://...
    num_bytes: int


class NoText(Exception):
    """A file that is not read, for the reason in the message."""


class TextFiles(Source):
    """Documents in files of text."""

    is_text = True

    def __init__(
        self,
        request: Request,
        files: list[TextFile],
        options: SourceOptions,
        left_out: dict[str, str] | None = None,
    ) -> None:
        """Raises: UserError: an option is given that is for datasets."""
        has_split = options.config or options.split
        if (has_split and not request.hub_name) or options.text_column != SourceOptions.text_column:
            raise UserError(
                f"{options.source}: --config, --split and --text-column are for datasets; these are"
                " text files"
            )
        super().__init__(request, left_out)
        self._files = files
        self._options = options
        self.num_text_bytes = sum(file.num_bytes for file in files)

    def chunks(self, position: Any, cuts: Cuts) -> Iterator[Chunk]:
        first = position or 0
        for group, num_bytes in grouped(map(_with_size, self._files[first:]), CHUNK_BYTES):
            left_out: dict[str, str] = {}
            pieces = self._pieces(group, cuts, left_out)
            # What is left out is known when all is read; of a large file, when it has begun.
            is_large = num_bytes > CHUNK_BYTES
            read = list(itertools.islice(pieces, 1 if is_large else None))
            place = f"file {first + 1:,} of {len(self._files):,}"
            yield Chunk(first, itertools.chain(read, pieces), place, left_out)
            first += len(group)

    def _pieces(
        self, files: list[TextFile], cuts: Cuts, left_out: dict[str, str]
    ) -> Iterator[Piece]:
        for file in files:
            try:
                yield from _documents(file, self._options, cuts)
            except NoText as error:
                left_out[file.name] = str(error)


def text_files(paths: Mapping[str, Path]) -> list[TextFile]:
    """Return local files, by their names, as files that may hold text."""
    return [
        TextFile(printable(name), str(path), path.stat().st_size) for name, path in paths.items()
    ]


def _with_size(file: TextFile) -> tuple[TextFile, int]:
    """Return a file with its size; a packed one may unpack to anything, so it counts as large."""
    is_packed = Path(file.path).suffix.lower() in PACKED
    return file, CHUNK_BYTES + 1 if is_packed else file.num_bytes


def _documents(file: TextFile, options: SourceOptions, cuts: Cuts) -> Iterator[Piece]:
    """Yield the documents of a file. Raises: NoText; UserError: its beginning is read already."""
    is_judged = False
    try:
        with ExitStack() as stack:
            blocks = _blocks(file, options.encoding, stack)
            head = b""
            while len(head) < JUDGED_BYTES and (block := next(blocks, b"")):
                head += block
            head = head.removeprefix(codecs.BOM_UTF8)
            _judge(head, options.encoding)
            is_judged = True
            text = itertools.chain([head], blocks)
            documents: Iterable[Iterable[bytes]] = [text]
            if options.document_separator:
                documents = split_documents(text, options.document_separator.encode())
            for document in documents:
                yield from cut_document(document, cuts, file.name)
    except (NoText, UserError):
        raise
    except Exception as error:  # unpackers raise many kinds
        reason = f"cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"
        if isinstance(error, MemoryError):
            reason = TOO_LARGE
        if is_judged:
            raise UserError(
                f"{file.name}: {reason}; replace it, or move it away and delete the unfinished"
                " preparation"
            ) from None
        raise NoText(reason) from None


def _judge(head: bytes, encoding: str) -> None:
    """Raise NoText if this beginning of a file, as UTF-8, is no text."""
    if reason := recognised(head, encoding):
        raise NoText(reason)
    num_zeros = head.count(0)
    share = (decoded(head)[1] + num_zeros) / len(head)
    if share <= MAX_UNDECODABLE:
        return
    if not encoding and 0.4 < num_zeros / len(head) <= 0.5:
        order = "le" if 2 * head[1::2].count(0) > num_zeros else "be"
        raise NoText(f"about every second byte is 0; if it is UTF-16: --encoding utf-16-{order}")
    if num_zeros:
        raise NoText("is binary")
    if encoding:
        raise NoText(f"{share:.0%} of its bytes are not {encoding} (--encoding)")
    raise NoText(f"{share:.0%} of its bytes are not UTF-8; if it is {OLD_TEXT}")


def recognised(head: bytes, encoding: str) -> str:
    """Return why a file that begins so cannot be read as it is; empty if that is not known."""
    if not head:
        return IS_EMPTY
    if head.startswith(LFS_POINTER):
        return IS_POINTER
    if not encoding and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "is UTF-16; read with --encoding utf-16"
    return ""


def _blocks(file: TextFile, encoding: str, stack: ExitStack) -> Iterator[bytes]:
    """Yield the unpacked content of a file as UTF-8; close it with `stack`.

    Bytes that are no character of `encoding` become a byte that is not UTF-8 either. So they are
    counted like the damaged bytes of a UTF-8 file.
    """
    if "://" in file.path:
        from huggingface_hub import HfFileSystem

        content: Any = stack.enter_context(HfFileSystem().open(file.path))
    else:
        content = stack.enter_context(open(file.path, "rb"))
    if packing := PACKED.get(Path(file.path).suffix.lower()):
        content = stack.enter_context(compr[packing](content, mode="rb"))
    blocks = iter(partial(content.read, BLOCK_BYTES), b"")
    if not encoding:
        yield from blocks
        return
    for text in codecs.iterdecode(blocks, encoding, "replace"):
        yield to_bytes(text.replace(REPLACEMENT, NO_CHARACTER))


def data_suffix(name: str) -> str:
    """Return the suffix of a file, of a packed one the suffix before that."""
    suffixes = Path(name.lower()).suffixes
    if len(suffixes) > 1 and suffixes[-1] in PACKED:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def leads_out(path: Path, root: Path) -> bool:
    """Return whether a path is a link to a place outside of a directory."""
    return path.is_symlink() and root.resolve() not in path.resolve().parents
