"""Training speed side by side: `uv run python benchmarks/throughput.py`.

Each row is measured in a fresh process, rows in turn, the first one again at the end; all see the
same tokens from the same weights in the same global batches, and must have the same loss curve.
`--peer NAME=PATH` adds a script of anyone's: it is run with the shape as JSON in the environment
variable THROUGHPUT_SHAPE, and prints its speed last, as "12345 tokens/s"; what follows the path is
given to it. `peer_nanogpt.py` is such a script, for a copy of nanoGPT.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.throughput_child import write_order
from benchmarks.throughput_rows import Order, Row
from reporting.speed import find_gpu, flops_per_token
from run_config import ModelConfig

LOSS_TOLERANCE = {"fp32": 2e-3, "tf32": 0.02, "bf16": 0.02, "fp16": 0.02}
REFERENCE = "ours, fp32"  # the curve that all others are held against
HUGGING_FACE = "Hugging Face, SDPA, compiled"
LEAST_FALL = 0.5  # nats, from the first step to the last: a curve that stays level shows nothing
PEER_TIMEOUT, ROW_TIMEOUT = 300, 600  # seconds


@dataclass(frozen=True)
class Bench:
    """A shape, the rows that are compared on it, and how long each is trained."""

    title: str
    model: ModelConfig
    rows: tuple[Row, ...]
    global_batch_size: int
    microbatch_size: int
    num_steps: int
    rounds: int


@dataclass
class Measured:
    """What the rounds of one row gave."""

    row: Row
    results: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        return statistics.median(result[key] for result in self.results)


def cpu_benches(rounds: int) -> list[Bench]:
    """The two shapes of the notes on CPUs: GPT-2's vocabulary, where the head is all, and bytes."""
    rows = (
        Row("ours", "ours"),
        Row("ours, compiled", "ours", {"compile": True}),
        Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row("ours, fp32, compiled", "ours", {"precision": "fp32", "compile": True}),
        Row(HUGGING_FACE, "hugging face", {"precision": "fp32"}),
        Row("the same in bf16", "hugging face", {"precision": "bf16"}),
        Row("the original's way", "original"),
        Row("ours, 1 thread", "ours", num_threads=1),
        Row("ours, 2 processes", "ours", num_processes=2, num_threads=1),
    )
    shape = {"context_length": 256, "emb_dim": 128, "n_heads": 4, "n_layers": 4, "drop_rate": 0.0,
             "qkv_bias": False}
    return [Bench(f"4 layers, 128 wide, context 256, {words:,} words",
                  ModelConfig(vocab_size=words, **shape), rows, global_batch_size=16,
                  microbatch_size=8, num_steps=steps, rounds=rounds)
            for words, steps in ((50257, 10), (257, 40))]


def gpu_benches(rounds: int) -> list[Bench]:
    """GPT-2 small."""
    rows = (
        Row("ours", "ours"),
        Row(REFERENCE, "ours", {"precision": "fp32", "compile": False, "residual_dtype": "fp32"}),
        Row(HUGGING_FACE, "hugging face", {"precision": "bf16"}),
        Row("the original's way", "original"),
    )
    model = ModelConfig(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12,
                        n_layers=12, drop_rate=0.0, qkv_bias=False)
    return [Bench("GPT-2 small, untied", model, rows, global_batch_size=128, microbatch_size=64,
                  num_steps=20, rounds=rounds)]


# One lever after another, from the original's way to ours, and what else was tried.
EAGER = {"compile": False, "residual_dtype": "fp32"}
WITHOUT_BLOCKS = {"attention_in_blocks": False}
CPU_LADDER = (
    Row("the original's way", "original"),
    Row("fused attention, norms and GELU", "plain", {"reads": True}),
    Row("fused AdamW", "plain", {"reads": True, "fused": True}),
    Row("no loss read in each step", "plain", {"fused": True}),
    Row("freed memory kept", "plain", {"fused": True, "keeps": True}),
    Row("gradient norm, skip, buckets", "ours", EAGER | {"precision": "fp32", "head_chunks": 1}),
    Row("bf16", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}, forward=WITHOUT_BLOCKS),
    Row("attention in blocks (on a CPU)", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}),
    Row("head and loss in pieces", "ours", EAGER | {"precision": "bf16"}),
    Row("tried: bf16 residual stream", "ours",
        EAGER | {"precision": "bf16", "residual_dtype": "bf16"}),
    Row("tried: compiled, head whole", "ours",
        {"precision": "bf16", "residual_dtype": "fp32", "compile": True}),
    Row("tried: compiled, bf16 stream", "ours",
        {"precision": "bf16", "residual_dtype": "bf16", "compile": True}),
)
BF16 = {"precision": "bf16"}
GPU_LADDER = (
    Row("the original's way", "original"),
    Row("bf16, fused attention, norms and GELU", "plain", BF16 | {"reads": True}),
    Row("fused AdamW", "plain", BF16 | {"reads": True, "fused": True}),
    Row("no loss read in each step", "plain", BF16 | {"fused": True}),
    Row("gradient norm, skip", "ours", EAGER, forward={"head_multiple": 1}),
    Row("head padded", "ours", EAGER),
    Row("bf16 residual stream", "ours", {"compile": False}),
    Row("compiled: ours", "ours"),
    Row("tried: head in 8 pieces", "ours", {"head_chunks": 8}),
    Row("tried: layers recomputed", "ours", {"activation_checkpointing": True}),
    Row(REFERENCE, "ours", EAGER | {"precision": "fp32"}),
)


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]),
              default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH",
              help="Another script that trains the same shape and prints tokens a second.")
