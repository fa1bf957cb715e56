"""Training speed of this and other systems.

Run it with `uv run --group test python benchmarks/throughput.py`, or, where nothing is installed,
with `python -m benchmarks.throughput` in the project's directory.

Each row is measured in a fresh process; rows take turns, and the first one is measured again at the
end. All rows see the same tokens from the same weights in the same global batches, and must have
the same loss curve. Each measurement is appended to OUTPUT.jsonl when it is made, a failure with
its reason; the same command continues such a file, so that many short calls can measure what one
long call would. OUTPUT.json, OUTPUT.png and the table are made from that file.

`--peer NAME=PATH` adds another script: it finds the shape as JSON in the environment variable
THROUGHPUT_SHAPE, and prints its speed last, as "12345 tokens/s" or as a JSON object with
"tokens_per_second" and other keys of a line; arguments may follow the path. `peer_nanogpt.py` and
`peer_modded.py` are such scripts, for copies of nanoGPT and of modded-nanogpt.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from basics.errors import describe
from basics.machine import seconds_since_process_start
from benchmarks import throughput_records as records
from benchmarks.throughput_benches import MATRIX_PRODUCT, Bench, benches_of
from benchmarks.throughput_launch import Place, RowFailed, measure_row
from benchmarks.throughput_report import draw, reports_of, table
from benchmarks.throughput_rows import Row
from benchmarks.throughput_tokens import write_token_files
from reporting.speed import flops_per_token

ROW_SECONDS = 600  # that a row may take
REPORT_SECONDS = 20  # kept free before a time limit: to end processes, for the table and the chart


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]),
              default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH",
              help="Another script that trains the same shape and prints its tokens/s.")
@click.option("--rounds", type=click.IntRange(min=1),
              default=1, show_default=True,
              help="Measurements of each row; the first of several rows has one more.")
@click.option("--only", multiple=True, metavar="ROW",
              help="Measure only these rows, and the peers.")
@click.option("--ladder", is_flag=True, help="Compare one change at a time instead of systems.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("throughput"),
              show_default=True, help="Where OUTPUT.jsonl, .json and .png are written.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True),
              help="Begin no row that would end later; the same command continues.")
@click.option("--fresh", is_flag=True, help="Start over: move OUTPUT.jsonl to OUTPUT.old.jsonl.")
@click.option("--report-only", is_flag=True, help="Measure nothing: only the table and the chart.")
def main(device: str, peers: tuple[str, ...], rounds: int, only: tuple[str, ...], ladder: bool,
         output: Path, minutes: float | None, fresh: bool, report_only: bool) -> None:
    """Measure this trainer, the original and Hugging Face's GPT-2."""
    path = beside(output, ".jsonl")
    end = time.monotonic() - seconds_since_process_start() + 60 * minutes if minutes else None
    session = Session(path, device, end and end - REPORT_SECONDS)
    if not report_only:
        benches = [with_rows(bench, peers, only)
                   for bench in benches_of(device, rounds, ladder=ladder)]
        output.parent.mkdir(parents=True, exist_ok=True)
        if fresh and path.exists():
            path.replace(beside(output, ".old.jsonl"))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            for number, bench in enumerate(benches):
                session.measure(bench, Path(folder) / str(number))
    is_good = write_report(output)
    for name in session.left:
        click.echo(f"not measured for lack of time: {name}; the same command continues")
    sys.exit(0 if is_good else 1)


def beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def with_rows(bench: Bench, peers: tuple[str, ...], only: tuple[str, ...]) -> Bench:
    """Return a bench with the chosen rows, and the peers as rows."""
    named = dict(peer.partition("=")[::2] for peer in peers)
    if not all(named.values()):
        raise click.UsageError("--peer: wanted NAME=PATH")
    unknown = set(only) - {row.name for row in bench.rows}
    if unknown:
        names = "; ".join(row.name for row in bench.rows)
        raise click.UsageError(f"unknown row in --only: {min(unknown)}; rows: {names}")
    rows = tuple(row for row in bench.rows if row.name in (only or (row.name,)))
    others = tuple(Row(name, "peer", {"path": path}) for name, path in named.items())
    return replace(bench, rows=rows + others)


