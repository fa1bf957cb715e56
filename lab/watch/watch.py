"""`lab watch`: a page of training runs that follows them while they train, also as one file."""

import base64
import hashlib
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from basics.errors import cannot_be_written, visible
from basics.files import write_atomically
from basics.json_files import to_json
from lab.runs import chosen_runs

if TYPE_CHECKING:
    from lab.watch.answers import Watched

ICON = '<link rel="icon" href="icon.svg">'
STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
# What would end a script or a comment in it, or a line of JavaScript, is written as \uXXXX.
ESCAPED = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True,
              help="Port of 127.0.0.1; 0 lets the system choose.")
@click.option("--export", "export_path", metavar="FILE",
              type=click.Path(dir_okay=False, path_type=Path),
              help="Write the page as one HTML file as of now, and serve nothing.")
@click.option("--text", "as_text", is_flag=True,
              help="Show them in this terminal instead; serve nothing.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
def command(runs: tuple[str, ...], port: int, export_path: Path | None, as_text: bool,
            runs_dir: Path) -> None:
    """Show RUNs, or all runs that have been launched, on a page that follows them.

    The page is served to this machine only. It may be open while they train: it changes nothing.
    """
    # Imported here so that --help is fast.
    from lab.watch.answers import Watched
    from lab.watch.server import Server
    from lab.watch.text import watch_text

    chosen_runs(runs_dir, runs)
    watched = Watched(runs_dir, runs)
    if as_text:
        return watch_text(watched)
    if export_path:
        try:
            write_atomically(export_path, exported_page(watched))
        except OSError as error:
            raise cannot_be_written(export_path, error) from None
        return click.echo(visible(f"written: {export_path}"))
    with Server(watched, port) as server:
        number = server.server_port
        click.echo(visible(
            f"{runs_dir} at {server.address} (Ctrl-C ends it)\n"
            f"from another machine: ssh -N -L {number}:127.0.0.1:{number} HOST"))
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def exported_page(watched: "Watched") -> str:
    """Return an HTML page with all that it needs inside, which may ask for nothing else."""
    from lab.watch.server import STATIC

    def content(name: str) -> str:
        return (STATIC / name).read_text(encoding="utf-8")

    page = content("page.html")
    policy = (f"default-src 'none'; script-src {_hashes(map(content, SCRIPT.findall(page)))};"
              f" style-src {_hashes(map(content, STYLE.findall(page)))};"
              " img-src data:; base-uri 'none'; form-action 'none'")
    runs = watched.runs()["runs"]
    data = to_json({
        "runs": runs, "exported": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "run": {run["name"]: watched.run(run["name"]) for run in runs},
    }, separators=(",", ":")).translate(ESCAPED)
    page = page.replace(ICON, '<link rel="icon" href="data:,">')
    page = page.replace('<meta charset="utf-8">', '<meta charset="utf-8">\n<meta http-equiv="'
                        f'Content-Security-Policy" content="{policy}">')
    page = STYLE.sub(lambda found: f"<style>{content(found[1])}</style>", page)
    page = SCRIPT.sub(lambda found: f"<script>{content(found[1])}</script>", page)
    return page.replace("</main>", '</main>\n<script type="application/json" id="data">'
                        f"{data}</script>", 1)


def _hashes(contents: Iterable[str]) -> str:
    """Return what a policy calls these scripts or styles."""
    digests = (hashlib.sha256(content.encode()).digest() for content in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
