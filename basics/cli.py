"""Command lines: running click's commands, types of options, JSON documents on standard output."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from basics.entry_points import INTERRUPTED
from basics.errors import (
    UserError,
    cannot_be_written,
    drop_unwritable_output,
    exit_status,
    is_out_of_memory,
    print_error,
    print_traceback,
    visible,
)
from basics.json_files import to_json

MAX_USD_PER_HOUR = 1e6
PLACE = click.Path(path_type=Path)
RUNS = Path("runs")  # of the current directory: where runs are, unless --runs-dir says so
RUNS_DIR = click.option("--runs-dir", type=PLACE, default=RUNS, show_default=True)
DATASETS_DIR = click.option(
    "--datasets-dir", type=PLACE, default=Path("datasets"), show_default=True
)


class FiniteRange(click.FloatRange):
    """A finite number in a range; click alone accepts NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


ABOVE_0 = FiniteRange(min=0, min_open=True)
USD_PER_HOUR = FiniteRange(min=0, max=MAX_USD_PER_HOUR, min_open=True)


class OutputError(OSError):
    """Standard output cannot be written."""


class CheckedOutput:
    """Standard output whose errors can be told from those of files."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(*error.args) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(*error.args) from None


def run_command(
    command: click.Command, arguments: list[str] | None = None, name: str | None = None
) -> Any:
    """Run a command and return its result; click ends it where nobody reads a pipe any more."""
    try:
        with redirect_stdout(CheckedOutput(sys.stdout)):  # type: ignore[type-var]
            return command.main(arguments, prog_name=name, standalone_mode=False)
    finally:
        drop_unwritable_output()


def run_and_exit(
    command: click.Command,
    arguments: list[str] | None = None,
    *,
    name: str | None = None,
    smaller: str,
) -> NoReturn:
    """Run a command, and exit with its status; what a person can correct is one line.

    Args:
        smaller: the options that need less memory.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command may have to tidy up
    try:
        status = run_command(command, arguments, name)
        sys.exit(status if isinstance(status, int) else 0)
    except (click.Abort, KeyboardInterrupt):
        print_error(INTERRUPTED)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, click.ClickException):  # click would print a wrong word as it is
            path = f"{context.command_path} " if (context := getattr(error, "ctx", None)) else ""
            error = UserError(f"{' '.join(error.format_message().split())} See {path}--help.")
        if isinstance(error, UserError) and os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # rank 0 prints the same error; torchrun then stops this process
        exit_with(error, smaller=smaller)
    finally:
        drop_unwritable_output()


def exit_with(error: Exception, *, smaller: str = "") -> NoReturn:
    """Print an error's line, or its traceback if nobody expects it, and exit with its status."""
    if smaller and not isinstance(error, UserError) and is_out_of_memory(error):
        error = UserError(f"out of memory; set a smaller {smaller}")
    if isinstance(error, OutputError):
        error = cannot_be_written(Path("standard output"), error)
    if isinstance(error, UserError):
        print_error(error.line())
    else:
        print_traceback(error)  # not Python's own: a terminal would obey what it prints
    drop_unwritable_output()
    sys.exit(exit_status(error))


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document; its first key, `schema`, names its kind and version."""
    click.echo(visible(to_json(document, indent=2)))


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
