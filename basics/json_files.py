"""Strict reading of untrusted JSON files, and JSON output without NaN."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from basics.errors import UserError, cannot_be_written
from basics.files import MAX_BYTES, read_regular_file, write_atomically


def read_json_object(path: Path, *, needed_by: str = "every run") -> dict[str, Any]:
    """Read a file with one JSON object and no duplicate keys. Raises: UserError."""
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
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {str(error)[:120]}; correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}; wanted a JSON object {{...}}")
    return values


def set_number(path: Path, key: str, number: int) -> None:
    """Set a number in a file with a flat JSON object; its other text stays. Raises: UserError."""
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(rf'("{key}"\s*:\s*)[^\s,}}]+', rf"\g<1>{number}", text)
    if not count:
        changed = re.sub(r"\{(\s*)", rf'{{\1"{key}": {number},\1', text, count=1)
    try:
        write_atomically(path, changed)
    except OSError as error:
        raise cannot_be_written(path, error) from None


def found_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in an untrusted file; empty if there is none that can be read."""
    try:
        values = json.loads(read_regular_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def to_json(values: Any, **options: Any) -> str:
    """Return JSON with null for NaN and infinity, which JSON does not have."""
    return json.dumps(_finite(values), allow_nan=False, **options)


def finite_or_none(number: float | None) -> float | None:
    """Return the number, or None for NaN, infinity and None."""
    return number if number is not None and math.isfinite(number) else None


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return finite_or_none(values) if isinstance(values, float) else values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f'key "{twice[:60]}" is there twice')
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
