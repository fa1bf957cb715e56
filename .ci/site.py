"""Hooks of mkdocs: pages of the project that are outside of docs/, and links to its files."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PROJECT_DIR = Path(__file__).resolve().parents[1]
PAGES = [
    "RELIABILITY.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "tests/README.md",
    "benchmarks/README.md",
    "benchmarks/recipes.md",
]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    images = (PROJECT_DIR / "benchmarks").glob("**/*.png")
    for path in [*PAGES, *(path.relative_to(PROJECT_DIR).as_posix() for path in images)]:
        source = str(PROJECT_DIR / path)
        files.append(File.generated(config, f"project/{path}", abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where a file is on the site; those to code are shown without a link."""
    here = page.file.src_uri
    source = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def led(match: re.Match[str]) -> str:
        bang, text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = path.removeprefix("docs/") if path.startswith("docs/") else f"project/{path}"
        if files.get_file_from_path(place) is None and (PROJECT_DIR / path).exists():
            return text
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{bang}[{text}]({relative}{anchor or ''})"

    return LINK.sub(led, markdown)
