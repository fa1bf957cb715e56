"""Text in pieces: large documents cut where their tokens stay the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from basics.errors import UserError

LARGE_DOCUMENT = 2**18  # bytes from which a document is cut into pieces: a regular expression over
# a million blanks, as long as a piece may get, is more than tiktoken's stack can hold
# GPT-2's tokenizer splits text before it merges anything, always between a character that is no
# space and a blank or a line's end behind it. (No space of Unicode ends in a byte of B0 to BF.)
SAFE_CUT = re.compile(rb"[!-~\xb0-\xbf][ \n]")


class BadShard(UserError):
    """A shard that is damaged, or does not hold what it should."""


class Piece(NamedTuple):
    """Text, a document or a part of one."""

    text: str
    ends_document: bool


def cut_document(data: bytes | memoryview) -> Iterator[Piece]:
    """Cut UTF-8 text into pieces of about LARGE_DOCUMENT bytes, whose tokens are those of the
    whole; but where nothing can be cut for as long again, it is cut all the same."""
    view, start = memoryview(data), 0
    for stop in find_cuts(view):
        yield piece_of(view[start:stop], ends_document=False)
        start = stop
    yield piece_of(view[start:], ends_document=True)


def find_cuts(view: memoryview) -> Iterator[int]:
    """Find where to cut; behind the last place there may be more text to come."""
    start = 0
    while len(view) - start > LARGE_DOCUMENT:
        limit = min(start + 2 * LARGE_DOCUMENT, len(view))
        if found := SAFE_CUT.search(view, start + LARGE_DOCUMENT - 1, limit):
            start = found.end() - 1
        elif limit == len(view):
            break
        else:
            between_characters = (i for i in range(limit, limit - 4, -1) if view[i] & 0xC0 != 0x80)
            start = next(between_characters, limit)  # or it is no UTF-8
        yield start


def piece_of(data: memoryview, *, ends_document: bool) -> Piece:
    return Piece(str(data, "utf-8", "replace"), ends_document)
