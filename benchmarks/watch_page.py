"""How long `lab watch` takes to answer: `uv run python -m benchmarks.watch_page`.

Ten runs of 100,000 records are asked for as the page does, one after the other: at first, after
one record was appended to each, and with nothing new. Prints seconds for all runs together and the
bytes that were sent, compressed.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import click
from tabulate import tabulate

from lab.watch.answers import Watched
from lab.watch.server import Server


def record(number: int) -> str:
    """Return a line as a run on one GPU writes it."""
    loss = 3 + 8 / math.sqrt(number + 1) + 0.05 * math.sin(number * 12.9898)
    return json.dumps({
        "global_step": 10 * number + 9, "tokens": (10 * number + 10) * 491_520,
        "seconds": round(4.2 * number, 3), "train_loss": loss, "train_loss_min": loss - 0.1,
        "train_loss_max": loss + 0.1, "grad_norm": 0.3 + 0.01 * (number % 7),
        "grad_norm_max": 0.5, "skipped_steps": 0, "learning_rate": 0.001 / (number + 1),
        "tokens_per_second": 1.1e6 + number % 1000, "usd": round(0.012 * number, 6),
        "mfu": 0.41, "gpu_memory_gib": [61.5], "host_load": 3.2}) + "\n"


class Client:
    """Asks over one connection, and counts bytes."""

    def __init__(self, port: int) -> None:
        self._connection, self.num_bytes = HTTPConnection("127.0.0.1", port), 0

    def ask(self, path: str) -> dict:
        self._connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        response = self._connection.getresponse()
        body = response.read()
        self.num_bytes += len(body)
        is_compressed = response.headers["Content-Encoding"] == "gzip"
        return json.loads(gzip.decompress(body) if is_compressed else body)


def measured(name: str, client: Client, work: Callable[[], None]) -> tuple[str, str, str]:
    """Return a row of the table."""
    client.num_bytes, began = 0, time.perf_counter()
    work()
    return name, f"{time.perf_counter() - began:.3f}", f"{client.num_bytes:,}"


@click.command()
@click.option("--runs", "num_runs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--records", type=click.IntRange(min=1), default=100_000, show_default=True)
def main(num_runs: int, records: int) -> None:
    """Write runs into a temporary directory, ask for them, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"run-{number}" / "metrics.jsonl" for number in range(num_runs)]
        text = "".join(map(record, range(records)))
        for path in paths:
            path.parent.mkdir()
            path.write_text(text)
        with Server(Watched(Path(folder)), 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            rows = measure(Client(server.server_port), paths, records)
            server.shutdown()
    click.echo(f"{num_runs} runs of {records:,} records, {len(text) / 1e6:.0f} MB each")
    click.echo(tabulate(rows, headers=["", "seconds", "bytes sent"], disable_numparse=True))


def measure(client: Client, paths: list[Path], records: int) -> list[tuple[str, str, str]]:
    """Return the rows of the table."""

    def ask_series(axis: str = "steps") -> None:
        for path in paths:
            name = path.parent.name
            client.ask(f"/series?run={name}&x={axis}&points=1000")

    def append() -> None:
        for path in paths:
            with path.open("a") as file:
                file.write(record(records))

    rows = [measured("states, first", client, lambda: client.ask("/runs")),
            measured("states, again", client, lambda: client.ask("/runs")),
            measured("points, first", client, ask_series)]
    append()
    rows += [measured("states, one record more each", client, lambda: client.ask("/runs")),
             measured("points, one record more each", client, ask_series),
             measured("points, nothing new", client, ask_series),
             measured("points, another axis", client, lambda: ask_series("tokens"))]
    return rows


if __name__ == "__main__":
    main()
