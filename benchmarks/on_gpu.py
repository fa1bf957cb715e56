"""Everything that needs a GPU, in four calls of at most nine minutes, worth most first.

`python -m benchmarks.on_gpu a --out DIR` in the project's directory, then b, c and d; README.md
says what has to be there. Each result is a line of DIR/results.jsonl at once, and the same call
goes on where it was cut off. DIR/on-gpu.tar.gz holds all results, with a page, on-gpu.md, and
the speed that `lab plan` reads, measured.json.
"""

import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from basics.errors import describe
from basics.files import replacing, write_atomically
from benchmarks.on_gpu_rows import RESULTS, TINY, config, kernel_rows
from benchmarks.systems import Task
from benchmarks.throughput import (
    HUGGING_FACE,
    ORIGINAL,
    PROJECT_DIR,
    WHOLE_RUN,
    Line,
    RowFailed,
    append,
    folder_of,
    measure_row,
    read,
    run,
    speed_table,
    tasks_of,
    write_tokens,
)
from lab.plan.memory import Setting, peak_memory
from lab.plan.speed_sources import Measurement
from lab.table import Column, Table
from reporting.speed import flops_per_token

SIZES = (64, 96, 48, 24, 12)  # microbatches of ours
FIRST, NANOGPT = "ours, microbatch 64", "nanoGPT, bf16, compiled"
OPTIONS: dict[str, dict[str, Any]] = {  # tried; no defaults
    "cuDNN attention": {"attention": "cudnn"}, "flash attention": {"attention": "flash"},
    "head in 4 chunks": {"head_chunks": 4},
    "activation checkpointing": {"activation_checkpointing": True}}
ARCHIVE = "on-gpu.tar.gz"
RESERVE_SECONDS = 40  # of a call: to import PyTorch, to end the last row, and for the page
SEARCH_TEST = "tests/test_search.py"  # one test there needs a GPU


class Item(NamedTuple):
    """A row of the results.

    Attributes:
        seconds: that it may take.
        measure: returns its values, or raises; takes a folder for its output, and the seconds.
    """

    name: str
    seconds: int
    measure: Callable[[Path, float], Line]


