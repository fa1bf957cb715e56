"""Which documents --subset and --split name, for each command that reads some."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import click

from basics.errors import UserError, one_line, print_error
from basics.text import counted

# The kinds of document files, by suffix; `file_tasks` in reading.py reads each kind.
SUFFIXES = {".parquet": "parquet", ".jsonl": "JSON lines", ".jsonl.gz": "JSON lines",
            ".jsonl.zst": "JSON lines", ".json.gz": "JSON lines", ".txt": "text"}
NAMED_SUFFIXES = {".md": "text", ".rst": "text", ".py": "text"}  # if named, or by a pattern
SPLIT_WORDS = {  # in names of files and directories, as Hugging Face's datasets reads them
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
MAX_LISTED = 9  # names in an error line
Patterns = list[tuple[str, str, str]]  # of a dataset's card: config, split, pattern of files


def source_options(command: Callable) -> Callable:
    """Add `--subset`, `--split`, `--revision` and `--text-column` to a command."""
    for option in (
        click.option("--text-column", default="text", show_default=True,
                     help="The parquet column or JSON key that holds the text."),
        click.option("--revision", default="", metavar="COMMIT",
                     help="The commit, branch or tag of a hub dataset.  [default: the newest"
                          " commit]"),
        click.option("--split", default="", metavar="train|test|PATTERN",
                     help="The split, or the names of the files.  [default: files named train if"
                          " there are any]"),
        click.option("--subset", default="", metavar="PATTERN",
                     help="The directories, or the configs of a hub dataset, that hold the"
                          " documents: sample/10BT or 'data/CC-MAIN-2013-*'."),
    ):
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


def kind_of(name: str) -> str:
    """Return the kind of a document file by its name; empty if it is not one."""
    return next((kind for suffix, kind in (SUFFIXES | NAMED_SUFFIXES).items()
                 if name.lower().endswith(suffix)), "")


def choose_files(names: Iterable[str], options: SourceOptions, place: str, patterns: Patterns, *,
                 are_named: bool = False) -> tuple[str, list[str]]:
    """Return the kind of documents in `--subset`, and the files of `--split`, by default train.

    Raises: UserError: there are none, or of several kinds; or as `split_of_files`.
    """
    inside = subset_of(names, options, place, patterns)
    kinds = {kind_of(name) for name in inside}
    if len(kinds) > 1:  # the README.md next to parquet files is no document
        kinds.discard("text")
    if len(kinds) != 1:
        raise UserError(f"{place}: contains {' and '.join(sorted(kinds)) or 'no documents'}; wanted"
                        f" a directory (--subset) of one kind: {', '.join(SUFFIXES)}")
    (kind,) = kinds
    files = {name: path for name, path in inside.items() if kind_of(name) == kind}
    # Files that SOURCE names are all wanted; text files are rarely named after a split.
    if not options.split and (kind == "text" or are_named):
        return kind, list(files)
    return kind, split_of_files(files, options, place, patterns)


def subset_of(names: Iterable[str], options: SourceOptions, place: str,
              patterns: Patterns) -> dict[str, str]:
    """Return the files of `--subset`: their names, each with its path inside the subset.

    The pattern is compared with directories at any depth, then with the names of configs. Raises:
    UserError: none matches; lists what there is.
    """
    names, configs = list(names), {config for config, _, _ in patterns}
    if not options.subset:
        if len(configs) > 1:
            print_error(one_line(f"{place}: taking all of its configs, {listed(configs)};"
                                 " --subset chooses some"))
        return {name: name for name in names}
    inside: dict[str, str] = {}
    folders = set(configs)
    for name in names:
        above = list(PurePosixPath(name).parents)[-2::-1]  # the outermost first, without the root
        folders.update(str(folder) for folder in above if not folder.name.startswith("."))
        for folder in above:
            if matches(str(folder), options.subset):
                inside[name] = str(PurePosixPath(name).relative_to(folder))
                break
    inside = inside or {name: name for name in names for config, _, pattern in patterns
                        if matches(config, options.subset) and matches(name, pattern)}
    if not inside:
        raise UserError(f"{place}: --subset {options.subset} matches no directory; there are"
                        f" {listed(folders)}")
    return inside


def split_of_files(paths: Mapping[str, str], options: SourceOptions, place: str,
                   patterns: Patterns) -> list[str]:
    """Return the files of `--split`; without it those named train if there are any.

    A file whose name says no split is of the one that the dataset's card gives it, if any. `paths`
    are inside the subset, by name. Raises: UserError: no file matches, or none is named train but
    several splits are.
    """
    # --subset may name a directory, and no config.
    patterns = [row for row in patterns if matches(row[0], options.subset)] or patterns
    splits: dict[str, list[str]] = {}
    for name, path in paths.items():
        split = split_of(path) or next(
            (split for _, split, pattern in patterns if matches(name, pattern)), "")
        splits.setdefault(split, []).append(name)
    counts = {split: f"{split or 'other'} ({counted(len(names), 'file')})"
              for split, names in sorted(splits.items(), reverse=True)}
    if options.split:
        chosen = splits.get(SPLIT_WORDS.get(options.split, options.split)) or [
            name for name, path in paths.items() if matches(path, options.split)
            or matches(PurePosixPath(path).name, options.split)]
        if not chosen:
            raise UserError(f"{place}: --split {options.split} matches no file; there are"
                            f" {', '.join(counts.values())}")
        return chosen
    taken = next(split for split in ("train", "", *splits) if split in splits)
    if taken not in ("train", "") and len(splits) > 1:
        raise UserError(f"{place}: has files of {' and '.join(sorted(splits))}, none of train;"
                        " choose some with --split")
    line = f"{place}: taking {counts.pop(taken)}"
    if counts:
        line += f", leaving out {', '.join(counts.values())}; --split chooses others"
    if counts or taken not in ("train", ""):
        print_error(one_line(line))
    return splits[taken]


def split_of(path: str) -> str:
    """Return train, validation or test if a file or one of its directories is named so, or ""."""
    for part in reversed(PurePosixPath(path.lower()).parts):
        if found := SPLIT_WORD.search(part):
            return SPLIT_WORDS[found[0]]
    return ""


def config_patterns(card_data: Mapping[str, Any]) -> Patterns:
    """Return the patterns in the front matter of a dataset card, which may hold anything."""
    found, configs = [], card_data.get("configs")
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


def listed(names: Iterable[str]) -> str:
    """Join names for an error line, the first ones of many."""
    first, more = sorted(names)[:MAX_LISTED], max(0, len(set(names)) - MAX_LISTED)
    return ", ".join(first) + f" and {more} more" * bool(more) if first else "none"


def matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
