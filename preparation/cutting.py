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


def cut_document(blocks: Iterable[bytes | memoryview], cuts: Cuts,
                 name: object) -> Iterator[Piece]:
    """Cut UTF-8 text, in blocks of any size, into pieces of about LARGE_DOCUMENT bytes.

    With `safe` cuts the tokens of the pieces are those of the whole document. With `any` cuts the
    text is cut between two characters if twice LARGE_DOCUMENT bytes have no place for a safe one.
    Raises: BadShard: what may not be cut, in the file `name`, is too long to be encoded at once.
    """
    rest: bytes | memoryview = b""
    for block in blocks:
        view, start = memoryview(bytes(rest) + block if rest else block), 0
        while cuts != "none" and len(view) - start > LARGE_DOCUMENT:
            limit = min(start + 2 * LARGE_DOCUMENT, len(view)) if cuts == "any" else len(view)
            found = SAFE_CUT.search(view, start + LARGE_DOCUMENT - 1, limit)
            if found:
                stop = found.end() - 1
            elif limit < len(view):
                stop = next((place for place in range(limit, limit - 4, -1)
                             if view[place] & 0xC0 != 0x80), limit)  # the start of a character
            else:
                break  # there may be a place in the next block
            yield Piece(str(view[start:stop], "utf-8", "replace"), False)
            start = stop
        rest = view[start:]
        if len(rest) > MAX_UNCUT and len(str(rest, "utf-8", "replace")) > MAX_UNCUT:
            raise BadShard(f"{name}: a document of more than {MAX_UNCUT >> 20} million characters"
                           " in which the tokenizer allows no cut")
    yield Piece(str(rest, "utf-8", "replace"), True)
