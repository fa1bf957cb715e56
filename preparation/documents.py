"""Where documents come from: shards of a source, in a fixed order, with what identifies them."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from basics.errors import UserError
from preparation.cutting import cut_document
from preparation.journal import ShardFacts
from preparation.parquet import count_rows, text_bytes
from preparation.readers import (
    Task,
    Texts,
    count_lines,
    json_tasks,
    parquet_tasks,
    text_tasks,
)

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # but for .txt only where a pattern names them
SUFFIXES = (".parquet", *JSON_SUFFIXES, ".txt")
TEXT_FILES_A_SHARD = 1000
TEXTS_A_TASK = 1000
PIECE_CHARACTERS = 3000  # of the standard library's text


class Shard(ABC):
    """A part of a source, which is what a kill costs at most."""

    name: str
    identity: str  # changes when the content does
    num_bytes: int  # of its files

    @abstractmethod
    def facts(self) -> ShardFacts:
        """Count what it holds. Raises: UserError; BadShard, if it is damaged."""

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """Cut it into tasks, once it is fetched. Raises: UserError."""

    def fetch(self) -> None:  # noqa: B027
        """Bring it onto this machine, if it is not there. Raises: UserError."""

    def missing_bytes(self) -> int:
        """Give the bytes that fetching it will bring."""
        return 0

    def release(self) -> None:  # noqa: B027
        """Delete what fetching it has brought."""


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, and what a dataset card should say of them."""

    name: str
    shards: Sequence[Shard]
    text_column: str = ""
    revision: str = ""
    licence: str = "unknown"
    languages: list[str] = field(default_factory=lambda: ["en"])
    hub_name: str | None = None
    raw_dir: Path | None = None  # where shards are fetched to
    keeps_raw: bool = False


@dataclass(frozen=True)
class FileShard(Shard):
    """One parquet or JSON lines file, a document a row or a line; a null is an empty one."""

    path: Path
    name: str
    text_column: str
    identity: str
    num_bytes: int

    @classmethod
    def of(cls, path: Path, name: str, text_column: str) -> FileShard:
        return cls(path, name, text_column, _identity([path]), path.stat().st_size)

    def facts(self) -> ShardFacts:
        if kind_of(self.path.name) == "parquet":
            num_documents = count_rows(self.path)
            num_text_bytes = sum(text_bytes(self.path, self.text_column))
        else:
            num_documents, num_text_bytes = count_lines(self.path), None
        return ShardFacts(name=self.name, identity=self.identity, num_documents=num_documents,
                          num_text_bytes=num_text_bytes)

    def tasks(self) -> Iterator[Task]:
        is_parquet = kind_of(self.path.name) == "parquet"
        return (parquet_tasks if is_parquet else json_tasks)(self.path, self.text_column)


@dataclass(frozen=True)
class TextFilesShard(Shard):
    """Some text files, a document each."""

    paths: Sequence[Path]
    name: str
    identity: str
    num_bytes: int

    @classmethod
    def of(cls, paths: Sequence[Path], root: Path) -> TextFilesShard:
        return cls(paths, _printable(paths[0].relative_to(root)), _identity(paths),
                   sum(path.stat().st_size for path in paths))

    def facts(self) -> ShardFacts:
        return ShardFacts(name=self.name, identity=self.identity, num_documents=len(self.paths),
                          num_text_bytes=self.num_bytes)

    def tasks(self) -> Iterator[Task]:
        return text_tasks(self.paths)


class TextsShard(Shard):
    """Texts in memory, a document each."""

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        self.name = name
        self._texts = [text.encode("utf-8", "replace") for text in texts]
        self.num_bytes = sum(len(text) for text in self._texts)
        self.identity = hashlib.sha256(b"\0".join(self._texts)).hexdigest()

    def facts(self) -> ShardFacts:
        return ShardFacts(name=self.name, identity=self.identity,
                          num_documents=len(self._texts), num_text_bytes=self.num_bytes)

    def tasks(self) -> Iterator[Task]:
        for group in _batched(self._texts, TEXTS_A_TASK):
            yield Texts([piece for text in group for piece in cut_document(text)],
                        sum(len(text) for text in group))


def find_documents(source: str | Path, *, text_column: str = "text") -> Source:
    """Find the document files of a directory (at any depth, by name) or pattern, or take a file.

    Raises:
        UserError: there are none, or they are of more than one kind.
    """
    root, found = _look_for(Path(source))
    paths = sorted(path for path in found
                   if kind_of(path.name) and (path.is_file() or not path.exists()))
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: is a link to nowhere")
    kinds = {kind_of(path.name) for path in paths} - {"text"}
    if not paths:
        raise UserError(f"{source}: no documents; wanted files ending in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise UserError(f"{source}: holds both {' and '.join(sorted(kinds))}; name one directory"
                        " or file with one kind")
    shards: list[Shard] = []
    if kinds:  # a data set's README.md beside its parquet is no document
        shards.extend(FileShard.of(path, _printable(path.relative_to(root)), text_column)
                      for path in paths if kind_of(path.name) in kinds)
    else:
        shards.extend(TextFilesShard.of(group, root)
                      for group in _batched(paths, TEXT_FILES_A_SHARD))
    return Source(_printable(Path(source)), shards, text_column=text_column)


def kind_of(name: str) -> str:
    """Tell the kind of document file by its name; empty where it is none."""
    name = name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(JSON_SUFFIXES):
        return "JSON lines"
    return "text" if name.endswith(TEXT_SUFFIXES) else ""


def python_stdlib() -> Source:
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
    name = "Python's standard library"
    return Source(name, [TextsShard(name, shuffled)], licence="other")


def _look_for(source: Path) -> tuple[Path, Iterator[Path]]:
    """Give what the source's files are named relative to, and candidates for them."""
    if source.is_dir():
        return source, _files_below(source)
    if source.exists():
        return source.parent, iter([source])
    is_magic = [bool(set("*?[") & set(part)) for part in source.parts]
    if not any(is_magic):
        raise UserError(f"{source}: no such file or directory, nor the owner/name of a dataset on"
                        " the hub")
    first = is_magic.index(True)
    root = Path(*source.parts[:first])
    try:
        return root, iter(list(root.glob(str(Path(*source.parts[first:])))))
    except ValueError as error:
        raise UserError(f"{source}: not a pattern: {error}") from None


def _files_below(root: Path) -> Iterator[Path]:
    """Walk through a directory; not into hidden ones, nor into token datasets."""
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if "train.safetensors" not in names:
            yield from (Path(folder, name) for name in names if name.lower().endswith(SUFFIXES))


def _printable(path: Path) -> str:
    """Give a name that can be printed in one line and kept in JSON, whatever bytes are in it."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return text.replace("\n", "\\n")


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


def _identity(paths: Sequence[Path]) -> str:
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _batched(items: Sequence, size: int) -> Iterator[Sequence]:
    for start in range(0, len(items), size):
        yield items[start:start + size]
