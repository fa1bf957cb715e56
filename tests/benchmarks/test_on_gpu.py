"""The four calls of `on_gpu.py`: in process with stand-in rows, and whole without a network."""

import json
import os
import shutil
import subprocess
import tarfile
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import on_gpu, on_gpu_rows
from benchmarks.on_gpu import FIRST, Call, Item, page
from benchmarks.throughput import HUGGING_FACE, ORIGINAL, WHOLE_RUN, RowFailed, read
from lab.plan.speed_sources import MEASURED, read_measured
from reporting.speed import find_gpu
from tests.support.workplace import PROJECT_DIR

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
def unchanged_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(on_gpu.signal, "signal", lambda *_: None)


def call_with(monkeypatch, out, *arguments, **rows):
    """Make a call that measures these rows."""
    monkeypatch.setattr(Call, "items", lambda *_: [
        Item(name, 100, measure) for name, measure in rows.items()])
    return CliRunner().invoke(on_gpu.main, ["a", "--out", str(out), "--try-on-cpu", *arguments])


def statuses(out):
    return [(line["row"], line["status"]) for line in read(out / "results.jsonl")]


def fail(*_):
    raise RowFailed("no memory")


def good(*_):
    return {"answer": 42}


def test_a_row_that_fails_is_a_line_and_others_are_measured_once(tmp_path, monkeypatch):
    rows = {"bad": fail, "good": good}
    assert call_with(monkeypatch, tmp_path, **rows).exit_code == 0
    assert statuses(tmp_path) == [("bad", "failed"), ("good", "ok")]
    with tarfile.open(tmp_path / "on-gpu.tar.gz") as archive:
        assert {"on-gpu/on-gpu.md", "on-gpu/results.jsonl"} <= set(archive.getnames())
        text = archive.extractfile("on-gpu/on-gpu.md").read().decode()
    assert "bad: failed: RowFailed: no memory" in text and '"answer": 42' in text
    call_with(monkeypatch, tmp_path, **rows)
    assert len(statuses(tmp_path)) == 2
    call_with(monkeypatch, tmp_path, "--retry", bad=good, good=good)
    assert statuses(tmp_path)[2:] == [("bad", "ok")]


def test_a_call_that_is_ended_leaves_an_archive_and_goes_on(tmp_path, monkeypatch):
    def end(*_):
        raise SystemExit(143)  # as on SIGTERM

    assert call_with(monkeypatch, tmp_path, good=good, slow=end).exit_code == 143
    assert statuses(tmp_path) == [("good", "ok")] and (tmp_path / "on-gpu.tar.gz").exists()
    call_with(monkeypatch, tmp_path, good=fail, slow=good)
    assert statuses(tmp_path) == [("good", "ok"), ("slow", "ok")]
    result = call_with(monkeypatch, tmp_path / "late", "--minutes", "1", good=good)
    assert "good: not begun" in result.output


def test_what_ran_out_of_time_is_measured_again_if_that_can_help(tmp_path):
    def measure(*_):
        raise RowFailed("ran out of time after 20 s")

    for name, left in (("row", 20), ("row", 999), ("tests, search", 999)):
        Call("c", tmp_path, on_gpu=True).record(Item(name, 100, measure), left)
    assert [status for _, status in statuses(tmp_path)] == ["cut off", "failed", "cut off"]


def test_each_row_of_the_four_calls_fits_into_nine_minutes(tmp_path):
    items = [item for name in "abcd"
             for item in Call(name, tmp_path, True, tmp_path).items(tmp_path / "tokens")]
    assert max(item.seconds for item in items) <= 9 * 60 - on_gpu.RESERVE_SECONDS + 5
    names = [item.name for item in items]
    assert len(names) == len(set(names))
    assert {FIRST, "attention", ORIGINAL, HUGGING_FACE.format("bf16"), WHOLE_RUN, on_gpu.NANOGPT,
            "kernels", "one of eight, Muon", "tried: cuDNN attention", "search"} <= set(names)
    assert (PROJECT_DIR / on_gpu.SEARCH_TEST).read_text().count("pytest.mark.gpu") == 1


def test_tests_that_passed_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv(on_gpu_rows.RESULTS, str(tmp_path / "results.jsonl"))
    for name, when, outcome in (("b[c d]", "setup", "passed"), ("b[c d]", "call", "passed"),
                                ("e", "call", "failed"), ("f", "setup", "skipped")):
        on_gpu_rows.pytest_runtest_logreport(SimpleNamespace(
            when=when, outcome=outcome, passed=outcome == "passed", failed=outcome == "failed",
            nodeid=f"tests/a.py::{name}", longrepr="a\nE  off by 1"))
    lines = read(tmp_path / "results.jsonl")
    assert [(line["status"], line["outcome"]) for line in lines] == [
        ("ok", "passed"), ("failed", "failed"), ("ok", "skipped")]
    assert lines[1]["reason"] == "E  off by 1"
    asked: list[str] = []
    monkeypatch.setattr(on_gpu, "run", lambda command, *_, **__: asked.extend(command))
    Call("c", tmp_path, on_gpu=False).tests(["tests/a.py"], tmp_path, 9)
    assert [word for word in asked if "deselect" in word] == [
        "--deselect=tests/a.py::b[c d]", "--deselect=tests/a.py::f"]


