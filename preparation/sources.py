"""The documents of a source: its shards, in a fixed order, each with an identity."""

import hashlib
import itertools
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from basics.errors import UserError, one_line, print_error
from preparation.choosing import WILDCARDS, SourceOptions, choose_files, is_plain_text, kind_of
from preparation.cutting import BadShard, Cuts
from preparation.encoded import Encoded
from preparation.findings import Findings
from preparation.reading import (
    WHOLE_BYTES,
    Task,
    check_column,
    file_tasks,
    grouped,
    memory_tasks,
    printable,
)
from preparation.token_stream import Counts

TEXT_FILES_PER_SHARD = 1000
STDLIB_PIECE_CHARACTERS = 3000
WARNING_SHARE = 0.001  # of documents, or of the bytes of text, that are damaged
FACTS = ("title", "licence", "languages", "hub_name")  # may differ


class Record(BaseModel):
    """What is written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(Record):
    """What a preparation was asked for, besides the content of its files."""

    source: str
    revision: str = ""  # the commit of a hub dataset
    text_column: str = ""
    encoding: str = ""
    document_separator: str = ""
    tokenizer: str = Field(default="", pattern="^(gpt2|bytes|sha256:.*|)$")
    validation_fraction: float = Field(default=0.01, gt=0, lt=1)
    max_documents: int | None = Field(default=None, ge=1)
    part: str = ""  # such as 2/4, of a preparation that several machines share
    names_and_sizes: str = ""  # of a part: the digest of those of all files of the source
    # What the dataset card says about the source.
    title: str = ""
    licence: str | list[str] = "unknown"
    languages: list[str] = ["en"]
    hub_name: str | None = None

    def changed(self, **values: object) -> "Request":
        return self.model_copy(update=values)

    def difference(self, earlier: "Request") -> str:
        """Say how it differs from an earlier one; empty if it does not."""
        changes = []
        for key, value in earlier:
            new = getattr(self, key)
            if key not in FACTS and value != new:
                name = key.replace("_", " ")
                is_now = str(new or "none")[:12]
                changes.append(f"{name} was {value or 'none'}, is {is_now}")
        return ", ".join(changes)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A part of a source; after a kill, at most one shard is tokenised again."""

    name: str
    identity: str  # changes if the content does
    num_bytes: int  # of its files
    num_files: int = 1
    # After `fetch`; tasks, or what is encoded already. Raises: BadShard
    tasks: Callable[[Cuts], Iterator["Item"]]
    # What can be said of the shard before any is read. Raises: BadShard
    check: Callable[[], None] = lambda: None

    def fetch(self) -> None:
        """Download the shard if it is not on this machine. Raises: UserError."""

    def missing_bytes(self) -> int:
        """Return the number of bytes that `fetch` will download."""
        return 0

    def release(self) -> None:
        """Delete the downloaded files."""


