"""Cut large documents into pieces, at places where this does not change their tokens."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from basics.errors import UserError

# Documents of more bytes than this are cut into pieces. tiktoken's regular expression overflows the
# stack on a million spaces in a row.
LARGE_DOCUMENT = 2**18
# Before merging, GPT-2's tokenizer always splits text between a character that is not white space
# and a space or newline that follows it. (No Unicode white space ends in a byte of B0 to BF.)
SAFE_CUT = re.compile(rb"[!-~\xb0-\xbf][ \n]")
MAX_UNCUT = 2**24  # characters that are encoded at once: a tokenizer's file needs 80 bytes for each
Cuts = Literal["any", "safe", "none"]  # where a tokenizer allows a document to be cut


class BadShard(UserError):
    """A shard that is damaged or does not contain what was expected."""


class Piece(NamedTuple):
    """The text of a document, or of a part of one."""

    text: str
    ends_document: bool
    ends_safely: bool = True  # where GPT-2's tokenizer is certain to split the text


def cut_document(data: bytes | memoryview) -> Iterator[Piece]:
    """Cut UTF-8 text into pieces of about LARGE_DOCUMENT bytes.

    The tokens of the pieces are those of the whole document, unless there is no place for a safe
    cut in twice LARGE_DOCUMENT bytes: then the text is cut between any two characters.
    """
    view, start = memoryview(data), 0
    for stop in find_cuts(view):
        yield piece_before_cut(view, start, stop)
        start = stop
    yield last_piece(view[start:])


def find_cuts(view: memoryview) -> Iterator[int]:
    """Find the positions of the cuts; text may still be appended after the last one."""
    start = 0
    while len(view) - start > LARGE_DOCUMENT:
        limit = min(start + 2 * LARGE_DOCUMENT, len(view))
        if found := SAFE_CUT.search(view, start + LARGE_DOCUMENT - 1, limit):
            start = found.end() - 1
        elif limit == len(view):
            break
        else:
            between_characters = (i for i in range(limit, limit - 4, -1) if view[i] & 0xC0 != 0x80)
            start = next(between_characters, limit)  # limit: not UTF-8
        yield start


def piece_before_cut(view: memoryview, start: int, stop: int) -> Piece:
    """Return the piece from `start` to a cut that `find_cuts` has found at `stop`."""
    is_safe = SAFE_CUT.match(view, stop - 1) is not None
    return Piece(str(view[start:stop], "utf-8", "replace"), False, is_safe)


def last_piece(data: memoryview) -> Piece:
    return Piece(str(data, "utf-8", "replace"), True)


def joined(pieces: Iterable[Piece], cuts: Cuts, *, name: str = "") -> Iterator[Piece]:
    """Join the pieces that a tokenizer needs as one text.

    Raises:
        BadShard: a document, of the file `name`, is too long for that.
    """
    if cuts == "any":
        yield from pieces
        return
    waiting: list[str] = []
    for text, ends_document, ends_safely in pieces:
        waiting.append(text)
        if sum(map(len, waiting)) > MAX_UNCUT:
            raise BadShard(f"{name}: a document of more than {MAX_UNCUT >> 20} million characters"
                           " in which the tokenizer allows no cut")
        if ends_document or (ends_safely and cuts == "safe"):
            yield Piece("".join(waiting), ends_document, ends_safely)
            waiting = []
    if waiting:  # the document continues in the next task
        yield Piece("".join(waiting), ends_document=False, ends_safely=False)
