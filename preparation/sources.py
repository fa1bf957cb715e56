"""The documents of a source: its shards, in a fixed order, each with an identity."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from basics.errors import UserError, one_line, print_error
from preparation.choosing import ALL, Choice
from preparation.cutting import Cuts, cut_document
from preparation.journal import Origin
from preparation.reading import (
    WHOLE_BYTES,
    Task,
    Texts,
    json_tasks,
    parquet_tasks,
    printable,
    text_tasks,
)

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # all but .txt only if named or matched by a pattern
SUFFIXES = (".parquet", *JSON_SUFFIXES, ".txt")
TEXT_FILES_PER_SHARD = 1000
TEXTS_PER_TASK = 1000


class Shard(ABC):
    """A part of a source; after a kill, at most one shard is tokenised again."""

    name: str
    identity: str  # changes if the content does
    num_bytes: int  # of its files
    num_files: int = 1

    @abstractmethod
    def tasks(self, cuts: Cuts = "any") -> Iterator[Task]:
        """Split the shard, which must have been fetched, into tasks.

        Raises:
            UserError; BadShard, if it is damaged.
        """

    def fetch(self) -> None:  # noqa: B027
        """Download the shard if it is not on this machine. Raises: UserError."""

    def missing_bytes(self) -> int:
        """Return the number of bytes that `fetch` will download."""
        return 0

    def release(self) -> None:  # noqa: B027
        """Delete the downloaded files."""


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, with the facts that go into the dataset card."""

    name: str
    shards: Sequence[Shard]
    text_column: str = ""
    revision: str = ""
    asked_revision: str = ""
    licence: str | list[str] = "unknown"
    languages: list[str] = field(default_factory=lambda: ["en"])
    hub_name: str | None = None
    raw_dir: Path | None = None  # download directory of the shards
    keeps_raw: bool = False
    whole: Source | None = None  # the source that this one is a part of

    def max_bad_files(self) -> int:
        """Return how many files may be left out: one in a hundred, of text files at least one."""
        shards = (self.whole or self).shards
        has_texts = any(isinstance(shard, TextFilesShard) for shard in shards)
        return max(sum(shard.num_files for shard in shards) // 100, int(has_texts))

    def is_one_text(self) -> bool:
        """Return whether this is a single text file: its tokens are divided, not its documents."""
        return len(self.shards) == 1 and isinstance(self.shards[0], TextFilesShard) and (
            self.shards[0].num_files == 1)

    def origin(self) -> Origin:
        return Origin(title=self.hub_name or Path(self.name).resolve().name,
                      licence=self.licence, languages=self.languages, hub_name=self.hub_name)


@dataclass(frozen=True)
class FileShard(Shard):
    """One parquet or JSON lines file: one document per row or line; a null is an empty document."""

    path: Path
    name: str
    text_column: str
    identity: str
    num_bytes: int

    @classmethod
    def of(cls, path: Path, name: str, text_column: str) -> FileShard:
        return cls(path, name, text_column, _identity([path]), path.stat().st_size)

    def tasks(self, cuts: Cuts = "any") -> Iterator[Task]:
        is_parquet = kind_of(self.path.name) == "parquet"
        return (parquet_tasks if is_parquet else json_tasks)(self.path, self.text_column, cuts)


@dataclass(frozen=True)
class TextFilesShard(Shard):
    """Several text files, or one large one; one document each."""

    root: Path
    paths: Sequence[Path]
    name: str
    identity: str
    num_bytes: int

    @classmethod
    def of(cls, paths: Sequence[Path], root: Path) -> TextFilesShard:
        return cls(root, paths, printable(paths[0].relative_to(root)), _identity(paths),
                   sum(path.stat().st_size for path in paths))

    def tasks(self, cuts: Cuts = "any") -> Iterator[Task]:
        return text_tasks(self.paths, self.root, cuts)

    @property
    def num_files(self) -> int:
        return len(self.paths)


class TextsShard(Shard):
    """Texts in memory, one document each."""

    def __init__(self, name: str, texts: Sequence[str]) -> None:
        self.name = name
        self._texts = [text.encode("utf-8", "replace") for text in texts]
        self.num_bytes = sum(len(text) for text in self._texts)
        self.identity = hashlib.sha256(b"\0".join(self._texts)).hexdigest()

    def tasks(self, cuts: Cuts = "any") -> Iterator[Task]:
        for start in range(0, len(self._texts), TEXTS_PER_TASK):
            group = self._texts[start:start + TEXTS_PER_TASK]
            size = sum(len(text) for text in group)
            yield Texts([piece for text in group for piece in cut_document(text)], size, size)


def find_documents(source: str | Path, *, text_column: str = "text",
                   choice: Choice = ALL) -> Source:
    """Find the document files of a directory (at any depth), a pattern or a single file.

    Raises:
        UserError: there are no documents, or files of more than one kind.
    """
    root, found = _look_for(Path(source))
    paths = {path.relative_to(root).as_posix(): path for path in sorted(found)
             if kind_of(path.name) and (path.is_file() or not path.exists())}
    if choice.subset and not Path(source).is_dir():
        raise UserError(f"{source}: --subset needs a directory, or a dataset on the hub")
    inside = choice.of_subset(paths, str(source))
    for name in inside:
        if not paths[name].exists():
            raise UserError(f"{paths[name]}: is a broken link; repair or delete it")
    kinds = {kind_of(name) for name in inside} - {"text"}
    if not inside:
        raise UserError(f"{source}: no documents; wanted files ending in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise UserError(f"{source}: contains both {' and '.join(sorted(kinds))}; name one directory"
                        " or file with one kind")
    if kinds:  # the README.md next to parquet files is no document
        inside = {name: rest for name, rest in inside.items() if kind_of(name) in kinds}
    # Files that a pattern names are all wanted; text files are rarely named after a split.
    has_splits = choice.split or (kinds and Path(source).is_dir())
    names = choice.of_split(inside, str(source)) if has_splits else list(inside)
    chosen = [paths[name] for name in names]
    shards: list[Shard] = []
    if kinds:
        shards.extend(FileShard.of(path, printable(path.relative_to(root)), text_column)
                      for path in chosen)
    else:
        shards.extend(TextFilesShard.of(group, root)
                      for group in _text_groups(chosen))
    return Source(choice.label(printable(Path(source))), shards, text_column=text_column)


def _text_groups(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Group files in their order; a large one, whose tasks are not one worker's, is alone."""
    group: list[Path] = []
    for path in paths:
        is_large = path.stat().st_size > WHOLE_BYTES
        if group and (is_large or len(group) == TEXT_FILES_PER_SHARD):
            yield group
            group = []
        group.append(path)
        if is_large:
            yield group
            group = []
    if group:
        yield group


def kind_of(name: str) -> str:
    """Return the kind of a document file by its name; empty if it is not one."""
    name = name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(JSON_SUFFIXES):
        return "JSON lines"
    return "text" if name.endswith(TEXT_SUFFIXES) else ""


def _look_for(source: Path) -> tuple[Path, Iterator[Path]]:
    """Return the directory that shard names are relative to, and candidate files."""
    if source.is_dir():
        return source, without_links_out(_files_below(source), source)
    if source.exists():
        return source.parent, iter([source])
    is_magic = [bool(set("*?[") & set(part)) for part in source.parts]
    if not any(is_magic):
        raise UserError(f"{source}: no such file or directory, and not the owner/name of a dataset"
                        " on the hub")
    first = is_magic.index(True)
    root = Path(*source.parts[:first])
    try:
        return root, iter(list(root.glob(str(Path(*source.parts[first:])))))
    except ValueError as error:
        raise UserError(f"{source}: not a valid pattern: {error}") from None


def _files_below(root: Path) -> Iterator[Path]:
    """Walk through a directory, but skip hidden directories and token datasets.

    Linked directories are read where they lead to another place in it; one that leads out is
    yielded itself.
    """
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        here = Path(folder)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if "train.safetensors" not in names:
            yield from (here / name for name in names if name.lower().endswith(SUFFIXES))
        for name in subfolders[:]:
            if (link := here / name).is_symlink():
                target = link.resolve()
                leads_back = any(target == above.resolve() for above in (here, *here.parents))
                leads_out = not leads_back and not _is_inside(link, root)
                if leads_out:
                    yield link
                if leads_out or leads_back:
                    subfolders.remove(name)


def without_links_out(paths: Iterable[Path], root: Path) -> Iterator[Path]:
    """Pass on files, but for links to what is outside of a directory; one line names these."""
    outside = []
    for path in paths:
        if path.is_symlink() and path.exists() and not _is_inside(path, root):
            outside.append(path)
        else:
            yield path
    if outside:
        print_error(f"warning: {one_line(str(outside[0]))}: leads out of the directory, so it is"
                    f" skipped ({len(outside)} such links); a pattern of files reads links")


def _is_inside(path: Path, root: Path) -> bool:
    return root.resolve() in path.resolve().parents


def _identity(paths: Sequence[Path]) -> str:
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