Item = Task | Encoded | BadShard | Shard


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order."""

    request: Request  # as far as it says which documents these are
    shards: Sequence[Shard]
    kinds: frozenset[str] = frozenset()  # as kind_of; empty of texts in memory
    raw_dir: Path | None = None  # download directory of the shards
    keeps_raw: bool = False
    max_bad_files: int = 0  # that may be left out: one in a hundred, of text files at least one
    is_one_text: bool = False  # its tokens are divided, not its documents

    def about_damage(self, found: Findings, counts: Counts) -> str:
        """Return a warning if so much text is damaged that its encoding may be another one."""
        if not found.num_damaged or (
            found.num_damaged < WARNING_SHARE * counts.num_documents
            and found.num_replaced < WARNING_SHARE * counts.num_text_bytes
        ):
            return ""
        line = f"warning: {found.damage(self.request.encoding)}"
        if not self.kinds <= {"parquet"}:
            line += "; --encoding names another encoding of the files"
        return line

    def about_markers(self, markers: Iterable[str]) -> str:
        """Return a warning if text files may have several documents each."""
        if not markers or "text" not in self.kinds or self.request.document_separator:
            return ""
        marker = min(markers)
        return (
            f"warning: there is {marker} in the text, where it is encoded as any other text; if"
            f" it stands between documents, start again with --document-separator '{marker}'"
        )


def find_documents(options: SourceOptions) -> Source:
    """Find the documents of a directory (at any depth), a pattern or a file. Raises: UserError:
    there are none, as `choose_files`, or a link is broken."""
    source = Path(options.source)
    root, found = _look_for(source)
    paths = {
        path.relative_to(root).as_posix(): path
        for path in sorted(found)
        if path.is_file() or not path.exists()
    }
    are_named = not source.is_dir()
    if options.subset and are_named:
        raise UserError(f"{source}: --subset needs a directory, or a dataset on the hub")
    kinds, names = choose_files(paths, options, str(source), [], are_named=are_named)
    chosen = [paths[name] for name in names]
    for path in chosen:
        if not path.exists():
            raise UserError(f"{path}: is a broken link; repair or delete it")
    shards = []
    # A shard is one file, or many small text files that follow each other.
    for is_text, files in itertools.groupby(chosen, is_plain_text):
        sizes = ((path, path.stat().st_size) for path in files)
        max_files = TEXT_FILES_PER_SHARD if is_text else 1
        for group, num_bytes in grouped(sizes, WHOLE_BYTES, max_files):
            stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in group]
            shards.append(
                Shard(
                    name=printable(group[0].relative_to(root)),
                    num_files=len(group),
                    identity=hashlib.sha256(repr(stats).encode()).hexdigest(),
                    num_bytes=num_bytes,
                    tasks=partial(file_tasks, group, root, options),
                    check=partial(check_column, group[0], options),
                )
            )
    name = printable(Path(options.label()))
    request = Request(source=name, title=Path(name).resolve().name)
    return source_of(options, request, shards, kinds)


def source_of(
    options: SourceOptions, request: Request, shards: Sequence[Shard], kinds: frozenset[str]
) -> Source:
    """Return files as a source, with how many may be left out and how the documents are split.

    `request` says where the files are from; how they are read is added from `options`.
    """
    num_files = sum(shard.num_files for shard in shards)
    return Source(
        request.changed(
            text_column=options.text_column,
            encoding=options.encoding,
            document_separator=options.document_separator,
        ),
        shards,
        kinds,
        max_bad_files=max(num_files // 100, "text" in kinds),
        is_one_text=kinds == {"text"} and num_files == 1 and not options.document_separator,
    )


def _look_for(source: Path) -> tuple[Path, Iterable[Path]]:
    """Return the directory that shard names are relative to, and candidate files."""
    if source.is_dir():
        return source, without_links_out(_files_below(source, source), source)
    if source.exists():
        return source.parent, [source]
    if not WILDCARDS & set(str(source)):
        raise UserError(
            f"{source}: no such file or directory, and not the owner/name of a dataset on the hub"
        )
    root = next(folder for folder in source.parents if not WILDCARDS & set(str(folder)))
    try:
        return root, list(root.glob(str(source.relative_to(root))))
    except ValueError as error:
        raise UserError(f"{source}: not a valid pattern: {error}") from None


def _files_below(folder: Path, root: Path) -> Iterator[Path]:
    """Walk through a directory, but skip hidden directories and token datasets.

    Files of other kinds are yielded too, since they are counted, unless they are links. A link to
    a directory is followed if it leads to another place inside of `root`; if it leads out, the link
    itself is yielded, for `without_links_out`.
    """
    is_dataset = (folder / "train.safetensors").exists()
    for path in folder.iterdir():
        if not path.is_dir():
            if not is_dataset and (kind_of(path.name, is_named=False) or not path.is_symlink()):
                yield path
        elif path.name.startswith(".") or (
            path.is_symlink()
            and path.resolve() in [above.resolve() for above in (folder, *folder.parents)]
        ):
            continue  # hidden, or it leads back
        elif path.is_symlink() and not _is_inside(path, root):
            yield path
        else:
            yield from _files_below(path, root)


def without_links_out(paths: Iterable[Path], root: Path) -> Iterator[Path]:
    """Yield all paths but links that lead out of `root`; print a line that names the first."""
    outside = []
    for path in paths:
        if path.is_symlink() and path.exists() and not _is_inside(path, root):
            outside.append(path)
        else:
            yield path
    if outside:
        print_error(
            f"warning: {one_line(str(outside[0]))}: leads out of the directory, so it is"
            f" skipped ({len(outside)} such links); a pattern of files reads links"
        )


def _is_inside(path: Path, root: Path) -> bool:
    return root.resolve() in path.resolve().parents


def texts_shard(name: str, texts: Sequence[str]) -> Shard:
    """Return texts in memory, one document each, as a shard."""
    data = [text.encode("utf-8", "replace") for text in texts]
    return Shard(
        name=name,
        identity=hashlib.sha256(b"\0".join(data)).hexdigest(),
        num_bytes=sum(map(len, data)),
        tasks=partial(memory_tasks, data),
    )


def python_stdlib() -> Source:
    """Return the source code and reference documentation of Python's standard library.

    Files are cut at blank lines into pieces of some 3,000 characters, in a fixed shuffled order (by
    hash): training reads a token file from front to back, and a small batch should not come from
    one module. Raises: UserError: this installation of Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",  # tables of code points
    }
    pieces: set[str] = set()
    for path in root.rglob("*.py"):
        is_build_data = path.name.startswith("_sysconfigdata")  # differs between machines
        if is_build_data or skipped & set(path.relative_to(root).parts):
            continue
        piece = ""
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines(keepends=True):
            piece += line
            # At a blank line half the length is enough; without one a piece ends after any line.
            enough = STDLIB_PIECE_CHARACTERS if line.strip() else STDLIB_PIECE_CHARACTERS // 2
            if len(piece) >= enough:
                pieces.add(piece)
                piece = ""
        if piece.strip():
            pieces.add(piece)
    if not pieces:
        raise UserError(f"{root}: no Python source files; install Python with its library")
    shuffled = sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())
    name = "Python's standard library"
    return Source(Request(source=name, title=name, licence="other"), [texts_shard(name, shuffled)])
