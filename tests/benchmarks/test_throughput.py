"""The speed benchmark keeps each measurement, and continues where it was interrupted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import throughput
from benchmarks.throughput import main
from benchmarks.throughput_benches import MATRIX_PRODUCT, WHOLE_RUN, Bench, benches_of
from benchmarks.throughput_launch import Place, RowFailed, measure_row, run_command
from benchmarks.throughput_report import ORIGINAL, REFERENCE
from benchmarks.throughput_rows import Row
from run_config import ModelConfig
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, read_lines

MODEL = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0})
ROWS = (Row("ours", "ours"), Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row(ORIGINAL, "original"))
BENCH = Bench("tiny", MODEL, ROWS, global_batch_size=4, microbatch_size=2, num_steps=10, rounds=1)
KEYS = {"bench", "row", "round", "status", "reason", "tokens_per_second", "blocks", "precision",
        "microbatch_size", "is_compiled", "peak_mib", "compile_seconds", "machine", "losses"}
MACHINE = {"device": "a test", "device_type": "cpu"}
FALLING = [5.0 - 0.1 * step for step in range(10)]

Measure = Callable[[Bench, Row, Place], dict[str, Any]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure the tiny bench with a stand-in; return the rows that it was asked for."""
    asked: list[str] = []
    measure_with(monkeypatch, asked, lambda row: None)
    return asked


def measure_with(monkeypatch: pytest.MonkeyPatch, asked: list[str],
                 before: Callable[[Row], object]) -> None:
    """Let a function do something before each row's made-up result."""
    def fake(bench: Bench, row: Row, place: Place) -> dict[str, Any]:
        if row is MATRIX_PRODUCT:
            return {"ceiling_flops": {"bf16": 1e9}, "machine": MACHINE}
        asked.append(row.name)
        before(row)
        return {"tokens_per_second": 1000.0 + len(asked), "step_ms": 1.0, "blocks": [1.0] * 3,
                "precision": "fp32", "machine": MACHINE, "losses": FALLING}

    monkeypatch.setattr(throughput, "benches_of", lambda *_, **__: [BENCH])
    monkeypatch.setattr(throughput, "measure_row", fake)


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--device", "cpu", "--output", str(output), *arguments])


def lines_of(output: Path) -> list[dict[str, Any]]:
    """Return the lines of all rows."""
    lines = read_lines(output.with_name(output.name + ".jsonl"))
    return [line for line in lines if line["row"] != MATRIX_PRODUCT.name]


