"""Which documents --subset and --split name, for each command that reads some."""

import codecs
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import click

from basics.errors import UserError, one_line, print_error
from basics.text import counted

# The kinds of document files, by suffix; `file_tasks` in reading.py reads each kind.
PACKED = (".gz", ".zst", ".bz2", ".xz")
MAY_BE_PACKED = {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".csv": "CSV", ".txt": "text"}
SUFFIXES = {
    ".parquet": "parquet",
    ".json": "JSON",
    **MAY_BE_PACKED,
    **{suffix + packed: kind for suffix, kind in MAY_BE_PACKED.items() for packed in PACKED},
    **{".json" + packed: "JSON lines" for packed in PACKED},
}  # no small files of settings
NAMED_SUFFIXES = {".md": "text", ".rst": "text", ".py": "text"}  # if named, or by a pattern
# Of several kinds in a directory the first one is taken: .json and .txt files beside files of rows
# describe them. Parquet and JSON lines may both be meant.
PREFERENCE = ("parquet", "JSON lines", "CSV", "JSON", "text")
SPLIT_WORDS = {  # in names of files and directories, as Hugging Face's datasets reads them
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
WILDCARDS = frozenset("*?[")  # of patterns
MAX_LISTED = 9  # names in an error line
Patterns = list[tuple[str, str, str]]  # of a dataset's card: config, split, pattern of files


def _checked_encoding(_: click.Context, option: click.Parameter, name: str) -> str:
    """Return the name of an encoding, empty for UTF-8. Raises: UserError: there is none."""
    try:
        io.TextIOWrapper(io.BytesIO(), name or "utf-8")  # refuses hex too, which is none of text
    except LookupError:
        raise UserError(
            f"{option.opts[0]} {name}: is no encoding that Python knows; wanted one"
            " such as cp1252, latin-1, utf-16 or shift_jis"
        ) from None
    return "" if codecs.lookup(name or "utf-8").name == "utf-8" else name


def source_options(command: Callable) -> Callable:
    """Add the options to a command that `SourceOptions` has, but --keep-raw."""
    for option in (
        click.option(
            "--document-separator",
            default="",
            metavar="TEXT",
            help="What stands between the documents of a .txt file, such as"
            " '<|endoftext|>'.  [default: a file is one document]",
        ),
        click.option(
            "--encoding",
            default="",
            metavar="NAME",
            callback=_checked_encoding,
            help="The encoding of text, JSON and CSV files, such as cp1252 or utf-16."
            "  [default: utf-8]",
        ),
        click.option(
            "--text-column",
            default="text",
            show_default=True,
            help="The column or JSON key that holds the text; a.b is b inside of a.",
        ),
        click.option(
            "--revision",
            default="",
            metavar="COMMIT",
            help="The commit, branch or tag of a hub dataset.  [default: the newest commit]",
        ),
        click.option(
            "--split",
            default="",
            metavar="train|test|PATTERN",
            help="The split, or the names of the files.  [default: files named train if"
            " there are any]",
        ),
        click.option(
            "--subset",
            default="",
            metavar="PATTERN",
            help="The directories, or the configs of a hub dataset, that hold the"
            " documents: sample/10BT or 'data/CC-MAIN-2013-*'.",
        ),
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
    encoding: str = ""  # of files that are not parquet; empty for UTF-8
    document_separator: str = ""  # in text files

    def label(self) -> str:
        """Return the name of the source with its subset and split."""
        label = self.source
        if self.subset:
            label += f" {self.subset}"
        if self.split:
            label += f" split {self.split}"
        return label


def kind_of(name: str, *, is_named: bool = True) -> str:
    """Return the kind of a document file by its name; empty if it is not one.

    Some files are documents only if SOURCE names them, or its pattern.
    """
    suffix = suffix_of(name)
    return SUFFIXES.get(suffix, NAMED_SUFFIXES.get(suffix, "") if is_named else "")


def is_plain_text(path: Path) -> bool:
    """Return whether workers may read a file whole with others: text that is not packed."""
    return kind_of(path.name) == "text" and path.suffix.lower() not in PACKED


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, of packed documents the last two: .txt.gz."""
    both = "".join(PurePosixPath(name.lower()).suffixes[-2:])
    return both if both in SUFFIXES else PurePosixPath(name.lower()).suffix


def choose_files(
    names: Iterable[str],
    options: SourceOptions,
    place: str,
    patterns: Patterns,
    *,
    are_named: bool = False,
) -> tuple[frozenset[str], list[str]]:
    """Return the kinds of documents in `--subset`, and the files of `--split`, by default train.

    Files that SOURCE names may be of several kinds; of others one kind is taken, and a line says
    what is left out. Raises: UserError: there are none, both parquet and JSON lines, or options
    that are not for them; or as `split_of_files`.
    """
    inside = subset_of(names, options, place, patterns)
    kinds = {name: kind_of(name, is_named=are_named) for name in inside}
    documents = [name for name in inside if kinds[name]]
    matching = [name for name in documents if in_split(inside[name], options.split)]
    documents = matching or documents  # --split '*.csv' also chooses the kind
    found = {kinds[name] for name in documents}
    if not found:
        raise UserError(
            f"{place}: contains no documents; wanted {', '.join(MAY_BE_PACKED)} files"
            " (packed or not), .json or .parquet"
        )
    if not are_named:
        if {"parquet", "JSON lines"} <= found:
            raise UserError(
                f"{place}: contains JSON lines and parquet; choose one with --subset,"
                " --split '*.parquet' or a pattern of files as SOURCE"
            )
        found = {next(kind for kind in PREFERENCE if kind in found)}
    files = {name: inside[name] for name in documents if kinds[name] in found}
    if not matching:
        _say_what_is_left_out(inside, files, options, place)
    check_kinds(found, options, place)
    chosen = list(files)
    # Files that SOURCE names are all wanted; text files are rarely named after a split.
    if options.split or not (are_named or found == {"text"}):
        chosen = split_of_files(files, options, place, patterns)
    return frozenset(found), chosen


def in_split(path: str, pattern: str) -> bool:
    """Return whether a pattern of --split names a file, by its path or its name."""
    return matches(path, pattern) or matches(PurePosixPath(path).name, pattern)


def check_kinds(kinds: set[str], options: SourceOptions, place: str) -> None:
    """Refuse options that would have no effect. Raises: UserError."""
    if options.document_separator and "text" not in kinds:
        raise UserError(
            f"{place}: --document-separator is for .txt files; these are"
            f" {' and '.join(sorted(kinds))}, with a document a row"
        )
    if options.encoding and kinds == {"parquet"}:
        raise UserError(f"{place}: --encoding is not for parquet files, whose text is UTF-8")


def _say_what_is_left_out(
    inside: Iterable[str], taken: Collection[str], options: SourceOptions, place: str
) -> None:
    """Print the numbers of files by suffix, unless all are taken and are of one kind.

    Hidden files do not count, nor does the README of a dataset.
    """
    left = [
        name
        for name in inside
        if name not in taken and not PurePosixPath(name).name.startswith((".", "README"))
    ]
    if not left and len({kind_of(name) for name in taken}) == 1:
        return
    line = f"{place}: taking {by_suffix(taken)}"
    if left:
        line += f", leaving out {by_suffix(left)}"
    is_directory = Path(options.source).is_dir()
    others = [name for name in left if kind_of(name, is_named=is_directory)]
    if others and is_directory:
        line += f"; the pattern '{options.source.rstrip('/')}/**/*' as SOURCE takes all documents"
    elif others:
        line += f"; --split '*{suffix_of(others[0])}' takes those"
    print_error(one_line(line))


def by_suffix(names: Iterable[str]) -> str:
    """Return how many files there are of each suffix, the most frequent first."""
    counts = Counter(suffix_of(name) or "other" for name in names).most_common()
    shown = ", ".join(f"{number:,} {suffix}" for suffix, number in counts[:MAX_LISTED])
    more = sum(number for _, number in counts[MAX_LISTED:])
    return f"{shown} and {more:,} more" if more else shown


def subset_of(
    names: Iterable[str], options: SourceOptions, place: str, patterns: Patterns
) -> dict[str, str]:
    """Return the files of `--subset`: their names, each with its path inside the subset.

    The pattern is compared with directories at any depth, then with the names of configs. Raises:
    UserError: none matches; lists what there is.
    """
    names = list(names)
    configs = {config for config, _, _ in patterns}
    if not options.subset:
        if len(configs) > 1:
            print_error(
                one_line(
                    f"{place}: taking all of its configs, {listed(configs)}; --subset chooses some"
                )
            )
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
    inside = inside or {
        name: name
        for name in names
        for config, _, pattern in patterns
        if matches(config, options.subset) and matches(name, pattern)
    }
    if not inside:
        raise UserError(
            f"{place}: --subset {options.subset} matches no directory; there are {listed(folders)}"
        )
    return inside


def split_of_files(
    paths: Mapping[str, str], options: SourceOptions, place: str, patterns: Patterns
) -> list[str]:
    """Return the files of `--split`; without it those named train if there are any.

    A file whose name says no split is of the one that the dataset's card gives it, if any. `paths`
    are inside the subset, by name. Raises: UserError: no file matches, or none is named train but
    several splits are.
    """
    # --subset may name a directory, and no config.
    patterns = [row for row in patterns if matches(row[0], options.subset)] or patterns
    splits: dict[str, list[str]] = {}
    for name, path in paths.items():
        of_card = (split for _, split, pattern in patterns if matches(name, pattern))
        splits.setdefault(split_of(path) or next(of_card, ""), []).append(name)
    counts = {
        split: f"{split or 'other'} ({counted(len(names), 'file')})"
        for split, names in sorted(splits.items(), reverse=True)
    }
    if options.split:
        chosen = splits.get(SPLIT_WORDS.get(options.split, options.split))
        if not chosen:
            chosen = [name for name, path in paths.items() if in_split(path, options.split)]
        if not chosen:
            raise UserError(
                f"{place}: --split {options.split} matches no file; there are"
                f" {', '.join(counts.values())}"
            )
        return chosen
    taken = next(split for split in ("train", "", *splits) if split in splits)
    if taken not in ("train", "") and len(splits) > 1:
        raise UserError(
            f"{place}: has files of {' and '.join(sorted(splits))}, none of train;"
            " choose some with --split"
        )
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
    found = []
    configs = card_data.get("configs")
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict):
            folder = config.get("data_dir")
            files = list(_files_of(config.get("data_files")))
            if isinstance(folder, str):
                files = [(split, f"{folder}/{pattern}") for split, pattern in files or [("", "*")]]
            found += [
                (str(config.get("config_name")), SPLIT_WORDS.get(split, split), pattern)
                for split, pattern in files
            ]
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


def listed(names: Set[str]) -> str:
    """Join names for an error line, the first ones of many."""
    first = ", ".join(sorted(names)[:MAX_LISTED]) or "none"
    more = len(names) - MAX_LISTED
    return f"{first} and {more} more" if more > 0 else first


def matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
