"""Results of `throughput.py`: the check of the loss curves, the table and the chart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.throughput_records import FAILED, OK, Line, device_of, latest
from reporting.speed import find_gpu

ORIGINAL, HUGGING_FACE = "original", "Hugging Face, SDPA, compiled"  # rows to compare with
REFERENCE = "ours, fp32"  # the row whose loss curve all others are compared with
LOSS_TOLERANCE = {"fp32": 2e-3, "tf32": 0.02, "bf16": 0.02, "fp16": 0.02}
CEILING = "one large matrix product"  # measured at the beginning of each call; no system
MIN_FALL = 0.5  # nats, from the first step to the last ones: a level curve proves nothing

Rows = dict[str, list[Line]]  # by row, its last measurement of each round


def reports_of(lines: list[Line]) -> list[dict[str, Any]]:
    """Return what is known of each shape on each machine; JSON-serialisable.

    It may be unfinished: rows without a measurement are left out.
    """
    by_bench: dict[tuple[str, str], Rows] = {}
    for (bench, device, row, _), line in latest(lines).items():
        by_bench.setdefault((bench, device), {}).setdefault(row, []).append(line)
    reports = []
    for rows in by_bench.values():
        ceiling = rows.pop(CEILING, [])
        if rows:
            reports.append(report_of(rows, ceiling))
    return reports


def report_of(rows: Rows, ceiling: list[Line]) -> dict[str, Any]:
    """Collect what the table and the chart show of one shape on one machine.

    Args:
        ceiling: measurements of one large matrix product, with `ceiling_flops`.
    """
    lines = [line for measured in rows.values() for line in measured]
    ok = [line for line in lines if line["status"] == OK]
    any_line = (ok or lines)[0]
    first = [line["tokens_per_second"] for line in next(iter(rows.values()))
             if line["status"] == OK]
    return {
        "title": any_line["bench"], "device": device_of(any_line),
        "machine": any_line["machine"], "versions": any_line["versions"],
        "date": lines[-1]["time"][:10], "flops_per_token": any_line["flops_per_token"],
        "rows": [_row_of(name, measured) for name, measured in rows.items()],
        "ceiling_flops": next((line["ceiling_flops"] for line in reversed(ceiling)
                               if line["status"] == OK), {}),
        "first_row_repeated": first[-1] / first[0] if len(first) > 1 else None,
        "differences": curves_that_differ(rows),
    }


def _row_of(name: str, measured: list[Line]) -> dict[str, Any]:
    """Summarise one row: the median of its rounds, or why there is no speed."""
    ok = [line for line in measured if line["status"] == OK]
    failures = [line["reason"] for line in measured if line["status"] == FAILED]
    best = (ok or measured)[0]
    rate = statistics.median(line["tokens_per_second"] for line in ok) if ok else None
    gpu = find_gpu(device_of(best))
    has_peak = gpu and rate and best["precision"] and not best["note"]
    return {
        "name": name, "tokens_per_second": rate, "reason": failures[-1] if failures else None,
        "all_tokens_per_second": [line["tokens_per_second"] for line in ok],
        "all_blocks": [line["blocks"] for line in ok],
        "mfu": rate * best["flops_per_token"] / gpu.peak(best["precision"]) if has_peak else None,
        "step_ms": statistics.median(line["step_ms"] for line in ok) if ok else None,
        **{key: best[key] for key in ("precision", "microbatch_size", "compile_seconds",
                                      "peak_mib", "losses", "note")},
    }


def curves_that_differ(rows: Rows) -> list[str]:
    """Compare every loss curve with the reference's; return a line per difference."""
    curves = [(name, line) for name, measured in rows.items() for line in measured
              if line["status"] == OK and line["losses"]]
    if not curves:
        return []
    reference = next((line for name, line in curves if name == REFERENCE), curves[0][1])["losses"]
    differences = []
    for name, line in curves:
        if len(line["losses"]) != len(reference):
            differences.append(f"{name}: took {len(line['losses'])} steps, not {len(reference)}")
            continue
        off = np.abs(np.subtract(line["losses"], reference)).max()
        if not off <= LOSS_TOLERANCE[line["precision"]]:  # true for NaN too
            differences.append(f"{name}: its losses differ by {off:.4f}")
    end = statistics.mean(reference[-max(1, len(reference) // 8):])
    if not reference[0] - end >= MIN_FALL:
        differences.append(f"the loss went from {reference[0]:.3f} to {end:.3f}: too level to"
                           " compare curves")
    return differences


def table(report: dict[str, Any]) -> list[str]:
    """Format one shape's results as a Markdown table."""
    rates = {row["name"]: row["tokens_per_second"] for row in report["rows"]}
    bases = {"original": rates.get(ORIGINAL), "HF": rates.get(HUGGING_FACE)}
    bases = {name: rate for name, rate in bases.items() if rate}
    rows = [_cells(row, list(bases.values())) for row in report["rows"]]
    head = ["", "precision", "microbatch", "tokens/s", "MFU", "ms a step", "compiling, s",
            "peak MiB", *(f"/ {name}" for name in bases)]
    ceilings = [f"one large matrix product, {name}: {rate / 1e12:,.3g} TFLOP/s ="
                f" {rate / report['flops_per_token']:,.0f} tokens/s"
                for name, rate in report["ceiling_flops"].items()]
    repeated = report["first_row_repeated"]
    return ["", f"{report['title']} on {report['device']}, PyTorch"
                f" {report['versions'].get('torch', '?')}",
            *tabulate(rows, head, tablefmt="pipe", disable_numparse=True).splitlines(), "",
            *(f"{row['name']}: {row['note']}" for row in report["rows"] if row["note"]),
            *(f"{row['name']}: a round failed: {row['reason']}" for row in report["rows"]
              if row["reason"] and row["tokens_per_second"]),
            *ceilings,
            *([f"the first row measured again: {repeated:.2f} of its first measurement"]
              if repeated else [])]


def _cells(row: dict[str, Any], bases: list[float]) -> list[str]:
    if row["tokens_per_second"] is None:
        return [row["name"], "-", "-", f"failed: {row['reason']}".replace("|", "/"),
                *["-"] * (4 + len(bases))]

    def shown(key: str, form: str) -> str:
        return format(row[key], form) if row[key] else "-"

    return [row["name"], row["precision"] or "-", shown("microbatch_size", ""),
            shown("tokens_per_second", ",.0f"), shown("mfu", ".1%"), shown("step_ms", ",.1f"),
            shown("compile_seconds", ".0f"), shown("peak_mib", ",.0f"),
            *(f"{row['tokens_per_second'] / rate:.2f}" for rate in bases)]


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar per row, a panel per shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + sum(0.34 * len(part["rows"]) + 0.7 for part in reports)),
                    layout="constrained")
    panels = figure.subplots(len(reports), squeeze=False,
                             height_ratios=[len(part["rows"]) for part in reports])[:, 0]
    for panel, part in zip(panels, reports, strict=True):
        names = [row["name"] for row in part["rows"]]
        rates = [row["tokens_per_second"] or 0.0 for row in part["rows"]]
        bars = panel.barh(names, rates, color=["#1f77b4" if name.startswith("ours") else "#999999"
                                               for name in names])
        panel.bar_label(bars, labels=[f"{rate:,.0f}" if rate else "failed" for rate in rates],
                        padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{part['title']}; {part['device']}", fontsize=10, loc="left")
        panel.set_xlabel("tokens per second, in training")
    figure.savefig(path, dpi=120)
