"""JSON files as validated, immutable configs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from basics.errors import UserError
from basics.json_files import read_json_object

Config = TypeVar("Config", bound=BaseModel)


class FrozenConfig(BaseModel):
    """A config without unknown keys, conversions of types, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def read_config(path: Path, config_type: type[Config], *,
                renamed_keys: Mapping[str, str], gone_keys: Mapping[str, str]) -> Config:
    """Read one JSON file into its config.

    Args:
        renamed_keys: new names by old ones, which are still accepted.
        gone_keys: what to do instead, by keys that were accepted once.

    Raises:
        UserError: names the file, the key, the value and what is wanted.
    """
    values = read_json_object(path)
    for old, new in renamed_keys.items():
        if old in values and new in config_type.model_fields and new not in values:
            values[new] = values.pop(old)
    for key in values:
        if key in gone_keys:
            raise UserError(f'{path}: the key "{key}" has gone: {gone_keys[key]}')
        if key not in config_type.model_fields:
            raise UserError(f"{path}: {unknown_key(key, config_type.model_fields)}")
    try:
        return config_type.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error)}") from None


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Describe a key that is not known, and name the most similar one that is."""
    nearest = difflib.get_close_matches(key[:60], known, n=1, cutoff=0)[0]  # slow for a long key
    return f'unknown key "{key[:60]}"; the nearest known one is "{nearest}"'


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
