"""Training speed of this and other systems.

Run it with `uv run --group test python benchmarks/throughput.py`.

Each row is measured in a fresh process; rows take turns, and the first one is measured again at the
end. All rows see the same tokens from the same weights in the same global batches, and must have
the same loss curve. `--peer NAME=PATH` adds another script: it finds the shape as JSON in the
environment variable THROUGHPUT_SHAPE, and prints its speed last, as "12345 tokens/s"; arguments
may follow the path. `peer_nanogpt.py` is such a script, for a copy of nanoGPT.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.throughput_child import write_task
from benchmarks.throughput_report import (
    HUGGING_FACE,
    ORIGINAL,
    REFERENCE,
    Bench,
    Measured,
    curves_that_differ,
    draw,
    report_of,
    table,
)
from benchmarks.throughput_rows import Row, RowTask
from run_config import ModelConfig

PEER_TIMEOUT, ROW_TIMEOUT = 300, 600  # seconds


def cpu_benches(rounds: int) -> list[Bench]:
    """Return the CPU shapes: GPT-2's vocabulary, where the head dominates, and bytes."""
    rows = (
        Row("ours", "ours"),
        Row("ours, compiled", "ours", {"compile": True}),
        Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row("ours, fp32, compiled", "ours", {"precision": "fp32", "compile": True}),
        Row(HUGGING_FACE, "hugging face", {"precision": "fp32"}),
        Row("Hugging Face in bf16", "hugging face", {"precision": "bf16"}),
        Row(ORIGINAL, "original"),
        Row("ours, 1 thread", "ours", num_threads=1),
        Row("ours, 2 processes", "ours", num_processes=2, num_threads=1),
    )
    shape = {"context_length": 256, "emb_dim": 128, "n_heads": 4, "n_layers": 4, "drop_rate": 0.0,
             "qkv_bias": False}
    return [Bench(f"4 layers, 128 wide, context 256, vocabulary {size:,}",
                  ModelConfig(vocab_size=size, **shape), rows, global_batch_size=16,
                  microbatch_size=8, num_steps=steps, rounds=rounds)
            for size, steps in ((50257, 10), (257, 40))]


def gpu_benches(rounds: int) -> list[Bench]:
    """Return the GPU shape: GPT-2 small."""
    rows = (
        Row("ours", "ours"),
        Row(REFERENCE, "ours", {"precision": "fp32", "compile": False, "residual_dtype": "fp32"}),
        Row(HUGGING_FACE, "hugging face", {"precision": "bf16"}),
        Row(ORIGINAL, "original"),
    )
    model = ModelConfig(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12,
                        n_layers=12, drop_rate=0.0, qkv_bias=False)
    return [Bench("GPT-2 small, untied", model, rows, global_batch_size=128, microbatch_size=64,
                  num_steps=20, rounds=rounds)]


# One change at a time, from the original to this trainer, and changes that are not defaults.
EAGER = {"compile": False, "residual_dtype": "fp32"}
WITHOUT_BLOCKS = {"attention_in_blocks": False}
CPU_LADDER = (
    Row(ORIGINAL, "original"),
    Row("fused attention, norms and GELU", "plain", {"reads_loss": True}),
    Row("fused AdamW", "plain", {"reads_loss": True, "fused": True}),
    Row("loss not read in every step", "plain", {"fused": True}),
    Row("freed memory kept", "plain", {"fused": True, "keeps_memory": True}),
    Row("gradient norm, skipping, buckets", "ours",
        EAGER | {"precision": "fp32", "head_chunks": 1}),
    Row("bf16", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}, forward=WITHOUT_BLOCKS),
    Row("attention in blocks (CPU only)", "ours", EAGER | {"precision": "bf16", "head_chunks": 1}),
    Row("head and loss in chunks", "ours", EAGER | {"precision": "bf16"}),
    Row("tried: bf16 residual stream", "ours",
        EAGER | {"precision": "bf16", "residual_dtype": "bf16"}),
    Row("tried: compiled, head in one chunk", "ours",
        {"precision": "bf16", "residual_dtype": "fp32", "compile": True}),
    Row("tried: compiled, bf16 residual stream", "ours",
        {"precision": "bf16", "residual_dtype": "bf16", "compile": True}),
)
BF16 = {"precision": "bf16"}
GPU_LADDER = (
    Row(ORIGINAL, "original"),
    Row("bf16, fused attention, norms and GELU", "plain", BF16 | {"reads_loss": True}),
    Row("fused AdamW", "plain", BF16 | {"reads_loss": True, "fused": True}),
    Row("loss not read in every step", "plain", BF16 | {"fused": True}),
    Row("gradient norm, skipping", "ours", EAGER, forward={"head_multiple": 1}),
    Row("head padded", "ours", EAGER),
    Row("bf16 residual stream", "ours", {"compile": False}),
    Row("compiled: ours", "ours"),
    Row("tried: head in 8 chunks", "ours", {"head_chunks": 8}),
    Row("tried: activation checkpointing", "ours", {"activation_checkpointing": True}),
    Row(REFERENCE, "ours", EAGER | {"precision": "fp32"}),
)


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]),
              default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH",
              help="Another script that trains the same shape and prints its tokens/s.")