@click.option("--rounds", type=click.IntRange(min=1),
              default=1, show_default=True,
              help="Times that each row is measured, and the first one once more.")
@click.option("--only", multiple=True, metavar="ROW", help="Of our rows, measure just these.")
@click.option("--ladder", is_flag=True, help="One lever at a time instead of systems.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("throughput"),
              show_default=True, help="Where OUTPUT.json and OUTPUT.png are written.")
def main(device: str, peers: tuple[str, ...], rounds: int, only: tuple[str, ...], ladder: bool,
         output: Path) -> None:
    """Measure this trainer, the original's way and Hugging Face's GPT-2 side by side."""
    benches = cpu_benches(rounds) if device == "cpu" else gpu_benches(rounds)
    report, failed = [], False
    for bench in benches:
        if ladder:
            bench = replace(bench, rows=GPU_LADDER if device == "cuda" else CPU_LADDER)
        rows = tuple(row for row in bench.rows if row.name in (only or (row.name,)))
        if len(rows) < len(only):
            raise click.UsageError(f"rows are {'; '.join(row.name for row in bench.rows)}")
        bench = replace(bench, rows=rows)
        measured = run_rounds(bench, device, dict(peer.split("=", 1) for peer in peers))
        wrong = curves_that_differ(measured)
        failed = failed or bool(wrong)
        report.append(report_of(bench, measured, ceiling_of(device)))
        for line in [*table(report[-1]), *wrong]:
            click.echo(line)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, output.with_suffix(".png"))
    sys.exit(1 if failed else 0)


def run_rounds(bench: Bench, device: str, peers: dict[str, str]) -> list[Measured]:
    """Measure every row once a round, in turn; the first one once more in the end."""
    measured = [Measured(row) for row in bench.rows]
    for name, path in peers.items():
        measured.append(Measured(Row(name, "peer", {"path": path})))
    with tempfile.TemporaryDirectory() as compiled:
        for number, one in enumerate([*measured * bench.rounds, measured[0]]):
            began = time.monotonic()
            kept = Path(compiled) / one.row.name.replace(" ", "-")
            result = (run_peer(bench, one.row, kept) if one.row.system == "peer" else
                      run_row(bench, one.row, device, kept))
            one.results.append(result)
            click.echo(f"{number + 1}/{len(measured) * bench.rounds + 1} {one.row.name}:"
                       f" {result['tokens_per_second']:,.0f} tokens/s"
                       f" ({time.monotonic() - began:.0f} s)", err=True)
    return measured


def run_row(bench: Bench, row: Row, device: str, compiled: Path) -> dict[str, Any]:
    """Measure a row in a fresh process; where the device is too small, half the microbatch.

    What it compiles is kept in a directory of its own: its first round is a first start.
    """
    size = bench.microbatch_size // row.num_processes
    while True:
        order = Order(row, bench.model, size, bench.global_batch_size, bench.num_steps, device)
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder) / "order.json", Path(folder) / "result.json"
            write_order(paths[0], order)
            launcher = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={row.num_processes}"] if row.num_processes > 1 else []
            ended = subprocess.run(
                [sys.executable, *launcher, "-m", "benchmarks.throughput_child", *map(str, paths)],
                cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=ROW_TIMEOUT,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(compiled)})
            if ended.returncode == 0:
                return json.loads(paths[1].read_text())
        if "out of memory" not in ended.stderr or size == 1:
            raise click.ClickException(f"{row.name} failed:\n{ended.stderr[-2000:]}")
        size //= 2


def run_peer(bench: Bench, row: Row, compiled: Path) -> dict[str, Any]:
    """Run somebody's script, and read the last speed that it prints."""
    shape = bench.model.model_dump() | {"batch_size": bench.global_batch_size,
                                        "microbatch_size": bench.microbatch_size,
                                        "num_steps": bench.num_steps}
    ended = subprocess.run([sys.executable, *shlex.split(row.changes["path"])],
                           capture_output=True, text=True, timeout=PEER_TIMEOUT,
                           env=os.environ | {"THROUGHPUT_SHAPE": json.dumps(shape),
                                             "TORCHINDUCTOR_CACHE_DIR": str(compiled)})
    found = re.findall(r"([\d,.]+) *tok", ended.stdout)
    if ended.returncode or not found:
        raise click.ClickException(f"{row.name} gave no speed:\n{ended.stderr[-2000:]}")
    speed = float(found[-1].replace(",", ""))
    tokens = bench.global_batch_size * bench.model.context_length
    return {"tokens_per_second": speed, "step_ms": tokens / speed * 1e3}


