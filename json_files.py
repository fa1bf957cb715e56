"""JSON that a person has written, or a stranger."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from user_error import UserError

MAX_BYTES = 2**20  # more than any config has
MAX_HEADER_BYTES = 2**22  # of a safetensors file: some 20,000 tensors


def read_json_object(path: Path, *, needed_by: str = "every run") -> dict[str, Any]:
    """Read a file that holds one JSON object, no key twice. Raises: UserError."""
    try:
        if not path.is_file() and path.exists():
            raise UserError(f"{path}: is not a file; {needed_by} needs it")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: has {path.stat().st_size:,} bytes, more than any config;"
                            " replace it")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {needed_by} needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {str(error)[:120]}") from None
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {str(error)[:120]}; correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}; wanted a JSON object {{...}}")
    return values


def read_plain(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Read what a program has written, where a stranger may have laid something else.

    Raises:
        OSError: it is no file but a link, a pipe or a directory, or it is too large.
    """
    # A pipe that nobody writes to would have its reader wait.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes).decode(errors="replace")
    finally:
        os.close(descriptor)


def check_tensor_header(path: Path) -> None:
    """Refuse a safetensors file whose header would take long to read. Raises: OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise OSError(f"a header of {length:,} bytes")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{twice[:60]}" stands there twice')
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
