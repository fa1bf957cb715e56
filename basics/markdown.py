"""Text from outside in Markdown: it stays text, without links, tags, code or further columns."""

from __future__ import annotations

import re

from basics.errors import one_line, visible

# What makes a link of a bare address too: ://, www. and @.
MARKUP = re.compile(r"[\\`\[\]|@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def escaped(text: str) -> str:
    """Escape what could begin a link, an image, a tag, code, a further cell or a further line."""
    return visible(MARKUP.sub(r"\\\g<0>", text)).replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """Format text as code on one line; in code, nothing but a backtick needs an escape."""
    return "`{}`".format(one_line(text).replace("`", "'"))
