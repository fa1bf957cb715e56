"""The address of a judge's endpoint."""

from __future__ import annotations

import re
from urllib.parse import urlsplit


def is_address(text: str) -> bool:
    """Return whether a text is an address of the web."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is invalid
        return False


def without_user(text: str) -> str:
    """Return an address, or what was meant to be one, without a name and a password in it."""
    return re.sub(r"^(\w*://)?.*@", r"\1", text, flags=re.DOTALL)