def test_each_row_is_a_line_and_the_first_is_measured_again(
    measured: list[str], tmp_path: Path
) -> None:
    result = run(tmp_path / "out", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert measured == ["ours", REFERENCE, ORIGINAL, "ours"]
    lines = lines_of(tmp_path / "out")
    assert [(line["row"], line["round"]) for line in lines] == [
        ("ours", 1), (REFERENCE, 1), (ORIGINAL, 1), ("ours", 2)]
    assert all(line.keys() >= KEYS | {"time", "versions", "code"} for line in lines)
    (report,) = json.loads((tmp_path / "out.json").read_text())
    assert report["first_row_repeated"] == 1004 / 1001
    assert (tmp_path / "out.png").stat().st_size > 5000


@pytest.mark.thorough  # test_throughput_rows.py trains rows in CI
def test_a_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = (Row("broken", "ours", {"no_such_key": 1}), WHOLE_RUN, ROWS[1])
    monkeypatch.setattr(throughput, "benches_of", lambda *_, **__: [replace(
        BENCH, rows=rows, num_steps=80)])
    result = run(tmp_path / "out")
    assert result.exit_code == 1
    lines = {(line["row"], line["round"]): line for line in lines_of(tmp_path / "out")}
    for broken in (lines["broken", 1], lines["broken", 2]):
        assert broken["status"] == "failed" and "ValidationError" in broken["reason"]
        assert "no_such_key" in broken["reason"] and broken["machine"]
    whole, ours = lines[WHOLE_RUN.name, 1], lines[REFERENCE, 1]
    for line in (whole, ours):
        assert line["status"] == "ok" and len(line["blocks"]) == 3 and min(line["blocks"]) > 0
        assert line["tokens_per_second"] == pytest.approx(sorted(line["blocks"])[1])
        assert line["microbatch_size"] == 2 and line["machine"]["device"]
    assert whole["seconds_by_phase"]["training"] > 0 and len(ours["losses"]) == 80
    (report,) = json.loads((tmp_path / "out.json").read_text())
    assert report["differences"] == [] and report["ceiling_flops"]["fp32"] > 0


def test_a_row_that_raises_is_a_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def before(row: Row) -> None:
        if row.name == REFERENCE:
            raise RowFailed("not compiled: no compiler")
        if row.name == ORIGINAL:
            raise KeyError("a defect of the benchmark")

    measure_with(monkeypatch, [], before)
    result = run(tmp_path / "out")
    assert result.exit_code == 1
    assert f"{REFERENCE}: failed: not compiled: no compiler" in result.stderr
    assert "| failed: not compiled: no compiler " in result.stdout
    assert "defect" in result.stdout
    failed = [line for line in lines_of(tmp_path / "out") if line["status"] == "failed"]
    assert [(line["row"], line["tokens_per_second"]) for line in failed] == [
        (REFERENCE, None), (ORIGINAL, None)]
    assert [line["row"] for line in lines_of(tmp_path / "out")][-1] == "ours"


def test_a_second_call_measures_what_is_missing_and_then_what_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(row: Row) -> None:
        if row.name == "ours":
            raise RowFailed("ran out of time after 3 s")
        if row.name == ORIGINAL:
            raise KeyboardInterrupt

    measure_with(monkeypatch, [], interrupted)
    run(tmp_path / "out")
    assert [line["row"] for line in lines_of(tmp_path / "out")] == ["ours", REFERENCE]
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"row": "cut sh')
    asked: list[str] = []
    measure_with(monkeypatch, asked, lambda row: None)
    assert run(tmp_path / "out").exit_code == 0
    assert asked == [ORIGINAL, "ours", "ours"]
    assert run(tmp_path / "out").exit_code == 0
    assert len(asked) == 3
    assert run(tmp_path / "out", "--fresh").exit_code == 0
    assert len(asked) == 7 and (tmp_path / "out.old.jsonl").exists()


def test_what_another_machine_has_measured_is_measured_again(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(tmp_path / "out", "--only", ORIGINAL)
    monkeypatch.setitem(MACHINE, "device", "another")
    result = run(tmp_path / "out", "--only", ORIGINAL)
    assert measured == [ORIGINAL] * 2
    assert "tiny on a test," in result.stdout and "tiny on another," in result.stdout


def test_the_report_of_an_unfinished_file(measured: list[str], tmp_path: Path) -> None:
    run(tmp_path / "out", "--only", ORIGINAL)
    (tmp_path / "out.json").unlink()
    result = run(tmp_path / "out", "--report-only")
    assert result.exit_code == 0 and measured == [ORIGINAL]
    assert "| original " in result.stdout and (tmp_path / "out.json").exists()
    nothing = run(tmp_path / "none", "--report-only")
    assert nothing.exit_code == 1 and "no measurements yet" in nothing.stdout


@pytest.mark.parametrize(("name", "ladder"), [
    ("throughput-cpu", False), ("throughput-cpu-ladder", True)])
def test_stored_results_have_the_names_of_the_benches(name: str, ladder: bool) -> None:
    reports = json.loads((PROJECT_DIR / "benchmarks" / f"{name}.json").read_text())
    for report, bench in zip(reports, benches_of("cpu", 1, ladder=ladder), strict=True):
        assert report["title"] == bench.title
        names = [row["name"] for row in report["rows"] if not row["name"].startswith("nanoGPT")]
        assert names == [row.name for row in bench.rows if row != WHOLE_RUN]


def test_a_row_that_would_end_too_late_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(throughput.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(throughput, "seconds_since_process_start", lambda: 0.0)
    asked: list[str] = []

    def before(row: Row) -> None:
        clock[0] += 200

    measure_with(monkeypatch, asked, before)
    result = run(tmp_path / "out", "--minutes", "9")
    assert result.exit_code == 0 and asked == ["ours", REFERENCE]
    assert "not measured for lack of time: original, round 1;" in result.stdout
    assert run(tmp_path / "out", "--minutes", "9").exit_code == 0
    assert asked == ["ours", REFERENCE, ORIGINAL, "ours"]


@pytest.mark.parametrize("only, expected", [("none", "unknown row in --only: none"),
                                            ("ours", "wanted NAME=PATH")])
def test_wrong_names_are_refused_before_anything_is_measured(
    measured: list[str], tmp_path: Path, only: str, expected: str
) -> None:
    result = run(tmp_path / "out", "--only", only, "--peer", "x" if only == "ours" else "x=y")
    assert result.exit_code == 2 and expected in result.stderr
    assert not measured and not list(tmp_path.iterdir())


def test_a_row_that_runs_out_of_time_leaves_no_process(tmp_path: Path) -> None:
    pid_path = tmp_path / "pid"
    code = ("import subprocess, sys, time\n"
            "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
            f"open({str(pid_path)!r}, 'w').write(str(child.pid))\n"
            "time.sleep(600)")
    with pytest.raises(RowFailed, match=r"ran out of time after \d+ s"):
        run_command([sys.executable, "-S", "-c", code], tmp_path,
                    deadline=time.monotonic() + 5, environment={})
    status = Path(f"/proc/{pid_path.read_text()}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_the_reason_of_a_failed_command_is_its_last_error(tmp_path: Path) -> None:
    code = "import sys; print('note', file=sys.stderr); raise MemoryError('CUDA out of memory')"
    with pytest.raises(RowFailed, match="^MemoryError: CUDA out of memory$") as failed:
        run_command([sys.executable, "-c", code], tmp_path, deadline=time.monotonic() + 60,
                    environment={})
    assert failed.value.is_out_of_memory


def test_a_peers_last_speed_is_read(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("import json, os, sys\nshape = json.loads(os.environ['THROUGHPUT_SHAPE'])\n"
                      "print('warming up: 3 tok/s')\n"
                      "speed = shape['batch_size'] * 1000 + shape['emb_dim']\n"
                      "print(f'{speed:,} tokens/s')\n"
                      "if len(sys.argv) > 1: print(json.dumps({'tokens_per_second': 7.0}))\n")
    place = Place("cpu", tmp_path / "train.safetensors", tmp_path, time.monotonic() + 60)
    for path, expected in ((script, 4016), (f"{script} --json", 7)):
        result = measure_row(BENCH, Row("x", "peer", {"path": str(path)}), place)
        assert result["tokens_per_second"] == expected
    with pytest.raises(RowFailed, match="nothing.py"):
        measure_row(BENCH, Row("x", "peer", {"path": str(tmp_path / "nothing.py")}), place)


def test_out_of_memory_halves_the_microbatch_unless_the_row_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = []

    def child(task: Any, place: Place, folder: Path) -> dict[str, Any]:
        sizes.append(task.microbatch_size)
        raise RowFailed("CUDA out of memory", is_out_of_memory=True)

    monkeypatch.setattr("benchmarks.throughput_launch._measure_child", child)
    place = Place("cpu", tmp_path, tmp_path, time.monotonic())
    for row, tried in ((ROWS[0], [2, 1]), (Row("4", "ours", microbatch_size=4), [4])):
        with pytest.raises(RowFailed, match=f"out of memory at microbatch {tried[-1]}"):
            measure_row(BENCH, row, place)
        assert sizes == tried
        sizes.clear()
