"""Runs that are watched: their files, written as a training run writes them, and the server."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from lab.watch.answers import Watched
from lab.watch.server import HEADERS, Server

HOSTILE = (
    '</script><script>document.title="owned"</script><img src=x onerror=document.title=1>'
    "\x1b]0;title\x07\x1b[2J\u202e"
)
ODD_VALUES = [
    '"x"',
    "NaN",
    "-Infinity",
    "null",
    "-1",
    "1e400",
    "9" * 4000,
    "1e30",
    "[]",
    '{"a": 1}',
    "true",
    '"' + "x" * 5000 + '"',
]  # of a number, in JSON


def report(step: int, **values: Any) -> dict[str, Any]:
    """Return the record of a report after `step` steps."""
    return {
        "global_step": step - 1,
        "tokens": step * 2048,
        "seconds": step / 10,
        "train_loss": 1 + 4 / math.sqrt(step),
        "train_loss_min": 0.9 + 4 / math.sqrt(step),
        "train_loss_max": 1.2 + 4 / math.sqrt(step),
        "grad_norm": 0.5,
        "grad_norm_max": 0.7,
        "skipped_steps": 0,
        "learning_rate": 0.001,
        "tokens_per_second": 20480.0,
        "seconds_left": (200 - step) / 10,
    } | values


def validation(step: int, loss: float) -> dict[str, Any]:
    return {
        "global_step": step - 1,
        "tokens": step * 2048,
        "seconds": step / 10,
        "validation_loss": loss,
        "validation_seconds": 1.0,
    }


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def append(run_dir: Path, *records: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(lines(*records))


def add_run(
    runs_dir: Path, name: str, *, steps: int = 100, status: str = "finished", **summary: Any
) -> Path:
    """Write the files of a run that reports every 10 steps and validates every 50."""
    run_dir = runs_dir / name
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text(
        json.dumps({"run": name, "status": status, "reason": None, "num_steps": 200} | summary)
    )
    for step in range(10, steps + 1, 10):
        append(run_dir, report(step))
        if step % 50 == 0:
            append(run_dir, validation(step, 1.5 + 1 / step))
    return run_dir


def add_sample(run_dir: Path, step: int, prompt: str, text: str) -> None:
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"global_step": step - 1, "prompt": prompt, "text": text}) + "\n")


@contextmanager
def served(runs_dir: Path, *names: str) -> Iterator[Server]:
    """Serve the page of these runs, or of all, on a port that the system chooses."""
    with Server(Watched(runs_dir, names), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: Server, path: str, *, token: str | None = "its own", **headers: str
) -> tuple[HTTPResponse, bytes]:
    """Ask as the page would, but for these headers and another token, or none.

    Whatever the answer is, it has the headers that limit what a browser does with it.
    """
    if token is not None:
        headers["X-Token"] = server.token if token == "its own" else token
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        return response, response.read()
    finally:
        connection.close()
