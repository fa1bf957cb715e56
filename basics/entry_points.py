"""How each command begins, and the commands of an installed package. Imports next to nothing."""

import importlib
import io
import os
import runpy
import signal
import sys
from typing import NoReturn

INTERRUPTED = "Interrupted"  # what is printed after Ctrl-C


def begin_command() -> None:
    """Let Ctrl-C end the process in one line, and nothing that is printed fail. Called first.

    Importing takes seconds, in which Ctrl-C would print the traceback of some package. A terminal
    or log that is not UTF-8 gets "\\u2192" for what it cannot show.
    """
    # torchrun passes signals on to its processes, and says what has happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL if "RANK" in os.environ else _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def _end(*_: object) -> NoReturn:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + signal.SIGINT)


def train() -> None:
    """Run ddp_train.py: the command `ddp-train`."""
    begin_command()
    runpy.run_module("ddp_train", run_name="__main__", alter_sys=True)


def prepare() -> None:
    """Run prepare_dataset.py: the command `ddp-train-prepare`."""
    begin_command()
    importlib.import_module("prepare_dataset").run()


def lab() -> None:
    """Run the command `lab`."""
    begin_command()
    importlib.import_module("lab.__main__").main()
