"""Which documents SOURCE, --subset and --split name, for each command that reads some."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from basics.errors import FAILED, UserError, one_line, print_error

if TYPE_CHECKING:
    from preparation.journal import Request
    from preparation.sources import Source

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SPLIT_WORDS = {  # in names of files and directories, as Hugging Face's datasets reads them
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
MAX_LISTED = 5  # names in an error line
Patterns = Sequence[tuple[str, str, str]]  # of a dataset's card: config, split, pattern of files

OPTIONS = [
    click.option("--subset", default="", metavar="PATTERN",
                 help="The directories, or the configs of a hub dataset, that hold the documents:"
                      " sample/10BT or 'data/CC-MAIN-2013-*'."),
    click.option("--split", default="", metavar="train|test|PATTERN",
                 help="The split, or the names of the files.  [default: files named train if there"
                      " are any]"),
    click.option("--revision", default="", metavar="COMMIT",
                 help="The commit, branch or tag of a hub dataset.  [default: the newest commit]"),
    click.option("--text-column", default="text", show_default=True,
                 help="The parquet column or JSON key that holds the text."),
]


def source_options(command: Callable) -> Callable:
    """Add `--subset`, `--split`, `--revision` and `--text-column` to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class SourceOptions:
    """The part of a command line that names documents; empty if it is not given."""

    source: str
    subset: str = ""
    text_column: str = "text"
    keep_raw: Path | None = None
    split: str = ""
    revision: str = ""  # a commit, branch or tag of a dataset on the hub

    def label(self) -> str:
        """Return the name of the source with its subset and split."""
        return (self.source + f" {self.subset}" * bool(self.subset)
                + f" split {self.split}" * bool(self.split))


def find_source(options: SourceOptions, *, raw_dir: Path,
                unfinished: Request | None = None) -> Source:
    """Find the documents that SOURCE names. Raises: UserError.

    Args:
        raw_dir: for downloads that are not kept.
        unfinished: of an earlier launch, which continues with the same commit of a hub dataset.
    """
    # Imported here, so that --help does not wait for it.
    from preparation.sources import find_documents, kind_of, python_stdlib

    source, options = options.source, replace(options, subset=options.subset.strip("/"))
    if HUB_NAME.fullmatch(source) and not kind_of(source) and not Path(source).exists():
        from preparation.hub import hub_source

        asked = revision = options.revision
        if unfinished is not None and unfinished.source == options.label() and (
                asked in ("", unfinished.asked_revision)):  # a branch may have got new commits
            asked, revision = unfinished.asked_revision, unfinished.revision
        try:
            found = hub_source(replace(options, revision=revision), raw_dir=raw_dir)
            return replace(found, asked_revision=asked)
        except UserError as error:
            if error.status == FAILED:  # the hub does not answer, and may have it
                raise
            raise UserError(f"{error} (and there is no file {source} here)") from None
    if options.keep_raw or options.revision:
        raise UserError(f"{source}: --keep-raw and --revision need a dataset on the hub, given as"
                        " owner/name")
    if source == "python-stdlib":
        if options.label() != source:
            raise UserError(f"{source}: has no --subset and no --split")
        return python_stdlib()
    return find_documents(options)


def subset_of(names: Iterable[str], options: SourceOptions, place: str,
              patterns: Patterns = ()) -> dict[str, str]:
    """Return the files of `--subset`: their names, each with its path inside the subset.

    The pattern is compared with directories at any depth, then with the names of configs.

    Raises:
        UserError: none matches; lists what there is.
    """
    names, configs = list(names), sorted({config for config, _, _ in patterns})
    if not options.subset:
        if len(configs) > 1:
            print_error(one_line(f"{place}: taking all of its configs, {listed(configs)};"
                                 " --subset chooses some"))
        return {name: name for name in names}
    inside: dict[str, str] = {}
    folders: set[str] = set()
    for name in names:
        above = list(PurePosixPath(name).parents)[-2::-1]  # the outermost first, without the root
        folders.update(str(folder) for folder in above if not folder.name.startswith("."))
        for folder in above:
            if _matches(str(folder), options.subset):
                inside[name] = str(PurePosixPath(name).relative_to(folder))
                break
    if not inside:
        chosen = [pattern for config, _, pattern in patterns if _matches(config, options.subset)]
        inside = {name: name for name in names if any(_matches(name, each) for each in chosen)}
    if not inside:
        there_are = sorted(folders.union(configs))
        raise UserError(f"{place}: --subset {options.subset} matches no directory; there are"
                        f" {listed(there_are, like=options.subset)}")
    return inside


