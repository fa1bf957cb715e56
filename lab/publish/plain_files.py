"""Files that are copied or uploaded unchanged: never what a link points to."""

from __future__ import annotations

import stat
from pathlib import Path

from basics.errors import UserError
from basics.files import read_regular_bytes

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
MAX_CHART_BYTES = 2**24  # a hundred times what a chart has


def is_plain(path: Path) -> bool:
    """Return whether there is a plain file; False if there is nothing.

    Raises:
        UserError: it is a link, which may point to any file of this machine, or no file.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise UserError(f"{path}: is a link, and publishing would send what it points to; move it"
                        " away, or put the file itself there")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is not a file; move it away")
    return True


def read_charts(directory: Path, names: list[str]) -> dict[str, bytes]:
    """Read the charts that are there. Raises: UserError: one is a link, or no chart."""
    found = {name: directory / name for name in names if is_plain(directory / name)}
    return {name: _read_chart(path) for name, path in found.items()}


def _read_chart(path: Path) -> bytes:
    try:
        content = read_regular_bytes(path, max_bytes=MAX_CHART_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a chart: {error.strerror or error}; move it"
                        " away") from None
    if not content.startswith(PNG_MAGIC):
        raise UserError(f"{path}: is not a PNG, as the charts of a run are; move it away")
    return content
