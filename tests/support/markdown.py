"""Markdown as a browser gets it: to see what hostile text in it becomes."""

import re

from markdown_it import MarkdownIt

# A link, an image, a tag and an address, from inside code too; may be the name of a file.
HOSTILE = "a`[b](javascript:c()) <script>d() ![e](f)|[g](javascript:h()) <i@j.k>"


def active_parts(text: str) -> set[str]:
    """Return the scripts and the targets of links and images that a Markdown text has."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.validateLink = lambda url: True  # not every program refuses a javascript: link
    page = parser.render(text.partition("\n---\n")[2] or text)  # without front matter
    return set(re.findall(r'<script|(?:href|src)="([^"]*)"', page))
