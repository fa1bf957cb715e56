"""Find the documents that SOURCE names, for each command that reads some."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from basics.errors import UserError

if TYPE_CHECKING:
    from preparation.journal import Request
    from preparation.sources import Source

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

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
    """The part of a command line that names documents."""

    source: str
    subset: str = ""
    text_column: str = "text"
    keep_raw: Path | None = None
    split: str = ""
    revision: str = ""  # a commit, branch or tag of a dataset on the hub


def find_source(options: SourceOptions, *, raw_dir: Path,
                unfinished: Request | None = None) -> Source:
    """Find the documents that SOURCE names. Raises: UserError.

    Args:
        raw_dir: for downloads that are not kept.
        unfinished: of an earlier launch, which continues with the same commit of a hub dataset.
    """
    # Imported here, so that --help does not wait for it.
    from preparation.choosing import Choice
    from preparation.sources import find_documents, kind_of

    source, keep_raw = options.source, options.keep_raw
    choice = Choice(options.subset.strip("/"), options.split)
    if HUB_NAME.fullmatch(source) and not kind_of(source) and not Path(source).exists():
        from preparation.hub import RawFiles, hub_source

        asked, revision = options.revision, options.revision or None
        if unfinished is not None and unfinished.source == choice.label(source) and (
                asked in ("", unfinished.asked_revision)):  # a branch may have got new commits
            asked, revision = unfinished.asked_revision, unfinished.revision
        try:
            found = hub_source(
                source, choice, text_column=options.text_column, revision=revision,
                raw_files=RawFiles(keep_raw or raw_dir, keep_raw is not None))
            return replace(found, asked_revision=asked)
        except UserError as error:
            raise UserError(f"{error} (and there is no file {source} here)") from None
    if keep_raw or options.revision:
        raise UserError(f"{source}: --keep-raw and --revision need a dataset on the hub, given as"
                        " owner/name")
    if source == "python-stdlib":
        if choice != Choice():
            raise UserError(f"{source}: has no --subset and no --split")
        from preparation.standard_library import python_stdlib

        return python_stdlib()
    return find_documents(source, text_column=options.text_column, choice=choice)
