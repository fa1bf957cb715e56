"""The page as one file without a server: the same page, and the answers that it would ask for."""

import base64
import hashlib
import re
import time
from collections.abc import Iterable

from basics.json_files import to_json
from lab.watch.answers import Watched
from lab.watch.server import STATIC

ICON = '<link rel="icon" href="icon.svg">'
STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
# What would end a script or a comment in it, or a line of JavaScript, is written as \uXXXX.
ESCAPED = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def exported_page(watched: Watched) -> str:
    """Return an HTML page with all that it needs inside, which may ask for nothing else."""
    page = (STATIC / "page.html").read_text(encoding="utf-8")
    styles = [_content(name) for name in STYLE.findall(page)]
    scripts = [_content(name) for name in SCRIPT.findall(page)]
    policy = (f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)};"
              " img-src data:; base-uri 'none'; form-action 'none'")
    runs = watched.runs()["runs"]
    data = to_json({
        "runs": runs, "exported": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "run": {run["name"]: watched.run(run["name"]) for run in runs},
    }, separators=(",", ":")).translate(ESCAPED)
    page = page.replace(ICON, '<link rel="icon" href="data:,">')
    page = page.replace('<meta charset="utf-8">', '<meta charset="utf-8">\n<meta http-equiv="'
                        f'Content-Security-Policy" content="{policy}">')
    page = STYLE.sub(lambda found: f"<style>{_content(found[1])}</style>", page)
    page = SCRIPT.sub(lambda found: f"<script>{_content(found[1])}</script>", page)
    return page.replace("</main>", '</main>\n<script type="application/json" id="data">'
                        f"{data}</script>", 1)


def _content(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hashes(contents: Iterable[str]) -> str:
    """Return what a policy calls these scripts or styles."""
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
