"""A mistake that a person can put right, and how it is told."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Exit statuses, beside 0 and 128 + n for a run stopped by signal n.
FAILED, BAD_INPUT, NUMBERS, DISK, HANG = 1, 2, 3, 4, 5
STOP_SIGNALS = {int(number): number.name
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
LONGEST_LINE = 190  # characters of a message
LONG_PATH = re.compile(r"[^\s'\";,:]*/[^\s'\";,:]*([^\s'\";,:]{40})")


class UserError(Exception):
    """A mistake that a person can put right: one line, no traceback.

    Attributes:
        status: the exit status, 2 for bad input.
    """

    def __init__(self, message: str, status: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.status = status

    def line(self) -> str:
        """What a person gets to see."""
        return f"Error: {one_line(str(self))}"


def cannot_be_written(place: Path, error: OSError) -> UserError:
    """Word what a disk has refused; where it is full, with the exit status of that."""
    line = f"{place}: cannot be written: {error.strerror or str(error)[:80]}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{line}; make room, or name another place", DISK)
    return UserError(line)


def as_os_error(error: Exception) -> OSError:
    """Map a file writer's error to OSError, with ENOSPC if the disk is full."""
    if isinstance(error, OSError):
        return error
    code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
    return OSError(code, os.strerror(code) if code == errno.ENOSPC else str(error)[:120])


def print_error(line: str) -> None:
    """Write a line to stderr. A log on a full disk, or that nobody reads, is no failure."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def print_line(line: str) -> None:
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 120 characters, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


def one_line(message: str) -> str:
    """Show a message in one line that fits a screen; of long paths the last part says most."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    if len(line) > LONGEST_LINE:
        line = LONG_PATH.sub(r"...\1", line)
    return line if len(line) <= LONGEST_LINE else f"{line[:130]} ... {line[135 - LONGEST_LINE:]}"
