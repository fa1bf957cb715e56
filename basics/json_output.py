"""JSON documents on standard output, for scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from basics.errors import print_line
from basics.json_files import to_json


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document; its first key, `schema`, names its kind and version."""
    print_line(to_json(document, indent=2))


@contextmanager
def stdout_to_stderr(is_wanted: bool) -> Iterator[None]:
    """Send what is printed inside to stderr, also by child processes, if that is wanted."""
    if not is_wanted:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
