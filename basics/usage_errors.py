"""Run click commands: click itself prints a wrong word of the command line as it is."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from basics.errors import FAILED, UserError, print_error


def run_command(command: click.Command, arguments: list[str] | None = None, *,
                name: str | None = None) -> int:
    """Run a command; return its exit status.

    Args:
        arguments: by default, those of the process.
        name: of the program, by default that of its file.

    Raises:
        UserError: the command line is not valid.
        click.Abort: Ctrl-C.
    """
    try:
        status = command.main(arguments, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = f"{context.command_path} " if context else ""
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