def line_of(row, **values):
    return {"row": row, "status": "ok", "losses": [], "precision": "bf16", "machine": H100,
            "compile_seconds": 9.0, "peak_mib": 36e3, "microbatch_size": 64,
            "time": "2026-11-30T10:00:00"} | values


def cells(text, row):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_page_shows_what_was_measured_and_lab_plan_reads_its_speed(tmp_path):
    lines = [line_of(ORIGINAL, tokens_per_second=60e3, precision="fp16", losses=[11.02]),
             line_of(FIRST, tokens_per_second=480e3, losses=[11.0, 9.0]),
             line_of(HUGGING_FACE.format("bf16"), status="failed", reason="out of memory"),
             line_of(WHOLE_RUN, tokens_per_second=470e3, seconds_by_phase={"checkpoint": 0.25}),
             {"row": f"{on_gpu.RESUMED}::test_a", "status": "ok", "outcome": "passed"},
             {"row": "search", "status": "ok", "largest": 77}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    call = Call("a", tmp_path, on_gpu=True)
    call.write()
    text = (tmp_path / "on-gpu.md").read_text()
    speed, mfu, *_, off, ratio, _, _ = cells(text, FIRST)[3:]
    assert (speed, ratio, off) == ("480,000", "8.00", "0.0000") and 0.3 < float(mfu) < 0.5
    assert cells(text, ORIGINAL)[7] == "0.0200"
    assert "bit-identical resuming: {'passed': 1}" in text
    assert "Hugging Face, bf16, compiled: failed: out of memory" in text
    assert '{"checkpoint": 0.25}' in text and '"largest": 77' in text
    assert "that `lab plan` says" in text
    (found,) = read_measured(tmp_path / "runs", tmp_path / "measured.json")[MEASURED]
    assert found.mfu(find_gpu(H100["device"])) == pytest.approx(0.406, abs=0.001)
    assert page({}, call.task("ours")).startswith("# Measurements on a GPU\n")


def test_the_instructions_are_those_that_are_tried_without_network():
    text = " ".join((PROJECT_DIR / "benchmarks/README.md").read_text().split())
    assert f"python {BRING}" in text and f"python {UNPACK}" in text


def test_only_what_runs_on_the_device_is_read_from_a_trace():
    assert on_gpu_rows.kernels_of_trace({"traceEvents": [
        {"name": "nvjet_a", "cat": "kernel", "dur": 6000.0},
        {"name": "nvjet_a", "cat": "kernel", "dur": 3000.0},
        {"name": "Memset (Device)", "cat": "gpu_memset", "dur": 30},
        {"name": "Optimizer.step#AdamW.step", "cat": "gpu_user_annotation", "dur": 9000},
        {"name": "aten::mm", "cat": "cpu_op", "dur": 9000},
        {"name": "process_name", "ph": "M"}]}) == {"nvjet_a": 3.0, "Memset (Device)": 0.01}


def done(*command, **options):
    finished = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.thorough  # builds an environment, 5 GB, and compiles on the CPU
@pytest.mark.timeout(7200)
def test_all_calls_pass_without_network_on_the_lowest_pytorch(tmp_path):
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
    assert subprocess.run([*command, "a", "--out", out], cwd=PROJECT_DIR).returncode == 1
    done("sh", "-c", f"{python} {BRING} && {python} {UNPACK}", cwd=tmp_path)
    assert {path.name.split("-")[0] for path in tmp_path.glob("wheels/*")} == WHEELS
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path)}
    for name in "abcd":
        print(done(*command, name, "--out", out, "--try-on-cpu", "--minutes", "40",
                   cwd=PROJECT_DIR, env=environment))
    wanted = [item.name for name in "abcd" for item in Call(name, out, on_gpu=False).items(out)]
    with tarfile.open(out / "on-gpu.tar.gz") as archive:
        lines = archive.extractfile("on-gpu/results.jsonl").read().decode().splitlines()
        assert "MFU" in archive.extractfile("on-gpu/on-gpu.md").read().decode()
    found = {line["row"]: line for line in map(json.loads, lines)}
    bad = {row: line["reason"] for row, line in found.items() if line["status"] != "ok"}
    assert not bad and set(wanted) <= set(found)
    assert any(row.startswith("test tests/test_gpu.py") for row in found)
