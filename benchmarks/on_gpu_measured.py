"""The measured speed of a whole run in the format of `measured.json`, which `lab plan` reads."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.on_gpu_stages import read_rows
from benchmarks.throughput_benches import WHOLE_RUN, gpu_benches
from lab.plan.speed_sources import Measurement

STAGE = "around-whole-run"


def measurements(output: Path) -> list[dict[str, Any]]:
    """Return a `Measurement` for each GPU on which the whole run was measured; none on a CPU."""
    rows = [row for row in read_rows(output / f"{STAGE}.jsonl")
            if row.get("row") == WHOLE_RUN.name and row.get("status") == "ok"
            and (row.get("machine") or {}).get("device_type") == "cuda"]
    return [_measurement([row for row in rows if row["machine"]["device"] == device])
            for device in dict.fromkeys(row["machine"]["device"] for row in rows)]


def _measurement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = rows[-1]["machine"]
    return Measurement(
        device=machine["device"], processes=machine["processes"], precision=rows[-1]["precision"],
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in rows),
        model=gpu_benches(1)[0].model,
        source=f"benchmarks/on_gpu.py, {rows[-1]['time'][:10]}, PyTorch {machine['torch']}",
    ).model_dump()
