"""`lab watch`: training runs on a page that follows them, or as one file."""

from contextlib import suppress
from pathlib import Path

import click

from basics.cli import RUNS_DIR
from basics.errors import visible, writing_to
from basics.files import write_atomically
from lab.runs import chosen_runs


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="Port of 127.0.0.1; 0 lets the system choose.",
)
@click.option(
    "--export",
    "export_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page as one HTML file as of now, and serve nothing.",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Answer under this host name too: that of a proxy, as its address shows it.",
)
@RUNS_DIR
def command(
    runs: tuple[str, ...],
    port: int,
    export_path: Path | None,
    allowed_hosts: tuple[str, ...],
    runs_dir: Path,
) -> None:
    """Show RUNs, or all runs that have been launched, on a page that follows them.

    The page is served to this machine only. It may be open while they train: it changes nothing.
    """
    # Imported here so that --help is fast.
    from lab.watch.answers import Watched
    from lab.watch.server import Server, exported_page

    chosen = chosen_runs(runs_dir, runs)
    watched = Watched(runs_dir, tuple(chosen) if runs else ())
    if export_path:
        with writing_to(export_path):
            write_atomically(export_path, exported_page(watched))
        return click.echo(visible(f"written: {export_path}"))
    with Server(watched, port, allowed_hosts) as server:
        number = server.server_port
        click.echo(
            visible(
                f"{runs_dir} at {server.address} (Ctrl-C ends it)\n"
                f"from another machine: ssh -N -L {number}:127.0.0.1:{number} HOST"
            )
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()
