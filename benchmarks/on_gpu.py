"""Everything that needs a GPU, in four calls of at most nine minutes, worth most first.

`python -m benchmarks.on_gpu a --out DIR` in the project's directory, then b, c and d; README.md
says what has to be there. Each result is a line of DIR/results.jsonl at once, and the same call
goes on where it was cut off. DIR/on-gpu.tar.gz holds all results, with a page, on-gpu.md, and
the speed that `lab plan` reads, measured.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

try:
    import click
    import torch

    from basics.cli import ABOVE_0
    from basics.errors import describe
    from basics.files import replacing, write_atomically
    from benchmarks import throughput_records as records
    from benchmarks.kernel_profile import pipe, table
    from benchmarks.on_gpu_rows import RESULTS, TINY
    from benchmarks.throughput_benches import GPU_LADDER, WHOLE_RUN, Bench, gpu_benches
    from benchmarks.throughput_launch import PROJECT_DIR, Place, measure_row
    from benchmarks.throughput_report import HUGGING_FACE, ORIGINAL
    from benchmarks.throughput_rows import Row
    from benchmarks.throughput_tokens import write_token_files
    from lab.plan.memory import peak_memory
    from lab.plan.setting import Setting
    from lab.plan.speed_sources import Measurement
    from reporting.clock import COMPILE, STARTUP
    from reporting.speed import find_gpu, flops_per_token
    from run_config import TrainConfig
except ImportError as missing:
    print(f"Error: {missing}; benchmarks/README.md lists the packages to bring", file=sys.stderr)
    raise SystemExit(2) from None

OURS, NANOGPT, KERNELS = "ours, microbatch {}", "nanoGPT, compiled", "kernels"  # rows
RESUMED, STALL, FIRST = "resumed, flash, deterministic", "checkpoint", OURS.format(64)
OPTIONS = ["tried: cuDNN attention", "tried: flash attention", "tried: head in 4 chunks",
           "tried: activation checkpointing"]  # the first one needs a GPU
ARCHIVE, CUT_OFF = "on-gpu.tar.gz", "cut off"  # the latter: the next call measures it again
RESERVE_SECONDS = 40  # of a call: to import PyTorch, to end the last row, and for the page
SEARCH_TEST = "tests/trainer/test_microbatch_search.py"  # has one test that needs a GPU
NOT_FIGURES = {"row", "status", "seconds", "versions", "code", "time", "outcome"}
Values = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A row of the results: `measure` returns its values, or raises."""

    name: str
    seconds: int  # that it may take
    measure: Callable[[Place], Values]


