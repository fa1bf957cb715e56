"""The documents of a source: its shards, in a fixed order, each with an identity."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from basics.errors import UserError, one_line, print_error
from preparation.choosing import SourceOptions, split_of_files, subset_of
from preparation.cutting import Cuts
from preparation.journal import Origin
from preparation.reading import (
    WHOLE_BYTES,
    Task,
    grouped,
    json_tasks,
    memory_tasks,
    parquet_tasks,
    printable,
    text_tasks,
)

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # all but .txt only if named or matched by a pattern
SUFFIXES = (".parquet", *JSON_SUFFIXES, ".txt")
TEXT_FILES_PER_SHARD = 1000
STDLIB_PIECE_CHARACTERS = 3000


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a source; after a kill, at most one shard is tokenised again."""

    name: str
    identity: str  # changes if the content does
    num_bytes: int  # of its files
    num_files: int = 1
    tasks: Callable[[Cuts], Iterator[Task]]  # after `fetch`. Raises: UserError, BadShard

    def fetch(self) -> None:
        """Download the shard if it is not on this machine. Raises: UserError."""

    def missing_bytes(self) -> int:
        """Return the number of bytes that `fetch` will download."""
        return 0

    def release(self) -> None:
        """Delete the downloaded files."""


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, with the facts that go into the dataset card."""

    name: str
    shards: Sequence[Shard]
    origin: Origin
    kind: str = ""  # as kind_of; empty of texts in memory
    text_column: str = ""
    revision: str = ""
    asked_revision: str = ""
    raw_dir: Path | None = None  # download directory of the shards
    keeps_raw: bool = False
    whole: Source | None = None  # the source that this one is a part of

    def max_bad_files(self) -> int:
        """Return how many files may be left out: one in a hundred, of text files at least one."""
        num_files = sum(shard.num_files for shard in (self.whole or self).shards)
        return max(num_files // 100, int(self.kind == "text"))

    def is_one_text(self) -> bool:
        """Return whether this is a single text file: its tokens are divided, not its documents."""
        return self.kind == "text" and [shard.num_files for shard in self.shards] == [1]


def find_documents(options: SourceOptions) -> Source:
    """Find the document files of a directory (at any depth), a pattern or a single file.

    Raises:
        UserError: there are no documents, or files of more than one kind.
    """
    source = Path(options.source)
    root, found = _look_for(source)
    paths = {path.relative_to(root).as_posix(): path for path in sorted(found)
             if kind_of(path.name) and (path.is_file() or not path.exists())}
    if options.subset and not source.is_dir():
        raise UserError(f"{source}: --subset needs a directory, or a dataset on the hub")
    inside = subset_of(paths, options, str(source))
    for name in inside:
        if not paths[name].exists():
            raise UserError(f"{paths[name]}: is a broken link; repair or delete it")
    if not inside:
        raise UserError(f"{source}: no documents; wanted files ending in {', '.join(SUFFIXES)}")
    kinds = {kind_of(name) for name in inside}
    if len(kinds) > 1:  # the README.md next to parquet files is no document
        kinds.discard("text")
    if len(kinds) > 1:
        raise UserError(f"{source}: contains both {' and '.join(sorted(kinds))}; name one directory"
                        " or file with one kind")
    kind = kinds.pop()
    inside = {name: rest for name, rest in inside.items() if kind_of(name) == kind}
    # Files that a pattern names are all wanted; text files are rarely named after a split.
    if options.split or (kind != "text" and source.is_dir()):
        chosen = [paths[name] for name in split_of_files(inside, options, str(source))]
    else:
        chosen = [paths[name] for name in inside]
    if kind == "text":
        groups = [group for group, _ in grouped(((path, path.stat().st_size) for path in chosen),
                                                WHOLE_BYTES, TEXT_FILES_PER_SHARD)]
        tasks = [partial(text_tasks, group, root) for group in groups]
    else:
        groups = [[path] for path in chosen]
        tasks = [file_tasks(path, options.text_column) for path in chosen]
    shards = []
    for group, of_group in zip(groups, tasks, strict=True):
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in group]
        shards.append(Shard(
            name=printable(group[0].relative_to(root)), num_files=len(group), tasks=of_group,
            identity=hashlib.sha256(repr(stats).encode()).hexdigest(),
            num_bytes=sum(size for _, size, _ in stats)))
    name = printable(Path(options.label()))
    return Source(name, shards, Origin(title=Path(name).resolve().name), kind,
                  options.text_column)


def file_tasks(path: Path, text_column: str) -> Callable[[Cuts], Iterator[Task]]:
    """Return what splits a parquet or JSON lines file; each row or line is a document."""
    is_parquet = kind_of(path.name) == "parquet"
    return partial(parquet_tasks if is_parquet else json_tasks, path, text_column)


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
        if "train.safetensors" not in names:
            yield from (here / name for name in names if name.lower().endswith(SUFFIXES))
        for name in subfolders[:]:
            link = here / name
            leads_back = leads_out = False
            if link.is_symlink() and not name.startswith("."):
                leads_back = link.resolve() in [above.resolve() for above in (here, *here.parents)]
                leads_out = not leads_back and not _is_inside(link, root)
            if leads_out:
                yield link
            if leads_out or leads_back or name.startswith("."):
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


def texts_shard(name: str, texts: Sequence[str]) -> Shard:
    """Return texts in memory, one document each, as a shard."""
    data = [text.encode("utf-8", "replace") for text in texts]
    return Shard(name=name, identity=hashlib.sha256(b"\0".join(data)).hexdigest(),
                 num_bytes=sum(map(len, data)), tasks=partial(memory_tasks, data))


def python_stdlib() -> Source:
    """Return the source code and reference documentation of Python's standard library.

    Files are cut at blank lines into pieces of some 3,000 characters, in a fixed shuffled order (by
    hash): training reads a token file from front to back, and a small batch should not come from
    one module.

    Raises:
        UserError: this installation of Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__",
               "encodings"}  # tables of code points
    pieces: set[str] = set()
    for path in root.rglob("*.py"):
        is_build_data = path.name.startswith("_sysconfigdata")  # differs between machines
        if is_build_data or skipped & set(path.relative_to(root).parts):
            continue
        piece = ""
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines(keepends=True):
            piece += line
            is_break = not line.strip() and len(piece) >= STDLIB_PIECE_CHARACTERS // 2
            if is_break or len(piece) >= STDLIB_PIECE_CHARACTERS:
                pieces.add(piece)
                piece = ""
        if piece.strip():
            pieces.add(piece)
    if not pieces:
        raise UserError(f"{root}: no Python source files; install Python with its library")
    shuffled = sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())
    name = "Python's standard library"
    return Source(name, [texts_shard(name, shuffled)], Origin(title=name, licence="other"))
