"""The four calls of `on_gpu.py`: in process with stand-in rows, and whole without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks import on_gpu, on_gpu_rows
from benchmarks import throughput_records as records
from benchmarks.on_gpu import FIRST, RESUMED, STALL, Call, Item, page
from benchmarks.on_gpu_rows import Work
from benchmarks.throughput_benches import WHOLE_RUN
from benchmarks.throughput_launch import Place, RowFailed
from benchmarks.throughput_report import HUGGING_FACE, ORIGINAL
from lab.plan.speed_sources import SpeedSources
from reporting.speed import find_gpu
from tests.support.workplace import PROJECT_DIR
from trainer.microbatch_trial import Trial

H100 = {"device": "NVIDIA H100 80GB HBM3", "device_type": "cuda", "processes": 1,
        "torch": "2.11.0", "python": "3.12.3", "platform": "Linux"}
# What has to be brought to a machine that has PyTorch and other common packages.
WHEELS = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection",
          "typing_extensions"}
BRING = ("-m pip download --only-binary=:all: --python-version 3.12 --platform"
         " manylinux2014_x86_64 --dest wheels pydantic")
UNPACK = "-m pip install --no-index --no-deps --no-compile --target site wheels/*.whl"
COMMON = ("torch==2.11.*", "transformers", "numpy", "pytest", "pip", "click<9", "filelock",
          "huggingface-hub", "hypothesis", "matplotlib", "nvidia-ml-py", "psutil", "pyarrow",
          "pytest-timeout", "rich", "safetensors", "tabulate", "tiktoken", "tqdm")


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(on_gpu.signal, "signal", lambda *_: None)


def call_with(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str,
              **rows: Callable[[Place], dict[str, Any]]) -> Result:
    """Make a call that measures these rows."""
    monkeypatch.setattr(Call, "items", lambda call: [
        Item(name, 100, measure) for name, measure in rows.items()])
    return CliRunner().invoke(on_gpu.main, ["a", "--out", str(out), "--try-on-cpu", *arguments])


def statuses(out: Path) -> list[tuple[str, str]]:
    return [(line["row"], line["status"]) for line in records.read(out / "results.jsonl")]


def fail(place: Place) -> dict[str, Any]:
    raise RowFailed("no memory")


def test_a_row_that_fails_is_a_line_and_others_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"bad": fail, "good": lambda place: {"answer": 42}}
    assert call_with(monkeypatch, tmp_path, **rows).exit_code == 0
    assert statuses(tmp_path) == [("bad", "failed"), ("good", "ok")]
    with tarfile.open(tmp_path / "on-gpu.tar.gz") as archive:
        assert set(archive.getnames()) == {
            "on-gpu", "on-gpu/on-gpu.md", "on-gpu/results.jsonl"}
        text = archive.extractfile("on-gpu/on-gpu.md").read().decode()
    assert "bad: failed: RowFailed: no memory" in text and '- good: {"answer": 42}' in text
    call_with(monkeypatch, tmp_path, **rows)
    assert len(statuses(tmp_path)) == 2
    call_with(monkeypatch, tmp_path, "--retry", **rows | {"bad": lambda place: {}})
    assert statuses(tmp_path)[2:] == [("bad", "ok")]


def test_a_call_that_is_ended_leaves_an_archive_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(place: Place) -> dict[str, Any]:
        raise SystemExit(143)  # as on SIGTERM

    good = {"good": lambda place: {}}
    assert call_with(monkeypatch, tmp_path, **good, slow=end).exit_code == 143
    assert statuses(tmp_path) == [("good", "ok")] and (tmp_path / "on-gpu.tar.gz").exists()
    call_with(monkeypatch, tmp_path, good=fail, slow=good["good"])
    assert statuses(tmp_path) == [("good", "ok"), ("slow", "ok")]
    result = call_with(monkeypatch, tmp_path / "late", "--minutes", "1", **good)
    assert "good: not begun" in result.output


@pytest.mark.parametrize("is_over, is_short, has_lines, status", [
    (True, True, False, "cut off"), (True, False, True, "cut off"), (True, False, False, "failed"),
    (False, True, True, "failed")])
def test_what_ran_out_of_time_is_measured_again_if_that_can_help(
    tmp_path: Path, is_over: bool, is_short: bool, has_lines: bool, status: str
) -> None:
    def measure(place: Place) -> dict[str, Any]:
        if has_lines:
            on_gpu_rows.write(tmp_path / "results.jsonl", "test a")
        return fail(place)

    place = Place("cpu", tmp_path, tmp_path, time.monotonic() + (-1 if is_over else 99))
    Call("c", tmp_path, "cpu").record(Item("row", 9, measure), place, is_short)
    assert statuses(tmp_path)[-1] == ("row", status)


def test_each_row_of_the_four_calls_fits_into_nine_minutes(tmp_path: Path) -> None:
    items = [item for name in "abcd" for item in Call(name, tmp_path, "cuda:0", tmp_path).items()]
    assert max(item.seconds for item in items) <= 9 * 60 - on_gpu.RESERVE_SECONDS + 5
    names = [item.name for item in items]
    assert len(names) == len(set(names))
    assert {FIRST, RESUMED, STALL, ORIGINAL, HUGGING_FACE, WHOLE_RUN.name, on_gpu.NANOGPT,
            on_gpu.KERNELS, "one of eight, Muon", "tried: cuDNN attention"} <= set(names)
    assert (PROJECT_DIR / on_gpu.SEARCH_TEST).read_text().count("pytest.mark.gpu") == 1


def test_tests_that_passed_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(on_gpu_rows.RESULTS, str(tmp_path / "results.jsonl"))
    for name, when, outcome in (("b[c d]", "setup", "passed"), ("b[c d]", "call", "passed"),
                                ("e", "call", "failed"), ("f", "setup", "skipped")):
        on_gpu_rows.pytest_runtest_logreport(SimpleNamespace(
            when=when, outcome=outcome, passed=outcome == "passed", failed=outcome == "failed",
            nodeid=f"tests/a.py::{name}", longrepr="a\nE  off by 1", duration=1.0))
    lines = records.read(tmp_path / "results.jsonl")
    assert [(line["status"], line["outcome"]) for line in lines] == [
        ("ok", "passed"), ("failed", "failed"), ("ok", "skipped")]
    assert lines[1]["reason"] == "E  off by 1"
    asked: list[str] = []
    place = SimpleNamespace(run=lambda command, *_, **__: asked.extend(command))
    Call("c", tmp_path, "cpu").tests(["tests/a.py"], place)
    assert [word for word in asked if "deselect" in word] == [
        "--deselect=tests/a.py::b[c d]", "--deselect=tests/a.py::f"]


def test_trials_of_an_earlier_call_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def train(size: int) -> Trial:
        tried.append(size)
        if size == 4 and len(tried) == 2:
            raise RuntimeError("cut off")
        if size > 10:
            return Trial(size, fits=False)
        return Trial(size, fits=True, demand_gib=size, capacity_gib=10.5, tokens_per_second=size)

    monkeypatch.setattr(on_gpu_rows, "try_microbatch", lambda command, size, *_, **__: train(size))
    work = Work(torch.device("cpu"), tmp_path / "results.jsonl", tmp_path)
    with pytest.raises(RuntimeError, match="cut off"):
        on_gpu_rows.search(work)
    found = on_gpu_rows.search(work)
    assert found["largest"] == found["fastest"] == 10 and tried[:3] == [1, 4, 4]
    assert len(tried) == len(set(tried)) + 1 == found["trials"] + 1


def test_the_rows_of_numbers_are_measured_on_a_cpu(tmp_path: Path) -> None:
    work = Work(torch.device("cpu"), tmp_path / "results.jsonl", tmp_path)
    found = on_gpu_rows.precisions(work)
    assert found["fp32_largest_difference"] == 0 < found["bf16_largest_difference"] < 0.01
    assert found["last_loss"] < found["first_loss"]
    kernels = on_gpu_rows.attention(work)
    for name in ("flash", "math"):
        assert kernels[name]["not finite"] == 0 < kernels[name]["gradient off"] < 0.01
    assert kernels["cudnn"]["failed"]
    found = on_gpu_rows.resumed(work, deterministic=False)
    assert found["is_equal"] and found["largest_difference"] == found["loss_difference"] == 0
    assert on_gpu_rows.ROWS["stall"](work)["later_stall_seconds"] >= 0


def line_of(row: str, **values: Any) -> dict[str, Any]:
    return records.EMPTY | {"row": row, "status": "ok", "losses": [], "precision": "bf16",
                            "machine": H100, "time": "2026-11-30T10:00:00"} | values


def cells(text: str, row: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_page_proves_the_promises_of_one_card_and_lab_plan_reads_its_speed(
    tmp_path: Path
) -> None:
    lines = [line_of(FIRST, tokens_per_second=480e3, microbatch_size=64, peak_mib=36e3,
                     losses=[11.0, 9.0]),
             line_of("ours, microbatch 12", tokens_per_second=400e3, microbatch_size=12,
                     losses=[11.0, 9.01], peak_mib=9e3),
             line_of(ORIGINAL, tokens_per_second=60e3, precision="fp16"),
             line_of(HUGGING_FACE, status="failed", reason="out of memory"),
             line_of(WHOLE_RUN.name, tokens_per_second=470e3,
                     seconds_by_phase={"startup": 9.0, "compile": 40.5}),
             line_of(RESUMED, is_equal=True), line_of(STALL, later_stall_seconds=0.25)]
    call = Call("a", tmp_path, "cuda:0")
    text = page({line["row"]: line for line in lines}, call.bench)
    assert cells(text, "tokens/s, microbatch 64")[0] == "480,000"
    assert cells(text, "MFU") == ["0.415", "0.4 or more"]
    assert cells(text, "ours / original") == ["8.00", "7 or more"]
    assert cells(text, f"ours / {HUGGING_FACE}")[0] == "-"
    assert 0.5 < float(cells(text, "peak memory / `lab plan`'s")[0]) < 1.5
    assert cells(text, "seconds to the first step")[0] == "49.5"
    assert cells(text, "bit-identical after resuming")[0] == "True"
    assert cells(text, "seconds that a checkpoint stops training")[0] == "0.250"
    assert cells(text, "ours, microbatch 12")[-1] == "0.0100"
    assert f"- {HUGGING_FACE}: failed: out of memory" in text
    for line in lines:
        records.append(tmp_path / "results.jsonl", line)
    call.write()
    sources = SpeedSources.read(tmp_path / "runs", tmp_path / "measured.json")
    assert sources.shipped[0].mfu(find_gpu(H100["device"])) == pytest.approx(0.406, abs=0.001)


def test_a_page_of_nothing_shows_what_is_missing(tmp_path: Path) -> None:
    text = page({}, Call("a", tmp_path, "cuda:0").bench)
    assert "(tiny" not in text and "device: None" in text
    assert cells(text, "ours / original")[0] == "-"


def test_the_instructions_are_those_that_are_tried_without_network() -> None:
    text = " ".join((PROJECT_DIR / "benchmarks/README.md").read_text().split())
    assert f"python {BRING}" in text and f"python {UNPACK}" in text


def done(*command: object, **options: Any) -> str:
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.thorough  # builds an environment, 5 GB, and compiles on the CPU
@pytest.mark.timeout(7200)
def test_all_calls_pass_without_network_on_the_lowest_pytorch(tmp_path: Path) -> None:
    if not shutil.which("uv") or subprocess.run(["uv", "python", "find", "3.12"]).returncode:
        pytest.skip("needs uv and Python 3.12")
    if subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"]).returncode:
        pytest.skip("needs unshare and ip")
    python, out = tmp_path / "venv/bin/python", tmp_path / "out"
    done("uv", "venv", "--python", "3.12", tmp_path / "venv")
    done("uv", "pip", "install", "--python", python, *COMMON, cwd=tmp_path)  # no constraints there
    done("uv", "pip", "uninstall", "--python", python, *WHEELS)
    command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", python, "-m",
               "benchmarks.on_gpu"]
    lacking = subprocess.run([*command, "a", "--out", out], capture_output=True, text=True,
                             cwd=PROJECT_DIR)
    assert lacking.returncode == 2 and "bring" in lacking.stderr and not out.exists()
    done("sh", "-c", f"{python} {BRING} && {python} {UNPACK}", cwd=tmp_path)
    assert {path.name.split("-")[0] for path in tmp_path.glob("wheels/*")} == WHEELS
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}
    for name in "abcd":
        print(done(*command, name, "--out", out, "--try-on-cpu", "--minutes", "40",
                   cwd=PROJECT_DIR, env=environment))
    wanted = [item.name for name in "abcd" for item in Call(name, out, "cpu").items()]
    with tarfile.open(out / "on-gpu.tar.gz") as archive:
        lines = archive.extractfile("on-gpu/results.jsonl").read().decode().splitlines()
        assert "| MFU" in archive.extractfile("on-gpu/on-gpu.md").read().decode()
    found = {line["row"]: line for line in map(json.loads, lines)}
    bad = {row: line["reason"] for row, line in found.items() if line["status"] != "ok"}
    assert not bad and set(wanted) <= set(found)
    assert any(row.startswith("test tests/test_gpu.py") for row in found)
