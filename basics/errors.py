"""A mistake that a person can put right, and how it is told."""

from __future__ import annotations

import errno
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

FULL_DISK = 4  # the exit status
LONGEST_LINE = 190  # characters of a message
LONG_PATH = re.compile(r"[^\s'\";,:]*/[^\s'\";,:]*([^\s'\";,:]{40})")


class UserError(Exception):
    """A mistake that a person can put right: one line, no traceback.

    Attributes:
        status: the exit status, 2 for bad input.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status

    def line(self) -> str:
        """What a person gets to see."""
        return f"Error: {one_line(str(self))}"


def cannot_be_written(place: Path, error: OSError) -> UserError:
    """Word what a disk has refused; where it is full, with the exit status of that."""
    line = f"{place}: cannot be written: {error.strerror or str(error)[:80]}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{line}; make room, or name another place", FULL_DISK)
    return UserError(line)


def tell(line: str) -> None:
    """Write a line to stderr. A log on a full disk, or that nobody reads, is no failure."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Write a line to stdout, as far as that takes it."""
    with suppress(OSError):
        print(line, flush=True)


def drop_unwritable_output() -> None:
    """Give up what stdout and stderr do not take: Python would end with status 120 for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_line(message: str) -> str:
    """Show a message in one line that fits a screen; of long paths the last part says most."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    if len(line) > LONGEST_LINE:
        line = LONG_PATH.sub(r"...\1", line)
    return line if len(line) <= LONGEST_LINE else f"{line[:130]} ... {line[135 - LONGEST_LINE:]}"