def curves_that_differ(measured: list[Measured]) -> list[str]:
    """Hold every curve against that of plain float32, or of the first row without one."""
    by_name = {one.row.name: one for one in measured}
    reference = by_name.get(REFERENCE, measured[0]).results[0]["losses"]
    wrong = []
    for one in measured:
        for result in one.results:
            if "losses" in result:
                off = np.abs(np.subtract(result["losses"], reference)).max()
                if not off <= LOSS_TOLERANCE[result["precision"]]:  # nor is NaN
                    wrong.append(f"{one.row.name}: its losses are {off:.4f} off")
    if not reference[0] - reference[-1] >= LEAST_FALL:
        wrong.append(f"the loss went from {reference[0]:.3f} to {reference[-1]:.3f}: too level to"
                     " tell one curve from another")
    return wrong


def ceiling_of(device: str) -> dict[str, float]:
    """Measure the FLOP/s of one large matrix product, by dtype."""
    size, ceiling = (8192 if device == "cuda" else 2048), {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            a @ b
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        ceiling[name] = 2 * size**3 / statistics.median(seconds[2:])
    return ceiling


def report_of(bench: Bench, measured: list[Measured], ceiling: dict[str, float]) -> dict[str, Any]:
    """Gather what the table and the chart show."""
    flops, machine = flops_per_token(bench.model), measured[0].results[0]["machine"]
    gpu = find_gpu(machine["device"])
    rates = {one.row.name: one.median("tokens_per_second") for one in measured}
    first = measured[0].results
    rows = []
    for one in measured:
        last = one.results[0]
        peak = gpu.peak(last["precision"]) if gpu and "precision" in last else None
        rows.append({
            "name": one.row.name,
            "precision": last.get("precision"),
            "microbatch_size": last.get("microbatch_size"),
            "tokens_per_second": rates[one.row.name],
            "all_tokens_per_second": [result["tokens_per_second"] for result in one.results],
            "mfu": rates[one.row.name] * flops / peak if peak else None,
            "step_ms": one.median("step_ms"),
            "compile_seconds": last.get("compile_seconds"),
            "peak_mib": last.get("peak_mib"),
            "losses": last.get("losses"),
        })
    return {
        "title": bench.title, "machine": machine, "date": time.strftime("%Y-%m-%d"), "rows": rows,
        "flops_per_token": flops, "ceiling_flops": ceiling,
        "first_row_repeated": first[-1]["tokens_per_second"] / first[0]["tokens_per_second"],
    }


def table(report: dict[str, Any]) -> list[str]:
    """Word one shape's results as a Markdown table."""
    rates = {row["name"]: row["tokens_per_second"] for row in report["rows"]}
    bases = {"the original's": rates.get("the original's way"),
             "Hugging Face": rates.get(HUGGING_FACE)}
    bases = {name: rate for name, rate in bases.items() if rate}
    machine = report["machine"]
    lines = ["", f"{report['title']} on {machine['device']}, PyTorch {machine['torch']}",
             "| | precision | tokens/s | MFU | ms a step | compiling, s | peak MiB |"
             + "".join(f" / {name} |" for name in bases),
             "|---|---|---|---|---|---|---|" + "---|" * len(bases)]
    for row in report["rows"]:
        cells = [row["name"], row["precision"] or "-", f"{row['tokens_per_second']:,.0f}",
                 f"{row['mfu']:.1%}" if row["mfu"] else "-", f"{row['step_ms']:,.1f}",
                 f"{row['compile_seconds']:.0f}" if row["compile_seconds"] else "-",
                 f"{row['peak_mib']:,.0f}" if row["peak_mib"] else "-"]
        cells += [f"{row['tokens_per_second'] / rate:.2f}" for rate in bases.values()]
        lines.append(f"| {' | '.join(cells)} |")
    ceilings = ", ".join(
        f"{name} {rate / 1e12:,.3g} TFLOP/s = {rate / report['flops_per_token']:,.0f} tokens/s"
        for name, rate in report["ceiling_flops"].items())
    return [*lines, f"one large matrix product: {ceilings}; the first row again in the end:"
                    f" {report['first_row_repeated']:.2f} of its first measurement"]


def draw(report: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar for every row, a panel for every shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + sum(0.34 * len(part["rows"]) + 0.7 for part in report)),
                    layout="constrained")
    panels = figure.subplots(len(report), squeeze=False,
                             height_ratios=[len(part["rows"]) for part in report])[:, 0]
    for panel, part in zip(panels, report, strict=True):
        names = [row["name"] for row in part["rows"]]
        rates = [row["tokens_per_second"] for row in part["rows"]]
        bars = panel.barh(names, rates, color=["#1f77b4" if name.startswith("ours") else "#999999"
                                               for name in names])
        panel.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{part['title']}; {part['machine']['device']}", fontsize=10, loc="left")
        panel.set_xlabel("tokens a second, in training")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
