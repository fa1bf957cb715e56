"""SHA-256 digests that the Hugging Face hub gave for files when they were downloaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from basics.errors import UserError

SHA256 = re.compile(r"[0-9a-f]{64}")
CLOCK_SECONDS = 1.0  # a file's time may be that much later than its record's


def verify_digests(paths: Iterable[Path]) -> int:
    """Compare files with their digests, about a second a GB; return how many have a known one.

    Raises:
        UserError: a file is damaged, or cannot be read.
    """
    num_known = 0
    for path in paths:
        if (known := digest_of_download(path)) is None:
            continue
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if found != known:
            raise UserError(f"{path}: is damaged: its SHA-256 is not what the hub gave for it;"
                            " delete it and run the same command again")
        num_known += 1
    return num_known


def digest_of_download(path: Path) -> str | None:
    """Return the SHA-256 that the hub gave for a file; None if it is not known.

    In the hub client's cache it is the name of the file that a link leads to. In a directory of
    our own the client keeps a record: the commit, the digest and the time in seconds, each on a
    line. It does not hold for a file that was written later.
    """
    if path.is_symlink():
        name = path.resolve().name
        return name if SHA256.fullmatch(name) else None
    record = path.parent / ".cache/huggingface/download" / f"{path.name}.metadata"
    try:
        _, digest, written_at = record.read_text().splitlines()[:3]
        is_later = path.stat().st_mtime - CLOCK_SECONDS > float(written_at)
    except (OSError, ValueError):
        return None
    return digest if SHA256.fullmatch(digest) and not is_later else None
