"""Which documents a SOURCE names: on the hub, in files, or of the standard library."""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from basics.errors import UserError
from basics.text import did_you_mean
from preparation.dataset_source import (
    DATA_SUFFIXES,
    WILDCARDS,
    DatasetSource,
    hub_name_of,
    hub_source,
    is_saved_dataset,
)
from preparation.ensure_dataset import STDLIB_DATASET
from preparation.sources import Request, Source, SourceOptions, printable, python_stdlib
from preparation.text_files import TextFiles, data_suffix, leads_out, text_files
from settings.data import token_file_name


def find_source(options: SourceOptions) -> Source:
    """Find the documents that SOURCE names. Raises: UserError: there are none, or the hub cannot
    be reached."""
    if hub_name_of(options.source):
        return hub_source(options)
    if options.revision:
        raise UserError(f"{options.source}: --revision needs a dataset on the hub (owner/name)")
    if options.source != STDLIB_DATASET:
        advice = did_you_mean(options.source, [STDLIB_DATASET])
        if advice and not Path(options.source).exists():
            raise UserError(f"{options.source}: no such file or directory{advice}")
        return local_source(options)
    if options != SourceOptions(options.source):
        raise UserError(
            f"{options.source}: has no --config, --split, --text-column, --encoding and"
            " --document-separator"
        )
    return python_stdlib()


def local_source(options: SourceOptions) -> Source:
    """Find the documents of a directory (at any depth), a file or a pattern.

    They are a dataset that Hugging Face's datasets reads, or files of text. Raises: UserError:
    there is nothing.
    """
    source = Path(options.source)
    root, paths, left_out = _look_for(source)
    facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in paths.items()]
    title = printable(source.resolve().name)
    request = Request(
        source=options.label(),
        files=hashlib.sha256(repr(facts).encode()).hexdigest(),
        title=title,
        text_column=options.text_column,
        encoding=options.encoding,
        document_separator=options.document_separator,
    )
    data = [name for name in paths if data_suffix(name) in DATA_SUFFIXES]
    always = [name for name in data if not DATA_SUFFIXES[data_suffix(name)].may_be_text]
    if always or 2 * len(data) > len(paths) or is_saved_dataset(source):
        return DatasetSource(request, options, root, paths, left_out)
    if (source / token_file_name("train")).exists():
        raise UserError(
            f"{source}: is a prepared dataset already: train on it (lab new RUN --dataset), or mix"
            " it with others (--mix)"
        )
    if not paths:
        what = ", ".join(f"{name} ({reason})" for name, reason in list(left_out.items())[:3])
        raise UserError(f"{source}: contains no files to read" + (f": {what}" if what else ""))
    return TextFiles(request, text_files(paths), options, left_out)


def _look_for(source: Path) -> tuple[Path, dict[str, Path], dict[str, str]]:
    """Return a directory, the regular files of a source by their names in it, and other files with
    the reasons why they are left out. Raises: UserError: there is no such source."""
    is_dir = source.is_dir()
    if is_dir:
        root, found = source, _files_below(source)
    elif source.exists() or source.is_symlink():
        root, found = source.parent, iter([source])
    else:
        root, found = _files_of_pattern(source)
    paths: dict[str, Path] = {}
    left_out = {}
    for path in sorted(found):
        name = str(path.relative_to(root))
        reason = _why_left_out(path, root if is_dir else None)
        if reason:
            left_out[printable(name)] = reason
        else:
            paths[name] = path
    return root, paths, left_out


def _files_of_pattern(source: Path) -> tuple[Path, Iterator[Path]]:
    if not WILDCARDS & set(str(source)):
        raise UserError(
            f"{source}: no such file or directory, and not the owner/name of a dataset on the hub"
            " (its files: 'hf://datasets/owner/name/pattern')"
        )
    root = next(folder for folder in source.parents if not WILDCARDS & set(str(folder)))
    try:
        matching = list(root.glob(str(source.relative_to(root))))
    except ValueError as error:
        raise UserError(f"{source}: not a valid pattern: {error}") from None
    return root, (path for path in matching if not path.is_dir())


def _files_below(folder: Path) -> Iterator[Path]:
    """Walk through a directory, but skip what is hidden, and token datasets.

    Links to directories are yielded as they are, and not followed.
    """
    with os.scandir(folder) as found:
        entries = [entry for entry in found if not entry.name.startswith(".")]
    if any(entry.name == token_file_name("train") for entry in entries):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        else:
            yield Path(entry.path)


def _why_left_out(path: Path, root: Path | None) -> str:
    """Return why a path is not read; links may lead anywhere, but not out of `root`."""
    try:
        kind = path.stat().st_mode
    except OSError as error:
        return "is a broken link" if path.is_symlink() else error.strerror or "cannot be read"
    if root is not None and leads_out(path, root):
        return "leads out of the directory"
    if stat.S_ISDIR(kind):
        return "is a link to a directory"
    return "" if stat.S_ISREG(kind) else "is not a regular file"
