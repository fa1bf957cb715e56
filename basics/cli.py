"""Command lines: running click's commands, types of options, JSON documents on standard output."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import click

from basics.errors import FAILED, UserError, print_error, print_line
from basics.json_files import to_json

MAX_USD_PER_HOUR = 1e6


class FiniteRange(click.FloatRange):
    """A finite number in a range; click alone accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


ABOVE_0 = FiniteRange(min=0, min_open=True)
USD_PER_HOUR = FiniteRange(min=0, max=MAX_USD_PER_HOUR, min_open=True)


def run_command(command: click.Command, arguments: list[str] | None = None, *,
                name: str | None = None) -> int:
    """Run a command; return its exit status. click would print a wrong word as it is.

    Raises: UserError: the command line is not valid; click.Abort: Ctrl-C.
    """
    try:
        status = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        path = f"{context.command_path} " if (context := getattr(error, "ctx", None)) else ""
        raise UserError(f"{' '.join(error.format_message().split())} See {path}--help.") from None
    return status if isinstance(status, int) else 0


def run_and_exit(command: click.Command) -> NoReturn:
    """Run a command that handles its own errors, then exit."""
    try:
        sys.exit(run_command(command))
    except UserError as error:
        print_error(error.line())
        sys.exit(error.status)
    except click.Abort:
        print_error("Aborted!")
        sys.exit(FAILED)


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
