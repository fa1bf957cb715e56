"""Documents out of parquet, JSON lines and plain text files, one at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from run_config import UserError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SUFFIXES = (".parquet", ".jsonl", *TEXT_SUFFIXES)
PIECE_CHARACTERS = 3000
ROWS_AT_A_TIME = 256  # FineWeb's documents are a few kilobytes, its largest several megabytes


@dataclass(frozen=True)
class DocumentSource:
    """Documents in the order in which they are read, and how many there are."""

    name: str
    num_documents: int
    documents: Iterable[str]


def find_documents(source: Path, *, text_column: str = "text") -> DocumentSource:
    """Find the document files in a directory (at any depth, by name), or take one file.

    A row of parquet is a document, so is a JSON line, so is a whole text file; a null is an empty
    one. They are counted first: parquet by its footers, JSON lines by reading them.

    Raises:
        UserError: there are none, or they are of more than one kind.
    """
    if source.is_file():
        paths = [source]
    else:
        paths = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES)
    kinds = {path.suffix for path in paths} - set(TEXT_SUFFIXES)
    if not paths or not kinds <= set(SUFFIXES):
        raise UserError(f"{source}: no documents; wanted files ending in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise UserError(f"{source}: holds both {' and '.join(sorted(kinds))}; name one directory"
                        " or file with one kind")
    if kinds:  # a data set's README.md beside its parquet is no document
        paths = [path for path in paths if path.suffix in kinds]
    documents = itertools.chain.from_iterable(_documents_in(path, text_column) for path in paths)
    return DocumentSource(source.name, sum(_count_in(path) for path in paths), documents)


def python_stdlib() -> DocumentSource:
    """Give the source and the reference documentation of Python's own standard library.

    Files are cut into pieces of a screenful or two, and those put into a fixed shuffled order (by
    their hash): training reads a token file from front to back, and a small batch should not be
    all of one module.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
               "encodings"}  # that one is tables of code points
    pieces: set[str] = set()
    for path in root.rglob("*.py"):
        of_this_build = path.name.startswith("_sysconfigdata")  # no two machines have the same
        if not skipped & set(path.relative_to(root).parts) and not of_this_build:
            pieces.update(_cut(path.read_text(encoding="utf-8", errors="replace")))
    if not pieces:
        raise UserError(f"{root}: no Python source there; wanted an installation with its library")
    shuffled = sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())
    return DocumentSource("Python's standard library", len(shuffled), shuffled)


def _cut(text: str) -> Iterator[str]:
    """Cut a text into pieces: at the first blank line after half of PIECE_CHARACTERS, or at any
    line's end when it is full."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        is_break = not line.strip() and len(piece) >= PIECE_CHARACTERS // 2
        if is_break or len(piece) >= PIECE_CHARACTERS:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def _documents_in(path: Path, text_column: str) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _parquet_documents(path, text_column)
    elif path.suffix == ".jsonl":
        yield from _json_line_documents(path, text_column)
    else:
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _parquet_documents(path: Path, text_column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                raise UserError(f"{path}: has no column {text_column!r}; it has:"
                                f" {', '.join(file.schema_arrow.names)[:100]}")
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=[text_column]):
                for text in batch.column(0):
                    yield _checked_text(text.as_py(), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole parquet file: {str(error)[:100]}") from None


def _json_line_documents(path: Path, text_column: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _checked_text(json.loads(line)[text_column], path)
            except (ValueError, KeyError, TypeError):
                raise UserError(f'{path}: line {number} is no JSON object with a "{text_column}"'
                                " of text") from None


def _checked_text(text: object, path: Path) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{path}: a document is a {type(text).__name__}; wanted text")
    return text.encode("utf-8", "replace").decode()  # JSON can hold half of a surrogate pair


def _count_in(path: Path) -> int:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a whole parquet file: {str(error)[:100]}") from None
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    return 1
