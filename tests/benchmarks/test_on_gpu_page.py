"""The page is made from whatever there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_gpu_measured import measurements
from benchmarks.on_gpu_page import page
from benchmarks.on_gpu_stages import HUGGING_FACE, Settings, stages
from lab.plan.speed_sources import SpeedSources
from reporting.speed import find_gpu

H100 = {"device": "NVIDIA H100 80GB HBM3"}
ROWS = (
    {"row": "ours", "status": "ok", "tokens_per_second": 390e3, "precision": "bf16",
     "machine": H100, "microbatch_size": 64, "is_compiled": True, "peak_mib": 40000.4,
     "compile_seconds": 41.2, "round": 0},
    {"row": "ours", "status": "ok", "tokens_per_second": 410e3, "precision": "bf16",
     "machine": H100, "round": 1},
    {"row": "original", "tokens_per_second": 50e3, "precision": "fp16", "machine": H100},
    {"row": HUGGING_FACE, "status": "failed", "reason": "out of | memory", "machine": H100},
)


def made(tmp_path: Path, results: dict[str, Any], *, usd_per_hour: float | None = None,
         **rows: tuple[dict[str, Any], ...]) -> str:
    for name, lines in rows.items():
        path = tmp_path / f"{name.replace('_', '-')}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut sho')
    setup = {"device": "cuda", "dry_run": False, "usd_per_hour": usd_per_hour}
    return page(setup, results, stages(Settings(tmp_path, "cuda")), tmp_path)


def cells(text: str, row: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_page_of_nothing_says_what_has_not_run(tmp_path: Path) -> None:
    text = made(tmp_path, {})
    assert "Not begun: environment, tests, ours-microbatches" in text
    assert "dry run" not in text


def test_speed_has_mfu_a_ratio_and_a_price(tmp_path: Path) -> None:
    text = made(tmp_path, {}, usd_per_hour=3.0, peers=ROWS)
    ours = cells(text, "ours")
    assert ours[1:7] == ["64", "bf16", "yes", "400,000", "34.6%", "8.00"]
    assert ours[7:] == ["40,000", "41", "2", f"{3_260_190_720 / 400e3 / 3600 * 3:.2f}"]
    assert cells(text, "original")[4:7] == ["50,000", "4.3%", "1.00"]
    assert cells(text, HUGGING_FACE)[1] == "failed: out of / memory"
    assert "computed from tokens/s" in text and "Begun, not ended." in text


def test_devices_are_not_mixed(tmp_path: Path) -> None:
    h200 = {"device": "NVIDIA H200"}
    others = [row | {"machine": h200, "tokens_per_second": 100e3} for row in ROWS[:1]]
    ceiling = {"row": "one large matrix product", "machine": h200, "status": "ok",
               "ceiling_flops": {"bf16": 788e12}}
    text = made(tmp_path, {}, peers=(*ROWS[:3], *others, ceiling))
    first, second = text.split("NVIDIA H200:")
    assert cells(first, "ours")[4:7] == ["400,000", "34.6%", "8.00"]
    assert cells(second, "ours")[4:7] == ["100,000", "8.6%", "-"]
    assert "bf16 788 TFLOP/s" in second and "| one large" not in text


def test_without_a_price_or_the_original_there_is_no_figure_for_them(tmp_path: Path) -> None:
    text = made(tmp_path, {}, ours_microbatches=ROWS[:1])
    assert "US$" not in text
    assert cells(text, "ours")[6] == "-"
    assert cells(text, "ours, microbatch 96")[1] == "not measured"


def test_every_stage_has_its_section(tmp_path: Path) -> None:
    values = {
        "tests": {"passed": 20, "failed": 1, "names": ["tests/test_gpu.py::test_b"]},
        "ours-kernels": {"step_ms": 160.0, "kernel_ms": 155.0, "groups": [
            {"group": "matmul", "ms": 100.0, "share": 0.645, "launches": 200}]},
        "search": {"largest": 120, "planned_largest": 75, "seconds": 300},
        "numbers-precision": {"bf16": [10.5, 9.25], "fp32": [10.5], "largest_difference": 0.004},
        "numbers-repeat": {"again_is_equal": False, "again_largest_difference": 1.5e-4,
                           "parts_is_equal": True},
        "around-checkpoint": {"line": "2 GB", "later_stall_seconds": 0.3},
        "around-run": {"validation_seconds": [1.5, 1.4], "evaluate_cuda_loss": 5.25},
    }
    results = {name: {"status": "done", "seconds": 9.0, "machine": "H100, PyTorch 2.11",
                      "values": found} for name, found in values.items()}
    text = made(tmp_path, results, ours_cross_entropy=(
        {"form": "fused", "round": 0, "ms": 7.0}, {"form": "fused", "round": 1, "ms": 8.0},
        {"form": "fused", "ms": 7.5, "peak MiB": 6500, "loss": 10.82},
        {"form": "Liger", "ms": None, "error": "ModuleNotFoundError"}))
    assert "20 passed, 1 failed" in text and "- `tests/test_gpu.py::test_b`" in text
    assert cells(text, "matmul")[1:] == ["100.00", "64.5%", "200"]
    assert cells(text, "largest microbatch")[1:] == ["120", "75"]
    assert cells(text, "2") == ["2", "9.25000", "-"]
    assert cells(text, "the same run again")[1:] == ["different", "0.00015", "-"]
    assert cells(text, "stopped and resumed")[1:] == ["equal", "-", "-"]
    assert cells(text, "later stall seconds")[1:] == ["0.3"]
    assert cells(text, "validation seconds")[1:] == ["1.5, 1.4"]
    assert cells(text, "fused")[1:] == ["7.50", "6,500", "10.8200", "-"]
    assert cells(text, "Liger")[1:] == ["-", "-", "-", "ModuleNotFoundError"]
    assert "Done, 9 s on H100, PyTorch 2.11." in text


@pytest.mark.parametrize("status", ["failed", "timed out"])
def test_what_failed_is_shown_with_its_reason_and_last_lines(tmp_path: Path, status: str) -> None:
    text = made(tmp_path, {"search": {"status": status, "reason": "exit status 1: memory",
                                      "seconds": 3.0, "tail": ["first", "last"], "values": {}}})
    assert f"{status.capitalize()} (exit status 1: memory), 3 s." in text
    assert f"search: {status}, exit status 1: memory" in text and "first\nlast\n```" in text


def test_a_whole_run_on_a_gpu_becomes_a_measurement_for_lab_plan(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "processes": 1,
               "torch": "2.11.0"}
    row = {"row": "ours, whole run", "status": "ok", "precision": "bf16", "machine": machine,
           "time": "2026-11-30T10:00:00+00:00"}
    rows = [row | {"tokens_per_second": rate} for rate in (470e3, 480e3, 490e3)]
    rows += [row | {"tokens_per_second": 9e9, "status": "failed"},
             row | {"tokens_per_second": 9e3, "machine": machine | {"device_type": "cpu"}}]
    path = tmp_path / "around-whole-run.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    found = measurements(tmp_path)
    (measured,) = found
    assert (measured["tokens_per_second"], measured["device"]) == (480e3, machine["device"])
    (tmp_path / "measured.json").write_text(json.dumps(found))
    sources = SpeedSources.read(tmp_path / "runs", tmp_path / "measured.json")
    assert sources.shipped[0].mfu(find_gpu(machine["device"])) == pytest.approx(0.415, abs=0.001)