def split_of_files(paths: Mapping[str, str], options: SourceOptions, place: str,
                   patterns: Patterns = ()) -> list[str]:
    """Return the files of `--split`; without it those named train if there are any.

    A file whose name says no split is of the one that the dataset's card gives it, if any.

    Args:
        paths: of the files inside the subset, by name.

    Raises:
        UserError: no file matches, or none is named train but several splits are.
    """
    # --subset may name a directory, and no config.
    patterns = [row for row in patterns if _matches(row[0], options.subset)] or patterns
    splits: dict[str, list[str]] = {}
    for name, path in paths.items():
        split = split_of(path) or next(
            (split for _, split, pattern in patterns if _matches(name, pattern)), "")
        splits.setdefault(split, []).append(name)
    if options.split:
        chosen = splits.get(SPLIT_WORDS.get(options.split, options.split)) or [
            name for name, path in paths.items() if _matches(path, options.split)
            or _matches(PurePosixPath(path).name, options.split)]
        if not chosen:
            raise UserError(f"{place}: --split {options.split} matches no file; there are"
                            f" {_counts(splits)}")
        return chosen
    taken = next(split for split in ("train", "", *splits) if split in splits)
    left_out = {split: names for split, names in splits.items() if split != taken}
    if taken not in ("train", "") and left_out:
        raise UserError(f"{place}: has files of {' and '.join(sorted(splits))}, none of train;"
                        " choose some with --split")
    if left_out or taken not in ("train", ""):
        rest = f", leaving out {_counts(left_out)}; --split chooses others" * bool(left_out)
        print_error(one_line(f"{place}: taking {_counts({taken: splits[taken]})}{rest}"))
    return splits[taken]


def split_of(path: str) -> str:
    """Return train, validation or test if a file or one of its directories is named so, else
    an empty text."""
    for part in reversed(PurePosixPath(path.lower()).parts):
        if found := SPLIT_WORD.search(part):
            return SPLIT_WORDS[found[0]]
    return ""


def config_patterns(card_data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the `Patterns` in the front matter of a dataset card."""
    found = []
    configs = card_data.get("configs")
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict):
            folder = config.get("data_dir")
            files = list(_files_of(config.get("data_files")))
            if isinstance(folder, str):
                files = [(split, f"{folder}/{pattern}") for split, pattern in files or [("", "*")]]
            found += [(str(config.get("config_name")), SPLIT_WORDS.get(split, split), pattern)
                      for split, pattern in files]
    return found


def _files_of(value: Any, split: str = "") -> Iterator[tuple[str, str]]:
    """Yield the splits and paths in data_files: a text, a list, or objects with `path`."""
    if isinstance(value, str):
        yield split, value
    for item in value if isinstance(value, list) else []:
        if isinstance(item, dict):
            yield from _files_of(item.get("path"), str(item.get("split") or ""))
        else:
            yield from _files_of(item, split)


def listed(names: Sequence[str], *, like: str = "") -> str:
    """Join names for an error line; of many, those that are most similar to `like`."""
    if len(names) > MAX_LISTED:
        similar = difflib.get_close_matches(like, names, MAX_LISTED, cutoff=0)
        return f"{', '.join(similar)} and {len(names) - MAX_LISTED} more"
    return ", ".join(names) or "none"


def _counts(splits: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{split or 'other'} ({len(names):,} file{'s' * (len(names) > 1)})"
                     for split, names in sorted(splits.items(), reverse=True)) or "none"


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
