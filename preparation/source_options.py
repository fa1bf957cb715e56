"""The command line options of a source of documents, for each command that reads one."""

from __future__ import annotations

from collections.abc import Callable

import click

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
