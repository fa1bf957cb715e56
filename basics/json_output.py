"""JSON documents on standard output, for scripts."""

from __future__ import annotations

from typing import Any

from basics.errors import print_line
from basics.json_files import to_json


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document; its first key, `schema`, names its kind and version."""
    print_line(to_json(document, indent=2))