@dataclass(frozen=True)
class Call:
    """Where and what one of the four calls measures."""

    name: str
    out: Path
    device: str  # as PyTorch names it; on a CPU all shapes are tiny
    nanogpt: Path | None = None  # a copy of it

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def bench(self) -> Bench:
        (bench,) = gpu_benches(1)
        return bench if self.on_gpu else replace(bench, model=TINY, num_steps=7)

    def logs(self, name: str) -> Path:
        folder = self.out / "logs" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def latest(self) -> dict[str, Values]:
        """Return the last line of each row."""
        return {line["row"]: line for line in records.read(self.out / "results.jsonl")}

    def items(self) -> list[Item]:
        """Return what this call measures, worth most first."""
        if self.name == "a":
            sizes = [self.speed(Row(OURS.format(size), "ours", microbatch_size=size))
                     for size in (64, 96, 48, 24, 12)]
            others = [("one of eight, AdamW", "adamw", 150), (KERNELS, "kernels", 120),
                      ("one of eight, Muon", "muon", 150)]
            return [*sizes[:3], *(self.child(*other) for other in others), *sizes[3:]]
        if self.name == "b":
            path = f"{PROJECT_DIR}/benchmarks/peer_nanogpt.py {self.nanogpt} --precision bf16"
            return [
                # The original is slow and keeps all attention weights: fewer steps, smaller size.
                self.speed(Row(ORIGINAL, "original"), 270, microbatch_size=16,
                           num_steps=min(16, self.bench.num_steps)),
                self.speed(Row(HUGGING_FACE, "hugging face", {"precision": "bf16"}), 300),
                self.speed(WHOLE_RUN),
                *([self.speed(Row(NANOGPT, "peer", {"path": path}), 240)] if self.nanogpt else []),
                *(self.speed(row) for row in GPU_LADDER
                  if row.name in (OPTIONS if self.on_gpu else OPTIONS[1:]))]
        if self.name == "d":
            return [self.child("search", "search", 500)]
        files = {str(path.relative_to(PROJECT_DIR)) for path in PROJECT_DIR.glob(
            "tests/*/**/test_*.py") if "pytest.mark.gpu" in path.read_text()}
        numbers = [(RESUMED, "resumed", 180), ("attention", "attention", 60),
                   (STALL, "stall", 120), ("fp32 and a CPU", "precisions", 120),
                   ("resumed, flash", "resumed-default", 150)]
        return [*(self.child(*row) for row in numbers),
                Item("tests, one half", 500, partial(self.tests, ["tests/test_gpu.py"])),
                Item("tests, other half", 500, partial(self.tests, sorted(files - {SEARCH_TEST}))),
                Item("tests, search", 480, partial(self.tests, ["--timeout=450", SEARCH_TEST]))]

    def speed(self, row: Row, seconds: int = 180, **changes: int) -> Item:
        return Item(row.name, seconds, partial(measure_row, replace(self.bench, **changes), row))

    def child(self, name: str, key: str, seconds: int) -> Item:
        """Return a row that `on_gpu_rows.py` measures."""
        command = [sys.executable, "-m", "benchmarks.on_gpu_rows", key, self.device,
                   str(self.out / "results.jsonl")]
        return Item(name, seconds, lambda place: json.loads(
            place.run(command, self.logs(key)).splitlines()[-1]))

    def tests(self, arguments: list[str], place: Place) -> Values:
        """Run tests that need a GPU and have not passed yet; each result is a line of its own."""
        done = [f"--deselect={row.removeprefix('test ')}" for row, line in self.latest().items()
                if row.startswith("test ") and line["status"] == records.OK]
        place.run([sys.executable, "-m", "pytest", "-m", "gpu", "-p", "benchmarks.on_gpu_rows",
                   "-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={PROJECT_DIR}", *done,
                   *arguments], self.logs("tests"), **{RESULTS: str(self.out / "results.jsonl")})
        return {}

    def measure(self, ends_at: float, *, retry: bool) -> None:
        """Measure what has no result yet, as far as it fits into the time."""
        known, final = self.latest(), {records.OK} if retry else {records.OK, records.FAILED}
        with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
            tokens = write_token_files(
                Path(folder) / "zipf", self.bench.model, self.bench.num_tokens)
            for number, item in enumerate(self.items()):
                if known.get(item.name, {}).get("status") in final:
                    continue
                limit = item.seconds * (1 if self.on_gpu else 4)  # few cores compile slowly
                if (left := ends_at - time.monotonic()) < item.seconds / 2:
                    click.echo(f"{item.name}: not begun, {left:.0f} s are left")
                    continue
                self.record(item, Place("cuda" if self.on_gpu else "cpu", tokens,
                                        Path(folder) / f"compiled-{number}",
                                        time.monotonic() + min(left, limit)), left < limit)
                self.write()

    def record(self, item: Item, place: Place, is_short: bool) -> None:
        """Measure a row; write a line of what became of it, whatever that is."""
        began, num_before = time.monotonic(), len(self.latest())
        line: Values = {"row": item.name, "status": records.OK, "reason": None}
        try:
            line |= item.measure(place)
        except Exception as error:  # of any type: the other rows are still to be measured
            made_progress = len(self.latest()) > num_before  # tests and trials have lines
            goes_on = time.monotonic() >= place.deadline and (is_short or made_progress)
            line |= {"status": CUT_OFF if goes_on else records.FAILED, "reason": describe(error)}
        line["seconds"] = time.monotonic() - began
        records.append(self.out / "results.jsonl", line)
        click.echo(f"{item.name}: {line['status']} {line['seconds']:.0f} s {line['reason'] or ''}")

    def write(self) -> None:
        """Write the page, `measured.json`, and the archive of all files."""
        lines = self.latest()
        write_atomically(self.out / "on-gpu.md", page(lines, self.bench))
        whole = lines.get(WHOLE_RUN.name, {})
        if self.on_gpu and whole.get("tokens_per_second"):
            measured = [measurement(whole, self.bench)]
            write_atomically(self.out / "measured.json", json.dumps(measured, indent=1) + "\n")
        with replacing(self.out / ARCHIVE) as file, tarfile.open(
                fileobj=file, mode="w:gz") as archive:
            archive.add(self.out, "on-gpu",  # without itself and its temporary file
                        filter=lambda info: None if ARCHIVE in info.name else info)


def measurement(whole: Values, bench: Bench) -> Values:
    """Return the speed of a whole run for `lab plan`."""
    machine = whole["machine"]
    return Measurement(
        device=machine["device"], processes=machine["processes"], precision=whole["precision"],
        tokens_per_second=whole["tokens_per_second"], model=bench.model,
        source=f"benchmarks/on_gpu.py, {whole['time'][:10]}, PyTorch {machine['torch']}",
    ).model_dump()