@click.option("--rounds", type=click.IntRange(min=1),
              default=1, show_default=True,
              help="Measurements of each row; the first row has one more.")
@click.option("--only", multiple=True, metavar="ROW", help="Measure only these rows.")
@click.option("--ladder", is_flag=True, help="Compare one change at a time instead of systems.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("throughput"),
              show_default=True, help="Where OUTPUT.json and OUTPUT.png are written.")
def main(device: str, peers: tuple[str, ...], rounds: int, only: tuple[str, ...], ladder: bool,
         output: Path) -> None:
    """Measure this trainer, the original and Hugging Face's GPT-2."""
    benches = cpu_benches(rounds) if device == "cpu" else gpu_benches(rounds)
    report, failed = [], False
    for bench in benches:
        if ladder:
            bench = replace(bench, rows=GPU_LADDER if device == "cuda" else CPU_LADDER)
        rows = tuple(row for row in bench.rows if row.name in (only or (row.name,)))
        if len(rows) < len(only):
            names = "; ".join(row.name for row in bench.rows)
            raise click.UsageError(f"unknown row in --only; rows: {names}")
        bench = replace(bench, rows=rows)
        measured = run_rounds(bench, device, dict(peer.split("=", 1) for peer in peers))
        differences = curves_that_differ(measured)
        failed = failed or bool(differences)
        report.append(report_of(bench, measured, ceiling_of(device)))
        for line in [*table(report[-1]), *differences]:
            click.echo(line)
    output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    draw(report, output.with_suffix(".png"))
    sys.exit(1 if failed else 0)


def run_rounds(bench: Bench, device: str, peers: dict[str, str]) -> list[Measured]:
    """Measure every row once per round, in turn, and the first one again at the end."""
    measured = [Measured(row) for row in bench.rows]
    for name, path in peers.items():
        measured.append(Measured(Row(name, "peer", {"path": path})))
    with tempfile.TemporaryDirectory() as caches:
        for number, one in enumerate([*measured * bench.rounds, measured[0]]):
            started = time.monotonic()
            cache_dir = Path(caches) / one.row.name.replace(" ", "-")
            result = (run_peer(bench, one.row, cache_dir) if one.row.system == "peer" else
                      run_row(bench, one.row, device, cache_dir))
            one.results.append(result)
            click.echo(f"{number + 1}/{len(measured) * bench.rounds + 1} {one.row.name}:"
                       f" {result['tokens_per_second']:,.0f} tokens/s"
                       f" ({time.monotonic() - started:.0f} s)", err=True)
    return measured


def run_row(bench: Bench, row: Row, device: str, cache_dir: Path) -> dict[str, Any]:
    """Measure a row in a fresh process; halve the microbatch while it runs out of memory.

    Each row has its own directory for compiled code, so that its first round compiles.
    """
    size = bench.microbatch_size // row.num_processes
    while True:
        task = RowTask(row, bench.model, size, bench.global_batch_size, bench.num_steps, device)
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder) / "task.json", Path(folder) / "result.json"
            write_task(paths[0], task)
            launcher = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={row.num_processes}"] if row.num_processes > 1 else []
            finished = subprocess.run(
                [sys.executable, *launcher, "-m", "benchmarks.throughput_child", *map(str, paths)],
                cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=ROW_TIMEOUT,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache_dir)})
            if finished.returncode == 0:
                return json.loads(paths[1].read_text())
        if "out of memory" not in finished.stderr or size == 1:
            raise click.ClickException(f"{row.name} failed:\n{finished.stderr[-2000:]}")
        size //= 2


def run_peer(bench: Bench, row: Row, cache_dir: Path) -> dict[str, Any]:
    """Run another script, and read the last speed that it prints."""
    shape = bench.model.model_dump() | {"batch_size": bench.global_batch_size,
                                        "microbatch_size": bench.microbatch_size,
                                        "num_steps": bench.num_steps}
    finished = subprocess.run([sys.executable, *shlex.split(row.changes["path"])],
                              capture_output=True, text=True, timeout=PEER_TIMEOUT,
                              env=os.environ | {"THROUGHPUT_SHAPE": json.dumps(shape),
                                                "TORCHINDUCTOR_CACHE_DIR": str(cache_dir)})
    found = re.findall(r"([\d,.]+) *tok", finished.stdout)
    if finished.returncode or not found:
        raise click.ClickException(f"{row.name} printed no speed:\n{finished.stderr[-2000:]}")
    speed = float(found[-1].replace(",", ""))
    tokens = bench.global_batch_size * bench.model.context_length
    return {"tokens_per_second": speed, "step_ms": tokens / speed * 1e3}


def ceiling_of(device: str) -> dict[str, float]:
    """Measure the FLOP/s of one large matrix product, by dtype."""
    size, ceiling = (8192 if device == "cuda" else 2048), {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = []
        for _ in range(8):
            started = time.perf_counter()
            a @ b
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        ceiling[name] = 2 * size**3 / statistics.median(seconds[2:])
    return ceiling


if __name__ == "__main__":
    main()
