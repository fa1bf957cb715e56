"""Text that every machine has: Python's standard library."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from basics.errors import UserError
from preparation.sources import Source, TextsShard

STDLIB_PIECE_CHARACTERS = 3000


def python_stdlib() -> Source:
    """Return the source code and reference documentation of Python's standard library.

    Files are cut into pieces of some 3,000 characters, in a fixed shuffled order (by hash):
    training reads a token file from front to back, and a small batch should not come from one
    module.

    Raises:
        UserError: this installation of Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
               "encodings"}  # tables of code points
    pieces: set[str] = set()
    for path in root.rglob("*.py"):
        is_build_data = path.name.startswith("_sysconfigdata")  # differs between machines
        if not skipped & set(path.relative_to(root).parts) and not is_build_data:
            pieces.update(_cut_at_blank_lines(path.read_text(encoding="utf-8", errors="replace")))
    if not pieces:
        raise UserError(f"{root}: no Python source files; install Python with its library")
    shuffled = sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())
    name = "Python's standard library"
    return Source(name, [TextsShard(name, shuffled)], licence="other")


def _cut_at_blank_lines(text: str) -> Iterator[str]:
    """Cut at the first blank line after half of STDLIB_PIECE_CHARACTERS, at the latest at the
    first line end after all of them."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        is_break = not line.strip() and len(piece) >= STDLIB_PIECE_CHARACTERS // 2
        if is_break or len(piece) >= STDLIB_PIECE_CHARACTERS:
            yield piece
            piece = ""
    if piece.strip():
        yield piece
