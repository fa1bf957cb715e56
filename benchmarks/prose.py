"""Collect 44 MB of English prose from documentation packages of Debian 12.

    uv run python -m benchmarks.prose corpora/prose
    uv run python prepare_dataset.py corpora/prose datasets/prose-bytes --tokenizer bytes

Needs `apt-get` and `dpkg-deb`, 93 MB of download and 500 MB of temporary disk space; installs
nothing. Keeps paragraphs that read as sentences, cut into documents of about 3,000 characters, and
shuffles them with a fixed seed: training and validation data have the same distribution.
"""

import gzip
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import click

from basics.cli import run_and_exit
from basics.errors import UserError, print_line
from basics.files import write_atomically

# The versions that the documents' figures were measured with.
VERSIONS = {
    "anarchism": "15.3-3",
    "debian-faq": "11.1",
    "debian-policy": "4.6.2.0",
    "debian-reference-en": "2.100",
    "developers-reference": "12.18",
    "dict-devil": "1.0-13.1",
    "dict-foldoc": "20230119-1",
    "dict-gcide": "0.48.5+nmu2",
    "dict-jargon": "4.4.7-3.1",
    "git-doc": "1:2.39.5-0+deb12u3",
    "linux-doc-6.1": "6.1.192-2",
    "perl-doc": "5.36.0-7+deb12u4",
    "postgresql-doc-15": "15.20-0+deb12u1",
    "python3.11-doc": "3.11.2-6+deb12u9",
}
DOCUMENT_CHARACTERS, MIN_PARAGRAPH_CHARACTERS = 3000, 100
MIN_LETTERS = 0.9  # fraction of a paragraph that is ASCII letters and spaces
BLOCKS = frozenset(
    "p div li dd dt td th tr h1 h2 h3 h4 h5 h6 pre table ul ol dl section hr"
    " blockquote body title".split()
)
SKIPPED = frozenset("script style nav head pre footer header svg table".split())
TRANSLATED = re.compile(r"\.(de|es|fr|it|ja|ru|pt|ko|nl|zh-cn)\.html$|/(it_IT|ja_JP|ko_KR|zh_..)/")
GENERATED = ("genindex", "search")  # the first letters of pages that hold indices
POD_MARKUP = re.compile(r"[A-Z]<+\s*([^<>|]*)(\|[^<>]*)?\s*>+")  # as in B<bold>, L<text|link>


class Paragraphs(HTMLParser):
    """Collects the paragraphs of a page, without code, tables and navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._parts: list[str] = []
        self._depth = 0  # of skipped elements

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._depth += tag in SKIPPED
        self._parts.append(" " if tag == "br" else "")
        self._end_paragraph(tag)

    def handle_endtag(self, tag: str) -> None:
        self._depth = max(0, self._depth - (tag in SKIPPED))
        self._end_paragraph(tag)

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self._parts.append(data)

    def _end_paragraph(self, tag: str) -> None:
        if tag in BLOCKS:
            self.found.append("".join(self._parts))
            self._parts.clear()


def download(names: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """Download and unpack packages; yield a directory each, by name. Raises: UserError."""
    try:
        subprocess.run(["apt-get", "download", *names], cwd=folder, check=True)
        for name in sorted(names):
            (package,) = folder.glob(f"{name}_*.deb")
            version = package.name.split("_")[1].replace("%3a", ":")
            if version != VERSIONS.get(name, version):
                print_line(f"{name} is {version}; the documents' figures are of {VERSIONS[name]}")
            subprocess.run(["dpkg-deb", "-x", package, folder / name], check=True)
            yield folder / name
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{error}; this corpus needs Debian 12, after apt-get update") from None


def paragraphs_of(path: Path) -> list[str]:
    """Read the paragraphs of a web page, Perl's documentation or a dictionary; others have none."""
    if path.suffix in (".html", ".xhtml"):
        page = Paragraphs()
        page.feed(path.read_text(encoding="utf-8", errors="replace"))
        page.close()
        return page.found
    if path.suffix == ".pod":
        text = POD_MARKUP.sub(r"\1", path.read_text(encoding="utf-8", errors="replace"))
        return [part for part in re.split(r"\n\s*\n", text) if not part.startswith((" ", "\t"))]
    if path.name.endswith(".dict.dz"):
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            return re.split(r"\n\s*\n", file.read())
    return []


def is_prose(paragraph: str) -> bool:
    num_letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in paragraph)
    return (
        len(paragraph) >= MIN_PARAGRAPH_CHARACTERS
        and paragraph[-1] in ".?!:\"')”"
        and num_letters >= MIN_LETTERS * len(paragraph)
    )


def documents_of(folder: Path, seen: set[str]) -> Iterator[str]:
    """Yield the documents of a package by file; a paragraph in `seen`, which grows, is left out."""
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if (
            path.is_symlink()
            or not path.is_file()
            or path.name.startswith(GENERATED)
            or TRANSLATED.search(inside)
        ):
            continue
        document: list[str] = []
        for paragraph in (" ".join(part.split()) for part in paragraphs_of(path)):
            if paragraph in seen or not is_prose(paragraph):
                continue
            seen.add(paragraph)
            document.append(paragraph)
            if sum(map(len, document)) >= DOCUMENT_CHARACTERS:
                yield "\n".join(document)
                document = []
        if document:
            yield "\n".join(document)


@click.command()
@click.argument("output", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--package",
    "names",
    multiple=True,
    default=tuple(VERSIONS),
    metavar="NAME",
    help="Use this package instead of all; can be repeated.",
)
def main(output: Path, names: tuple[str, ...]) -> None:
    """Write prose from Debian packages to OUTPUT/prose.jsonl, one document a line."""
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        documents = [
            document
            for package in download(names, Path(folder))
            for document in documents_of(package, seen)
        ]
    random.Random(1).shuffle(documents)
    output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    write_atomically(output / "prose.jsonl", lines)
    print_line(
        f"{output / 'prose.jsonl'}: {len(documents):,} documents,"
        f" {sum(map(len, documents)):,} characters"
    )


if __name__ == "__main__":
    run_and_exit(main, smaller="")
