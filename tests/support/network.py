"""Connections to other machines, recorded and refused: those that Python code opens."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")
LOCAL = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", None)
_log: list[Path] = []  # of the context that is active


@contextmanager
def refused_network(log: Path) -> Iterator[None]:
    """Refuse all but the loopback in this process, and write what was asked for to a file."""
    refuse_network(log)
    try:
        yield
    finally:
        _log.clear()


def refuse_network(log: Path) -> None:
    """Do the same until the end of the process."""
    if not _log:
        sys.addaudithook(_refuse)  # a hook can never be removed; without a log it does nothing
    _log.append(log)


def environment_of_refusal(folder: Path, log: Path) -> dict[str, str]:
    """Return the environment in which a new Python process, and all that it starts, refuse too."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "from pathlib import Path\nfrom tests.support import network\n"
        f"network.refuse_network(Path({str(log)!r}))\n")
    project = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{project}"}


def _refuse(event: str, arguments: tuple) -> None:
    if not _log or event not in EVENTS:
        return
    place = arguments[0] if event.startswith("socket.gethost") or "addrinfo" in event else (
        arguments[1])
    host = place[0] if isinstance(place, tuple) else place
    # A socket of this machine: a file, or a name that begins with NUL.
    is_file = "/" in str(host) or isinstance(host, bytes) or str(host).startswith("\0")
    if not is_file and host not in (*LOCAL, socket.gethostname()):
        with _log[0].open("a") as file:
            file.write(f"{event} {place}\n")
        raise OSError(f"no network in this test: {event} {place}")
