"""Strict reading of untrusted JSON files, also into configs, and JSON output without NaN."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from basics.errors import UserError, writing_to
from basics.files import MAX_BYTES, read_regular_file, write_atomically
from basics.text import nearest

Config = TypeVar("Config", bound=BaseModel)


class FrozenConfig(BaseModel):
    """A config without unknown keys, conversions of types, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_json_object(path: Path, *, needed_by: str = "every run") -> dict[str, Any]:
    """Read a file with one JSON object and no duplicate keys. Raises: UserError."""
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else "no such file"
            raise UserError(f"{path}: {what}; {needed_by} needs it")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"{path}: has {path.stat().st_size:,} bytes, more than any config; replace it"
            )
        values = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {str(error)[:120]}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {str(error)[:120]}; correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}; wanted a JSON object {{...}}")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f'key "{twice[:60]}" is there twice')
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Describe a key that is not known, and name the most similar one that is."""
    found = nearest(key, known, similarity=0)
    return f'unknown key "{key[:60]}"; the nearest known one is "{found}"'


def describe(error: ValidationError) -> str:
    """Describe the first error in a config, and what to do."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if not key:  # a rule of several keys: its validator has the text
        return first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f'"{key}" is missing; add it'
    wanted = first["msg"].removeprefix("Input ").removeprefix("String ")
    if first["type"] == "string_pattern_mismatch":
        wanted = "should be a plain name, or owner/name"
    return f"{key} {wanted}, found {json.dumps(first['input'], default=str)[:60]}; change it"


def set_number(path: Path, key: str, number: int) -> None:
    """Set a number in a file with a flat JSON object; its other text stays. Raises: UserError."""
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(rf'("{key}"\s*:\s*)[^\s,}}]+', rf"\g<1>{number}", text)
    if not count:
        changed = re.sub(r"\{(\s*)", rf'{{\1"{key}": {number},\1', text, count=1)
    with writing_to(path):
        write_atomically(path, changed)


def found_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in an untrusted file; empty if there is none that can be read."""
    try:
        return parsed_object(read_regular_file(path))
    except OSError:
        return {}


def parsed_object(text: str, *, unique_keys: bool = False) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the text is damaged or only partly written.

    With `unique_keys` also where a key is there twice: of two values, the last would count.
    """
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys if unique_keys else None)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def to_json(values: Any, **options: Any) -> str:
    """Return JSON with null for NaN and infinity, which JSON does not have."""
    finite = json.loads(json.dumps(values), parse_constant=lambda _: None)
    return json.dumps(finite, allow_nan=False, **options)


def finite_or_none(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