def page(lines: dict[str, Values], bench: Bench) -> str:
    """Return all results as Markdown; what is missing is shown as such."""
    ok = {row: line for row, line in lines.items() if line["status"] == records.OK}
    speeds = [line for line in ok.values() if line["tokens_per_second"]]
    machine = next((line["machine"] for line in speeds if line["machine"]), {})
    parts = [
        [f"# Measurements on a GPU{' (tiny, on a CPU)' * (bench.model == TINY)}"],
        [", ".join(f"{key}: {machine.get(key)}" for key in ("device", "torch", "python"))],
        pipe(proof(ok, bench), ["on one card", "measured", "goal"]),
        pipe([speed_cells(line, ok, bench) for line in speeds],
             ["", "microbatch", "precision", "peak MiB", "compiling, s", "CPU ms a step",
              "tokens/s", "MFU", "/ original", "losses off"]),
        table(ok[KERNELS]) if KERNELS in ok else [],
        [f"- {row}: {json.dumps(figures)}" for row, line in ok.items() if line not in speeds and (
            figures := {key: value for key, value in line.items()
                        if key not in NOT_FIGURES and value not in (None, [])})],
        [f"Tests: {dict(Counter(one['outcome'] for one in lines.values() if 'outcome' in one))}"],
        [f"- {row}: {line['status']}: {line['reason']}" for row, line in lines.items()
         if line["status"] != records.OK]]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def proof(ok: dict[str, Values], bench: Bench) -> list[list[str]]:
    """Return what was measured on one card, beside what the project promises."""
    best = max((line for row, line in ok.items() if row.startswith(OURS.format(""))),
               key=lambda line: line["tokens_per_second"], default={})
    phases = ok.get(WHOLE_RUN.name, {}).get("seconds_by_phase")
    size, planned = best.get("microbatch_size"), None
    if best:
        train = TrainConfig(dataset="none", checkpoint_interval=1, microbatch_size=size,
                            gradient_accumulation_steps=bench.global_batch_size // size)
        setting = Setting(bench.model, train, best["precision"], 1, bench.model != TINY)
        planned = peak_memory(setting, size).total / 2**20
    return [
        [f"tokens/s, microbatch {size}", shown(best.get("tokens_per_second"), ",.0f"), "the best"],
        ["MFU", mfu(best, bench), "0.4 or more"],
        *([f"ours / {row}", ratio(best, ok.get(row)), goal] for row, goal in (
            (ORIGINAL, "7 or more"), (HUGGING_FACE, "more than 1"), (NANOGPT, "more than 1"))),
        ["peak memory / `lab plan`'s", shown(planned and best["peak_mib"] / planned, ".2f"), "1"],
        ["seconds to the first step", shown(phases and phases[STARTUP] + phases[COMPILE], ".1f")],
        ["bit-identical after resuming (flash attention, deterministic algorithms)",
         shown(ok.get(RESUMED, {}).get("is_equal"), ""), "True"],
        ["seconds that a checkpoint stops training",
         shown(ok.get(STALL, {}).get("later_stall_seconds"), ".3f")]]


def speed_cells(line: Values, ok: dict[str, Values], bench: Bench) -> list[str]:
    off = [abs(a - b) for a, b in zip(line["losses"], ok.get(FIRST, line)["losses"], strict=False)]
    cells = [shown(line.get(key), form) for key, form in {
        "microbatch_size": "", "precision": "", "peak_mib": ",.0f", "compile_seconds": ".0f",
        "cpu_ms": ".1f", "tokens_per_second": ",.0f"}.items()]
    return [line["row"], *cells, mfu(line, bench), ratio(line, ok.get(ORIGINAL)),
            shown(max(off, default=None), ".4f")]


def shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def ratio(line: Values, other: Values | None) -> str:
    return "-" if not (line and other) else shown(
        line["tokens_per_second"] / other["tokens_per_second"], ".2f")


def mfu(line: Values, bench: Bench) -> str:
    gpu = find_gpu(line["machine"]["device"]) if line.get("machine") else None
    flops = line.get("tokens_per_second", 0) * flops_per_token(bench.model)
    return f"{flops / gpu.peak(line['precision']):.3f}" if gpu else "-"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="CALL", type=click.Choice(["a", "b", "c", "d"]))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--minutes", type=ABOVE_0, default=9, show_default=True)
@click.option("--nanogpt", type=click.Path(exists=True, path_type=Path), help="A copy of it.")
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
    call = Call(name, out.absolute(), "cpu" if options["try_on_cpu"] else "cuda:0",
                options["nanogpt"])
    call.out.mkdir(parents=True, exist_ok=True)
    try:
        call.measure(ends_at, retry=retry)
    finally:
        call.write()
    click.echo(f"{call.out / ARCHIVE}")


if __name__ == "__main__":
    main()
