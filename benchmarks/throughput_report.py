"""Results of `throughput.py`: the check of the loss curves, the table and the chart."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.throughput_rows import Row
from reporting.speed import find_gpu, flops_per_token
from run_config import ModelConfig

ORIGINAL, HUGGING_FACE = "original", "Hugging Face, SDPA, compiled"  # rows to compare with
REFERENCE = "ours, fp32"  # the row whose loss curve all others are compared with
LOSS_TOLERANCE = {"fp32": 2e-3, "tf32": 0.02, "bf16": 0.02, "fp16": 0.02}
MIN_FALL = 0.5  # nats, from the first step to the last: a level curve proves nothing


@dataclass(frozen=True)
class Bench:
    """A shape, the rows to compare on it, and how long to train each."""

    title: str
    model: ModelConfig
    rows: tuple[Row, ...]
    global_batch_size: int
    microbatch_size: int
    num_steps: int
    rounds: int


@dataclass
class Measured:
    """The results of one row, one per round."""

    row: Row
    results: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        return statistics.median(result[key] for result in self.results)


def curves_that_differ(measured: list[Measured]) -> list[str]:
    """Compare every loss curve with the reference's; return a line per difference."""
    by_name = {one.row.name: one for one in measured}
    reference = by_name.get(REFERENCE, measured[0]).results[0]["losses"]
    differences = []
    for one in measured:
        for result in one.results:
            if "losses" in result:
                off = np.abs(np.subtract(result["losses"], reference)).max()
                if not off <= LOSS_TOLERANCE[result["precision"]]:  # true for NaN too
                    differences.append(f"{one.row.name}: its losses differ by {off:.4f}")
    if not reference[0] - reference[-1] >= MIN_FALL:
        differences.append(f"the loss went from {reference[0]:.3f} to {reference[-1]:.3f}: too"
                           " level to compare curves")
    return differences


def report_of(bench: Bench, measured: list[Measured], ceiling: dict[str, float]) -> dict[str, Any]:
    """Collect what the table and the chart show; JSON-serialisable."""
    flops, machine = flops_per_token(bench.model), measured[0].results[0]["machine"]
    gpu = find_gpu(machine["device"])
    rates = {one.row.name: one.median("tokens_per_second") for one in measured}
    first = measured[0].results
    rows = []
    for one in measured:
        result = one.results[0]
        peak = gpu.peak(result["precision"]) if gpu and "precision" in result else None
        rows.append({
            "name": one.row.name,
            "precision": result.get("precision"),
            "microbatch_size": result.get("microbatch_size"),
            "tokens_per_second": rates[one.row.name],
            "all_tokens_per_second": [each["tokens_per_second"] for each in one.results],
            "mfu": rates[one.row.name] * flops / peak if peak else None,
            "step_ms": one.median("step_ms"),
            "compile_seconds": result.get("compile_seconds"),
            "peak_mib": result.get("peak_mib"),
            "losses": result.get("losses"),
        })
    return {
        "title": bench.title, "machine": machine, "date": time.strftime("%Y-%m-%d"), "rows": rows,
        "flops_per_token": flops, "ceiling_flops": ceiling,
        "first_row_repeated": first[-1]["tokens_per_second"] / first[0]["tokens_per_second"],
    }


def table(report: dict[str, Any]) -> list[str]:
    """Format one shape's results as a Markdown table."""
    rates = {row["name"]: row["tokens_per_second"] for row in report["rows"]}
    bases = {"original": rates.get(ORIGINAL), "HF": rates.get(HUGGING_FACE)}
    bases = {name: rate for name, rate in bases.items() if rate}
    rows = [[
        row["name"], row["precision"] or "-", f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}" if row["mfu"] else "-", f"{row['step_ms']:,.1f}",
        f"{row['compile_seconds']:.0f}" if row["compile_seconds"] else "-",
        f"{row['peak_mib']:,.0f}" if row["peak_mib"] else "-",
        *(f"{row['tokens_per_second'] / rate:.2f}" for rate in bases.values()),
    ] for row in report["rows"]]
    head = ["", "precision", "tokens/s", "MFU", "ms a step", "compiling, s", "peak MiB",
            *(f"/ {name}" for name in bases)]
    ceilings = ", ".join(
        f"{name} {rate / 1e12:,.3g} TFLOP/s = {rate / report['flops_per_token']:,.0f} tokens/s"
        for name, rate in report["ceiling_flops"].items())
    machine = report["machine"]
    return ["", f"{report['title']} on {machine['device']}, PyTorch {machine['torch']}",
            *tabulate(rows, head, tablefmt="pipe", disable_numparse=True).splitlines(),
            f"one large matrix product: {ceilings}; the first row measured again at the end:"
            f" {report['first_row_repeated']:.2f} of its first measurement"]


def draw(report: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar per row, a panel per shape."""
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
        panel.set_xlabel("tokens per second, in training")
    figure.savefig(path, dpi=120)