@dataclass
class Session:
    """One call of the command: measures what is not in the file yet, until the time is over.

    Attributes:
        end: of time.monotonic(), or None for no limit.
        left: measurements that were not begun.
    """

    path: Path
    device: str
    end: float | None = None
    left: list[str] = field(default_factory=list)
    num_begun: int = 0

    def measure(self, bench: Bench, folder: Path) -> None:
        """Measure the rows of a bench that the file lacks, then those that have failed before."""
        tokens_path = write_token_files(folder / "zipf", bench.model, bench.num_tokens)
        probe = self.record(bench, MATRIX_PRODUCT, 1, self._place(MATRIX_PRODUCT, tokens_path))
        pending = self._pending(bench, probe)
        for count, (row, number) in enumerate(pending, start=1):
            if not self._fits(bench, records.device_of(probe)):
                self.left.append(f"{row.name}, round {number}")
                continue
            self.num_begun += 1
            place = self._place(row, tokens_path)
            line = self.record(bench, row, number, place, machine=probe["machine"])
            click.echo(f"{count}/{len(pending)} {row.name}: {said_of(line)}"
                       f" ({line['seconds']:.0f} s)", err=True)

    def record(self, bench: Bench, row: Row, number: int, place: Place,
               machine: dict[str, Any] | None = None) -> records.Line:
        """Measure a row once and append the result to the file, whatever it is."""
        began = time.monotonic()
        line = {"bench": bench.title, "row": row.name, "round": number, "machine": machine,
                "global_batch_size": bench.global_batch_size,
                "flops_per_token": flops_per_token(bench.model)}
        try:
            line |= {"status": records.OK} | measure_row(bench, row, place)
        except RowFailed as error:
            line |= {"status": records.FAILED, "reason": str(error)}
        except Exception as error:  # a file that a row has left, of a form that it should not have
            line |= {"status": records.FAILED, "reason": describe(error)}
        line["seconds"] = time.monotonic() - began
        records.append(self.path, line)
        return line

    def _pending(self, bench: Bench, probe: records.Line) -> list[tuple[Row, int]]:
        """Return what is to be measured on this machine; earlier failures come last."""
        device = records.device_of(probe)
        known = records.latest(records.read(self.path))
        states = {(row.name, number): known.get((bench.title, device, row.name, number))
                  for row, number in bench.measurements()}
        new, failed = [], []
        for row, number in bench.measurements():
            line = states[row.name, number]
            if line is None:
                new.append((row, number))
            elif line["status"] != records.OK:
                failed.append((row, number))
        return [*new, *failed]

    def _fits(self, bench: Bench, device: str) -> bool:
        """Return whether a row as long as the longest so far would end in time."""
        if self.end is None:
            return True
        lines = [line for line in records.read(self.path) if line["bench"] == bench.title
                 and records.device_of(line) == device and line["status"] == records.OK]
        longest = max((line["seconds"] for line in lines), default=0.0)
        if not self.num_begun:  # each call makes progress
            longest = 0.0
        return time.monotonic() + longest < self.end

    def _place(self, row: Row, tokens_path: Path) -> Place:
        deadline = time.monotonic() + ROW_SECONDS
        cache_dir = tokens_path.parents[1] / f"compiled-{row.name.replace(' ', '-')}"
        return Place(self.device, tokens_path, cache_dir,
                     deadline if self.end is None else min(deadline, self.end))


def said_of(line: records.Line) -> str:
    """Return a measurement as text."""
    if line["status"] != records.OK:
        return f"failed: {line['reason']}"
    return f"{line['tokens_per_second']:,.0f} tokens/s"


def write_report(output: Path) -> bool:
    """Write what OUTPUT.jsonl says as a table and a chart; return whether all rows are sound."""
    reports = reports_of(records.read(beside(output, ".jsonl")))
    if not reports:
        click.echo(f"{beside(output, '.jsonl')}: no measurements yet")
        return False
    for line in _lines_of(reports):
        click.echo(line)
    beside(output, ".json").write_text(json.dumps(reports, indent=1) + "\n")
    draw(reports, beside(output, ".png"))
    return not any(report["differences"] or any(row["reason"] for row in report["rows"])
                   for report in reports)


def _lines_of(reports: list[dict[str, Any]]) -> Iterator[str]:
    for report in reports:
        yield from table(report)
        yield from report["differences"]


if __name__ == "__main__":
    main()
