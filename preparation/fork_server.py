"""Preloaded by the fork server: what its workers import, and the end of its socket."""

import atexit
import shutil
from multiprocessing import forkserver
from pathlib import Path

import preparation.encoding  # noqa: F401


@atexit.register
def remove_socket() -> None:
    """Remove the directory of the server's socket; the command does, unless it was killed."""
    if address := forkserver._forkserver._forkserver_address:
        shutil.rmtree(Path(address).parent, ignore_errors=True)
