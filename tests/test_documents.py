"""The documents: sizes of paragraphs, cells and lines, and words that make a sentence hard to read.

uv run --group test pytest tests/test_documents.py
"""

import re

import pytest
from markdown_it import MarkdownIt

from tests.support.workplace import PROJECT_DIR

DOCUMENTS = [
    path.relative_to(PROJECT_DIR).as_posix()
    for folder in (".", "docs", "benchmarks")
    for path in sorted((PROJECT_DIR / folder).glob("*.md"))
]
CELL_WORDS, PARAGRAPH_WORDS, LINE_CHARACTERS = 25, 60, 100
# Relative clauses without a noun: name the thing instead.
UNCLEAR = re.compile(r"\b(that of|those of|the ones? that|of a run that|as many as|it is that)\b")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def words_of(token):
    """Return the words of a paragraph or cell as they are shown: without the targets of links."""
    shown = (child.content if child.type != "softbreak" else " " for child in token.children)
    return "".join(shown).split()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_easy_to_read(document):
    text = (PROJECT_DIR / document).read_text()
    lines = text.splitlines()
    tokens = MARKDOWN.parse(text)
    found = []
    code = {
        number for token in tokens if token.type == "fence" for number in range(*token.map)
    }  # of what programs print, whose lines are as long as they are
    found += [
        f"line {number + 1}: {len(line)} characters, at most {LINE_CHARACTERS}"
        for number, line in enumerate(lines)
        if len(line) > LINE_CHARACTERS and number not in code and not line.startswith(("|", "!["))
    ]
    opened, line = "", 0
    for token in tokens:
        if token.nesting == 1:
            opened, line = token.type, token.map[0] + 1 if token.map else line
        if token.type != "inline" or opened == "heading_open":
            continue
        words = words_of(token)
        limit = CELL_WORDS if opened in ("td_open", "th_open") else PARAGRAPH_WORDS
        start = " ".join(words[:6])
        if len(words) > limit:
            found.append(f"line {line}: {len(words)} words, at most {limit}: {start} ...")
        found += [
            f"line {line}: {match[0]!r} in: {start} ..."
            for match in UNCLEAR.finditer(" ".join(words))
        ]
    assert not found, "\n".join(["", *found])