class Call(NamedTuple):
    """Where and what one of the four calls measures; on a CPU all shapes are tiny."""

    name: str
    out: Path
    on_gpu: bool
    nanogpt: Path | None = None  # a copy of its repository

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def latest(self) -> dict[str, Line]:
        """Return the last line of each row."""
        return {line["row"]: line for line in read(self.results)}

    def task(self, row: str, **changes: Any) -> Task:
        """Return a row of `throughput.py` with changes."""
        (task,) = [task for task in tasks_of("cuda", self.nanogpt) if task.name == row]
        if not self.on_gpu:
            task = replace(task, shape=TINY.model_dump(), device="cpu", num_steps=7)
        return replace(task, **changes)

    def items(self, tokens_path: Path) -> list[Item]:
        """Return what this call measures, worth most first."""
        def speed(task: Task, seconds: int = 180) -> Item:
            return Item(task.name, seconds, partial(measure_row, task, tokens_path))

        def other(name: str, seconds: int) -> Item:
            command = ["-m", "benchmarks.on_gpu_rows", name, "cuda:0" if self.on_gpu else "cpu"]
            return Item(name, seconds, lambda folder, seconds: json.loads(
                run(command, folder, seconds).splitlines()[-1]))

        if self.name == "a":
            sizes = [speed(self.task("ours", name=f"ours, microbatch {size}", microbatch_size=size))
                     for size in SIZES]
            return [*sizes[:3], other("one of eight, AdamW", 150), other("kernels", 120),
                    other("one of eight, Muon", 150), *sizes[3:]]
        if self.name == "b":
            original = self.task(ORIGINAL)  # slow: fewer steps
            return [speed(replace(original, num_steps=min(16, original.num_steps)), 270),
                    speed(self.task(HUGGING_FACE.format("bf16")), 300),
                    speed(self.task(WHOLE_RUN)),
                    *([speed(self.task(NANOGPT), 240)] if self.nanogpt else []),
                    *(speed(self.task("ours", name=f"tried: {name}", changes=changes))
                      for name, changes in OPTIONS.items() if self.on_gpu or "cuDNN" not in name)]
        if self.name == "d":
            return [Item("search", 500, self.search)]
        files = {str(path.relative_to(PROJECT_DIR)) for path in PROJECT_DIR.glob(
            "tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text()} - {SEARCH_TEST}
        return [other("attention", 60), Item("tests", 500, partial(self.tests, sorted(files))),
                Item("tests, search", 480, partial(self.tests, ["--timeout=450", SEARCH_TEST]))]

    def search(self, folder: Path, seconds: float) -> Line:
        """Search for the largest microbatch; what was compiled before is not compiled again."""
        run_dir = folder / "runs/search"
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "model.json").write_text(json.dumps(self.task("ours").shape))
        (run_dir / "train.json").write_text(config(1).model_dump_json(exclude_none=True))
        run(["ddp_train.py", "search", "--runs-dir", str(run_dir.parent), "--nproc-per-node", "1",
             "--find-max-microbatch", "--memory-limit-gib", "40" if self.on_gpu else "0.2",
             "--save"], folder, seconds)
        return json.loads((run_dir / "microbatch-search.json").read_text())

    def tests(self, arguments: list[str], folder: Path, seconds: float) -> Line:
        """Run tests that need a GPU and have not passed yet; each result is a line of its own."""
        done = [f"--deselect={row.removeprefix('test ')}" for row, line in self.latest().items()
                if row.startswith("test ") and line["status"] == "ok"]
        run(["-m", "pytest", "-m", "gpu", "-p", "benchmarks.on_gpu_rows", "-p", "no:xdist", "-p",
             "no:cacheprovider", f"--rootdir={PROJECT_DIR}", *done, *arguments], folder, seconds,
            **{RESULTS: str(self.results)})
        return {}

    def measure(self, ends_at: float, *, retry: bool) -> None:
        """Measure what has no result yet, as far as it fits into the time."""
        final = {"ok"} if retry else {"ok", "failed"}
        with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
            for item in self.items(write_tokens(Path(folder) / "zipf", self.task("ours"))):
                if self.latest().get(item.name, {}).get("status") in final:
                    continue
                if (left := ends_at - time.monotonic()) < item.seconds / 2:
                    click.echo(f"{item.name}: not begun, {left:.0f} s are left")
                    continue
                self.record(item, left)
                self.write()

    def record(self, item: Item, left: float) -> None:
        """Measure a row in the seconds that are left; write a line of what became of it."""
        limit = item.seconds * (1 if self.on_gpu else 4)  # few cores compile slowly
        folder, began = self.out / "logs" / folder_of(item.name), time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        line: Line = {"row": item.name, "status": "ok"}
        try:
            line |= item.measure(folder, min(left, limit))
        except Exception as error:  # of any type: the other rows are still to be measured
            # What the next call may end: tests that passed and compiled sizes are not repeated.
            goes_on = isinstance(error, RowFailed) and "ran out of time" in str(error) and (
                left < limit or item.name.startswith(("tests", "search")))
            line |= {"status": "cut off" if goes_on else "failed", "reason": describe(error)}
        append(self.results, line | {"seconds": time.monotonic() - began})
        click.echo(f"{item.name}: {line['status']} {line.get('reason', '')}")

    def write(self) -> None:
        """Write the page, `measured.json`, and the archive of all files."""
        lines, task = self.latest(), self.task("ours")
        write_atomically(self.out / "on-gpu.md", page(lines, task))
        whole = lines.get(WHOLE_RUN, {})
        if self.on_gpu and whole.get("tokens_per_second"):
            machine = whole["machine"]
            measured = Measurement(
                device=machine["device"], processes=machine["processes"],
                precision=whole["precision"], tokens_per_second=whole["tokens_per_second"],
                model=task.model, source=f"benchmarks/on_gpu.py, {whole['time'][:10]}, PyTorch"
                                         f" {machine['torch']}").model_dump()
            write_atomically(self.out / "measured.json", json.dumps([measured], indent=1) + "\n")
        with replacing(self.out / ARCHIVE) as file, tarfile.open(
                fileobj=file, mode="w:gz") as archive:
            archive.add(self.out, "on-gpu", filter=lambda info: None if (  # without itself
                ARCHIVE in info.name or info.name.endswith("/compiled")) else info)


def page(lines: dict[str, Line], task: Task) -> str:
    """Return all results as Markdown, with what failed and why."""
    ok = {row: line for row, line in lines.items() if line["status"] == "ok"}
    speeds = [line for line in ok.values() if "tokens_per_second" in line]
    speeds.sort(key=lambda line: line["row"] != FIRST)  # the losses are compared with the first's
    tests = {row: line["outcome"] for row, line in lines.items() if "outcome" in line}
    memory = []  # the peaks of our microbatches beside those that `lab plan` says
    for line in (ok[row] for row in (f"ours, microbatch {size}" for size in SIZES) if row in ok):
        size = line["microbatch_size"]
        train = config(size, gradient_accumulation_steps=task.global_batch_size // size)
        planned = peak_memory(Setting(task.model, train, line["precision"], 1), size).total
        memory.append(f"- microbatch {size}: {line['peak_mib'] * 2**20 / planned:.2f} of the"
                      " memory that `lab plan` says")
    parts = [
        [f"# Measurements on a GPU{' (tiny, on a CPU)' * (task.device == 'cpu')}"],
        [str(speeds[0]["machine"])] if speeds else [],
        speed_table(speeds, flops_per_token(task.model), [
            ORIGINAL, HUGGING_FACE.format("bf16"), NANOGPT]),
        memory if task.device == "cuda" else [],
        Table([Column("kernel", "left"), Column("ms"), Column("share")],
              kernel_rows(ok["kernels"])).markdown().splitlines() if "kernels" in ok else [],
        [f"- {row}: {json.dumps(line.get('seconds_by_phase', line))}" for row, line in ok.items()
         if row == WHOLE_RUN or line not in speeds and row not in (*tests, "kernels")],
        [f"Tests: {dict(Counter(tests.values()))}"],
        [f"- {row}: {line['status']}: {line['reason']}" for row, line in lines.items()
         if line["status"] != "ok"]]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


@click.command()
@click.argument("name", metavar="CALL", type=click.Choice(["a", "b", "c", "d"]))
@click.option("--out", type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
              required=True)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=9,
              show_default=True)
@click.option("--nanogpt", type=click.Path(exists=True, resolve_path=True, path_type=Path),
              help="A copy of it.")
@click.option("--retry", is_flag=True, help="Measure again what has failed.")
@click.option("--try-on-cpu", is_flag=True, help="Tiny shapes on a CPU: no figure means anything.")
def main(name: str, out: Path, minutes: float, retry: bool, **options: Any) -> None:
    """Measure speed (a), other systems and options (b), numbers and tests (c), the search (d)."""
    ends_at = time.monotonic() + 60 * minutes - RESERVE_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the row; the page is written
    if options["try_on_cpu"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise click.UsageError("PyTorch finds no GPU here; --try-on-cpu tries all calls")
    call = Call(name, out, not options["try_on_cpu"], options["nanogpt"])
    out.mkdir(parents=True, exist_ok=True)
    try:
        call.measure(ends_at, retry=retry)
    finally:
        call.write()
    click.echo(f"{out / ARCHIVE}")


if __name__ == "__main__":
    main()
