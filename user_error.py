"""A mistake that a person can put right, and how it is told."""

from __future__ import annotations

import re

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


def one_line(message: str) -> str:
    """Show a message in one line that fits a screen; of long paths the last part says most."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    if len(line) > LONGEST_LINE:
        line = LONG_PATH.sub(r"...\1", line)
    return line if len(line) <= LONGEST_LINE else f"{line[:130]} ... {line[135 - LONGEST_LINE:]}"
