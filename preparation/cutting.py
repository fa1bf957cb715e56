"""Cut text into documents, and large documents into pieces that have the same tokens."""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from basics.errors import UserError
from tokens.tokenizer import END_OF_TEXT_TOKENS

# Documents of more bytes than this are cut into pieces. tiktoken's regular expression overflows the
# stack on a million spaces in a row, and its time grows with the square of a long word.
LARGE_DOCUMENT = 2**18
# Before merging, GPT-2's tokenizer always splits text between a character that is not white space
# and a space or newline that follows it. (No Unicode white space ends in a byte of B0 to BF.)
SAFE_CUT = re.compile(rb"[!-~\xb0-\xbf][ \n]")
MAX_UNCUT = 2**24  # characters that are encoded at once: a tokenizer's file needs 80 bytes for each
Cuts = Literal["any", "safe", "none"]  # where a tokenizer allows a document to be cut
REPLACEMENT = "\ufffd"  # stands for bytes that are not UTF-8
# Halves of surrogate pairs, but those with which `surrogateescape` keeps bytes that are not UTF-8.
HALF_PAIR = re.compile("[\ud800-\udc7f\udd00-\udfff]")
MARKER = re.compile("|".join(map(re.escape, END_OF_TEXT_TOKENS)))
NO_CHARACTER = "\udcff"  # the byte FF, which is never UTF-8, as `surrogateescape` keeps it
# Line ends that belong to a separator, if there are any; more are text.
LINE_ENDS: Any = re.compile(rb"(?:\r?\n){0,2}")
LAST_LINE_ENDS: Any = re.compile(rb"(?:\r?\n){0,2}\Z")
LINE_ENDS_BYTES = 4


class Piece(NamedTuple):
    """The text of some documents in a row, or a part of one."""

    data: bytes  # UTF-8, perhaps damaged: workers decode it
    ends: list[int]  # of the documents in `data`; none in a part that does not end its document

    def parts(self) -> list[bytes]:
        """Return the text of each document, or of the part."""
        bounds = itertools.pairwise([0, *(self.ends or [len(self.data)])])
        return [self.data[start:end] for start, end in bounds]


def cut_document(blocks: Iterable[bytes | memoryview], cuts: Cuts, name: object) -> Iterator[Piece]:
    """Cut UTF-8 text, in blocks of any size, into pieces of about LARGE_DOCUMENT bytes.

    With `safe` cuts the tokens of the pieces are those of the whole document. With `any` cuts the
    text is cut between two characters if twice LARGE_DOCUMENT bytes have no place for a safe one.
    Raises: UserError: what may not be cut, in the file `name`, is too long to be encoded at once.
    """
    rest: bytes | memoryview = b""
    for block in blocks:
        view = memoryview(bytes(rest) + block if rest else block)
        start = 0
        while cuts != "none" and len(view) - start > LARGE_DOCUMENT:
            limit = min(start + 2 * LARGE_DOCUMENT, len(view)) if cuts == "any" else len(view)
            found = SAFE_CUT.search(view, start + LARGE_DOCUMENT - 1, limit)
            if found:
                stop = found.end() - 1
            elif limit < len(view):
                stop = next(
                    (place for place in range(limit, limit - 4, -1) if view[place] & 0xC0 != 0x80),
                    limit,
                )  # the start of a character
            else:
                break  # there may be a place in the next block
            yield Piece(bytes(view[start:stop]), [])
            start = stop
        rest = view[start:]
        if len(rest) > MAX_UNCUT and len(str(rest, "utf-8", "replace")) > MAX_UNCUT:
            raise UserError(
                f"{name}: a document of more than {MAX_UNCUT >> 20} million characters"
                " in which the tokenizer allows no cut"
            )
    yield Piece(bytes(rest), [len(rest)])


def decoded(data: bytes) -> tuple[str, int]:
    """Return UTF-8 as text, with the number of U+FFFD that stand for bytes that are none."""
    try:
        return str(data, "utf-8"), 0
    except UnicodeDecodeError:
        text = str(data, "utf-8", "replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def markers_in(text: str) -> set[str]:
    """Return the markers of the end of a text that a text has in it."""
    return set(MARKER.findall(text))


def to_bytes(text: str) -> bytes:
    """Return text as UTF-8, with the bytes that `surrogateescape` kept when it was decoded.

    Other halves of surrogate pairs become bytes that are not UTF-8, so that they are counted too.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return HALF_PAIR.sub(NO_CHARACTER, text).encode("utf-8", "surrogateescape")


def split_documents(blocks: Iterable[bytes], separator: bytes) -> Iterator[Iterator[bytes]]:
    """Yield the blocks of each document between separators, which are to be read in this order.

    Up to two line ends on each side belong to the separator, and two at the end of the file.
    Documents without text are left out.
    """
    parts = _parts(blocks, separator)
    for is_separator, document in itertools.groupby(parts, key=lambda part: part is None):
        if not is_separator:
            yield (part for part in document if part is not None)


def _parts(blocks: Iterable[bytes], separator: bytes) -> Iterator[bytes | None]:
    """Yield the text between separators in parts of any size, and None for each separator."""
    # A separator with its line ends may begin that far before the end of a block; whether more line
    # ends follow it is seen in the next one.
    held = len(separator) + 3 * LINE_ENDS_BYTES
    rest = b""
    for block in itertools.chain(blocks, [None]):
        is_last = block is None
        rest += block or b""
        start = 0
        for found, end in _separators(rest, separator):
            if end + LINE_ENDS_BYTES > len(rest) and not is_last:
                break
            if found > start:
                yield rest[start:found]
            yield None
            start = end
        if is_last:
            text = LAST_LINE_ENDS.sub(b"", rest[start:])
        else:
            stop = max(start, len(rest) - held)
            text = rest[start:stop]
            rest = rest[stop:]
        if text:
            yield text


def _separators(text: bytes, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yield where separators with their line ends begin and end. Much faster than one pattern."""
    start = 0  # of the text after the last separator
    place = text.find(separator)
    while place >= 0:
        before = text[max(start, place - LINE_ENDS_BYTES) : place]
        start = LINE_ENDS.match(text, place + len(separator)).end()
        yield place - len(LAST_LINE_ENDS.search(before)[0]), start
        place = text.find(separator, start)
