"""Choose files of a source by their names: --subset and --split."""

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from basics.errors import UserError, one_line, print_error

SPLIT_WORDS = {  # in names of files and directories, as Hugging Face's datasets reads them
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_WORDS)})(?![a-z])")
MAX_LISTED = 5  # names in an error line
Configs = Mapping[str, Mapping[str, Sequence[str]]]  # patterns of files by config and split


@dataclass(frozen=True)
class Choice:
    """What --subset and --split say; empty if they are not given."""

    subset: str = ""
    split: str = ""

    def label(self, source: str) -> str:
        """Return the name of the source with this choice."""
        return " ".join([source, *([self.subset] if self.subset else []),
                         *([f"split {self.split}"] if self.split else [])])

    def of_subset(self, names: Iterable[str], place: str,
                  configs: Configs | None = None) -> dict[str, str]:
        """Return the files of the subset: their names, each with its path inside the subset.

        The pattern is compared with directories at any depth, then with the names of configs.

        Args:
            configs: of the dataset's card.

        Raises:
            UserError: none matches; lists what there is.
        """
        names, configs = list(names), configs or {}
        if not self.subset:
            if len(configs) > 1:
                print_error(one_line(f"{place}: taking all of its configs, {listed([*configs])};"
                                     " --subset chooses some"))
            return dict(zip(names, names, strict=True))
        folders = {name: list(PurePosixPath(name).parents)[-2::-1] for name in names}
        inside: dict[str, str] = {}
        for name, above in folders.items():  # the outermost first, without the root
            folder = next((each for each in above if _matches(str(each), self.subset)), None)
            if folder is not None:
                inside[name] = str(PurePosixPath(name).relative_to(folder))
        patterns = list(itertools.chain(*self._of_configs(configs).values()))
        inside = inside or {name: name for name in names
                            if any(_matches(name, pattern) for pattern in patterns)}
        if not inside:
            there_are = sorted({str(folder) for above in folders.values() for folder in above
                                if not folder.name.startswith(".")} | set(configs))
            raise UserError(f"{place}: --subset {self.subset} matches no directory; there are"
                            f" {listed(there_are, like=self.subset)}")
        return inside

    def of_split(self, paths: Mapping[str, str], place: str,
                 configs: Configs | None = None) -> list[str]:
        """Return the files of the split; without --split those named train if there are any.

        A file whose name says no split is of the one that the dataset's card gives it, if any.

        Args:
            paths: of the files inside the subset, by name.
            configs: of the dataset's card.

        Raises:
            UserError: no file matches, or none is named train but several splits are.
        """
        splits: dict[str, list[str]] = {}
        # --subset may name a directory, and no config.
        declared = self._of_configs(configs or {}) or ALL._of_configs(configs or {})
        for name, path in paths.items():
            split = split_of(path) or next((split for split, patterns in declared.items() if any(
                _matches(name, pattern) for pattern in patterns)), "")
            splits.setdefault(split, []).append(name)
        if self.split:
            chosen = splits.get(SPLIT_WORDS.get(self.split, self.split), []) or [
                name for name, path in paths.items()
                if _matches(path, self.split) or _matches(PurePosixPath(path).name, self.split)]
            if not chosen:
                raise UserError(f"{place}: --split {self.split} matches no file; there are"
                                f" {_counts(splits)}")
            return chosen
        if "train" not in splits and "" not in splits and len(splits) > 1:
            raise UserError(f"{place}: has files of {' and '.join(sorted(splits))}, none of train;"
                            " choose some with --split")
        taken = next(split for split in ("train", "", *splits) if split in splits)
        left_out = {split: names for split, names in splits.items() if split != taken}
        if left_out or taken not in ("train", ""):
            rest = f", leaving out {_counts(left_out)}; --split chooses others" * bool(left_out)
            print_error(one_line(f"{place}: taking {_counts({taken: splits[taken]})}{rest}"))
        return splits[taken]

    def _of_configs(self, configs: Configs) -> dict[str, list[str]]:
        """Return the patterns of each split of the configs that --subset names, or of all."""
        found: dict[str, list[str]] = {}
        for name, splits in configs.items():
            if not self.subset or _matches(name, self.subset):
                for split, patterns in splits.items():
                    found.setdefault(split, []).extend(patterns)
        return found


ALL = Choice()


def split_of(path: str) -> str:
    """Return train, validation or test if a file or one of its directories is named so, else
    an empty text."""
    for part in reversed(PurePosixPath(path.lower()).parts):
        if found := SPLIT_WORD.search(part):
            return SPLIT_WORDS[found[0]]
    return ""


def config_patterns(card_data: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the `Configs` in the front matter of a dataset card."""
    found: dict[str, dict[str, list[str]]] = {}
    configs = card_data.get("configs")
    for config in configs if isinstance(configs, list) else []:
        if isinstance(config, dict):
            splits: dict[str, list[str]] = {}
            for split, pattern in _files_of(config.get("data_files")):
                splits.setdefault(SPLIT_WORDS.get(split, split), []).append(pattern)
            if isinstance(folder := config.get("data_dir"), str):
                splits = {split: [f"{folder}/{pattern}" for pattern in patterns]
                          for split, patterns in (splits or {"": ["*"]}).items()}
            found[str(config.get("config_name"))] = splits
    return found


def listed(names: Sequence[str], *, like: str = "") -> str:
    """Join names for an error line; of many, those that are most similar to `like`."""
    if len(names) > MAX_LISTED:
        similar = difflib.get_close_matches(like, names, MAX_LISTED, cutoff=0)
        return f"{', '.join(similar)} and {len(names) - MAX_LISTED} more"
    return ", ".join(names) or "none"


def _files_of(value: Any, split: str = "") -> Iterable[tuple[str, str]]:
    """Yield the splits and paths in data_files: a text, a list, or objects with `path`."""
    if isinstance(value, str):
        yield split, value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _files_of(item.get("path"), str(item.get("split") or ""))
            else:
                yield from _files_of(item, split)


def _counts(splits: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{split or 'other'} ({len(names):,} file{'s' * (len(names) > 1)})"
                     for split, names in sorted(splits.items(), reverse=True)) or "none"


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
