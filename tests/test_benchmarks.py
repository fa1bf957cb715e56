"""The benchmarks measure what they say: speed, recipes, the prose corpus."""

import gzip
import itertools
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from basics.errors import UserError
from benchmarks import gpu, prose, recipes, systems, throughput
from benchmarks.systems import SystemTask, measure, time_steps
from benchmarks.throughput import ORIGINAL, REFERENCE, RowFailed, differences
from ddp_train import TrainingStep
from lab.plan.memory import GPT2_SMALL, Setting, peak_memory
from reporting.speed import usable_gib
from run_config import ModelConfig, TrainConfig, load_run
from tests.support.lab_cli import run_lab
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, read_lines, run_command, succeeded
from trainer.precision import choose_forward_options, resolve_for_device

# --- what the compiler writes for a GPU


@pytest.fixture(
    scope="module", params=["H100", pytest.param("RTX-4090", marks=pytest.mark.thorough)]
)
def gpu_work(request):
    """The work of a step of two layers of GPT-2 small, in a process that believes in a GPU."""
    pytest.importorskip("triton")
    printed = succeeded(
        run_command(
            sys.executable,
            "-m",
            "benchmarks.gpu_code",
            "--layers",
            "2",
            "--json",
            "--gpu",
            request.param,
            timeout=800,
        )
    ).stdout
    return [json.loads(line) for line in printed.splitlines()]


def test_the_loss_is_one_kernel_on_a_gpu_that_loads_16_bytes_and_reads_each_logit_once(gpu_work):
    """From memory: the second of its two loops finds them in the cache. Its output is as large."""
    logit_bytes = 2 * 64 * 1024 * 50304
    (large,) = (
        one for one in gpu_work if one["kind"] == "kernel" and one["num_bytes"] > logit_bytes
    )
    assert "softmax" in large["name"] and large["calls"] == 1 and large["load_bytes"] == 16
    assert large["num_bytes"] == pytest.approx(2 * logit_bytes, rel=0.001)


def test_a_step_on_a_gpu_has_no_more_kernels_and_bytes_than_it_had(gpu_work):
    kernels = [one for one in gpu_work if one["kind"] == "kernel"]
    assert 40 < sum(one["calls"] for one in kernels) <= 55
    bytes_per_token = sum(one["num_bytes"] for one in kernels) / (64 * 1024)
    assert 300_000 < bytes_per_token <= 366_000
    (bias,) = (one for one in kernels if "gelu_backward" in one["name"])  # and its sum
    assert bias["num_bytes"] == pytest.approx(2 * 3 * 2 * 64 * 1024 * 3072, rel=0.01)


def test_the_products_on_a_gpu_are_those_of_the_model_and_attention_is_one_call(gpu_work):
    model, num_tokens = GPT2_SMALL.model_copy(update={"n_layers": 2}), 64 * 1024
    padding = 6 * (50304 - model.vocab_size) * model.emb_dim
    attention = 12 * model.n_layers * model.context_length * model.emb_dim
    products = sum(one["flops"] for one in gpu_work if one["kind"] == "product")
    assert products / num_tokens == model.flops_per_token + padding - attention
    forward, backward = sorted(
        (one for one in gpu_work if one["kind"] == "attention"), key=lambda one: one["flops"]
    )
    assert forward["calls"] == backward["calls"] == 2
    # The backward pass of fused attention computes the weights again: 2.5 times the forward pass.
    assert backward["flops"] == 2.5 * forward["flops"]
    assert forward["flops"] / num_tokens == attention / 3


# --- what a GPU can tell


@pytest.mark.timeout(900)  # seven processes import torch, which a busy machine makes slow
def test_every_part_of_the_script_for_a_gpu_has_figures_and_a_place_on_the_page(
    tmp_path, pytestconfig
):
    """The rows, three trainings of half a minute, with --thorough only; the ladder has a test."""
    left_out = {"ladder"} | ({"rows"} if not pytestconfig.getoption("--thorough") else set())
    parts = [part for part in gpu.PARTS if part not in left_out]
    output = tmp_path / "gpu.jsonl"
    result = succeeded(
        run_command(
            sys.executable,
            "benchmarks/gpu.py",
            "--device",
            "cpu",
            "--parts",
            ",".join(parts),
            "--output",
            str(output),
            "--minutes",
            "13",
            timeout=800,
        )
    )
    lines = {part: [line for line in read_lines(output) if line["part"] == part] for part in parts}
    assert not [line for line in read_lines(output) if line.get("failed")]
    assert lines["facts"][0]["torch"] == torch.__version__ and lines["facts"][-1]["attention"]
    losses = {line["row"]: line for line in lines["curve"]}
    assert losses["cpu, fp32"]["last_loss"] < losses["cpu, fp32"]["first_loss"] - 0.3
    assert 0 < losses["bf16"]["largest_difference"] < 0.01
    assert [line["optimizer"] for line in lines["rank"]] == ["adamw", "muon", "adamw"]
    assert all(0 < line["host_ms"] and 0 < line["step_ms"] for line in lines["rank"])
    one, everything, *kernels = lines["kernels"]
    assert everything["ms"] > sum(line["ms"] for line in kernels[:3]) > 0 < one["step_ms"]
    assert any(line["kernel"] == "aten::mm" and line["calls"] > 10 for line in kernels)
    assert len(lines["memory"]) == 4 and all(line["planned_gib"] > 0 for line in lines["memory"])
    assert lines["ceilings"][0]["tb_per_s"] > 0 and len(lines["ceilings"]) == 7
    cadences = [line for line in lines["diagnostics"] if "every" in line]
    assert [line["every"] for line in cadences] == ["none", 10, 1, "none"]
    assert all(0 < line["step_ms"] for line in cadences)
    everything, *groups = [line["ms"] for line in lines["diagnostics"] if "group" in line]
    assert len(groups) == 6 and everything > 0 and min(groups) > 0
    for part in parts:
        assert f"\n## {part}\n" in f"\n{result.stdout}"
    if "rows" not in parts:
        return
    rows = {line["row"]: line["tokens_per_second"] for line in lines["rows"]}
    assert rows.keys() == {"ours", ORIGINAL, throughput.WHOLE_RUN} and min(rows.values()) > 100
    for line in lines["rows"]:  # each in a process of its own
        if line["row"] != throughput.WHOLE_RUN:
            assert len(line["blocks"]) == 3 and len(line["losses"]) == gpu.TINY_STEPS


def test_a_part_that_fails_takes_too_long_or_comes_too_late_is_a_line_and_status_1(
    monkeypatch, tmp_path
):
    program, output = tmp_path / "python", tmp_path / "gpu.jsonl"
    output.write_text('{"part": "curve", "failed": "an earlier call"}\n')
    monkeypatch.setattr(sys, "executable", str(program))  # that the parts are started with

    def call(script, *arguments):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        result = CliRunner().invoke(
            gpu.main, ["--device", "cpu", "--output", str(output), "--parts", "facts", *arguments]
        )
        return result, read_lines(output)[-1]["failed"]

    result, reason = call("echo RuntimeError: no kernel >&2; exit 3")
    assert result.exit_code == 1 and reason == "status 3: RuntimeError: no kernel"
    assert "an earlier call" in result.stdout and "no kernel" in result.stdout
    monkeypatch.setattr(gpu, "LEAST_SECONDS", -math.inf)  # also where the time is over already
    result, reason = call("sleep 600", "--minutes", "0.005")
    assert result.exit_code == 1 and reason.startswith("ran out of time after")
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 5.0)
    result, reason = call("exit 0", "--minutes", "0.01")
    assert result.exit_code == 1 and reason == "no time was left"
    result, reason = call("exit 0")  # nothing new has failed
    assert result.exit_code == 0
    wrong = CliRunner().invoke(gpu.main, ["--parts", "facts,nosuch"])
    assert wrong.exit_code == 2 and "'nosuch': wanted some of facts,curve," in wrong.output


def test_kernels_are_lines_before_their_bytes_are_counted_and_launches_are_none(monkeypatch):
    """With stand-ins: on a CPU no kernel is counted."""

    class Gpu(gpu.Place):
        is_gpu = True

        def wait(self):
            happened.append("wait")

    events = [
        SimpleNamespace(key=key, count=6, self_device_time_total=microseconds)
        for key, microseconds in (("gelu", 3000), ("cudaLaunchKernel", 0), ("norm", 6000))
    ]
    profiler = MagicMock()
    profiler.__enter__.return_value.key_averages.return_value = events
    happened = []
    monkeypatch.setattr(gpu, "profile", lambda **_: profiler)
    monkeypatch.setattr(gpu, "build", lambda *_: (MagicMock(), lambda: happened.append("step")))
    monkeypatch.setattr(gpu, "attention_kernel", lambda *_: "flash")
    monkeypatch.setattr(gpu, "clocks_and_power", lambda: happened.append("clocks") or {"w": 700})
    monkeypatch.setattr(gpu, "expected_bytes", lambda _: happened.append("count") or {"gelu": 2.0})
    lines = []
    for line in gpu.kernels(Gpu(torch.device("cpu"), None, time.monotonic() + 60)):
        assert "count" not in happened or line.keys() == {"counted for", "gb", "tb_per_s"}
        lines.append(line)
    assert lines[1:] == [
        {"kernel": "all", "calls": 4, "ms": 3.0},
        {"kernel": "norm", "calls": 2, "ms": 2.0},
        {"kernel": "gelu", "calls": 2, "ms": 1.0},
        {"w": 700},
        {"counted for": "gelu", "gb": 2.0, "tb_per_s": 2.0},
    ]
    assert happened[-3:] == ["step", "clocks", "count"]  # clocks of a device that works


def test_a_row_that_fails_says_why_and_the_part_goes_on():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 6 GiB")

    assert gpu.attempt({"row": "x"}, lambda: {"ms": 1.0}) == {"row": "x", "ms": 1.0}
    failed = gpu.attempt({"row": "x"}, fail)["failed"]
    assert failed.startswith("OutOfMemoryError: CUDA out of memory.") and "6 GiB" in failed


# --- training speed

SHAPE = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0}).model_dump()


def task_of(name, system, num_steps=80, **changes):
    return SystemTask(name, system, changes, SHAPE, "cpu", 2, 4, num_steps)


TASKS = [
    task_of(REFERENCE, "ours", precision="fp32"),
    task_of("ours", "ours"),
    task_of(ORIGINAL, "original"),
    task_of("Hugging Face", "hugging face", precision="fp32", compile=False),
]


@pytest.fixture(scope="module")
def tokens_path(tmp_path_factory):
    return throughput.write_tokens(tmp_path_factory.mktemp("dataset") / "zipf", TASKS[0])


@pytest.fixture(scope="module")
def lines(tokens_path):
    """Measurements in this process."""
    return [{"row": task.name, "status": "ok"} | measure(task, tokens_path) for task in TASKS]


def test_all_systems_have_the_same_curve_and_its_speed_is_that_of_the_median_block(lines):
    assert differences(lines) == []
    for line in lines:
        assert len(line["losses"]) == 80 and line["microbatch_size"] == 2
        assert sorted(line["blocks"])[1] == line["tokens_per_second"]


def test_a_model_with_an_error_and_curves_that_prove_nothing_are_reported(
    lines, tokens_path, monkeypatch
):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v)
    )  # without the mask
    line = {"row": "sees the future"} | measure(TASKS[0], tokens_path)
    (difference,) = differences([*lines, line])
    assert difference.startswith("sees the future: its losses differ")
    for losses in ([3.0] * 80, [float("nan")] * 80):
        assert "too level" in differences([lines[0] | {"losses": losses}])[-1]


def test_steps_are_timed_in_three_blocks_after_a_warm_up(monkeypatch):
    clock, taken = [0.0], []

    def step():
        taken.append(0)
        clock[0] += 9.0 if len(taken) <= 4 else 0.5 if len(taken) <= 14 else 0.1
        return len(taken)

    monkeypatch.setattr(systems.time, "perf_counter", lambda: clock[0])
    results, speed = time_steps(step, 34, 100, torch.device("cpu"))
    assert results == list(range(1, 35)) and speed["first_step_seconds"] == 9
    assert speed["blocks"] == pytest.approx([200, 1000, 1000])
    assert speed["tokens_per_second"] == pytest.approx(1000)


def test_a_process_that_fails_or_takes_too_long_has_a_reason(tmp_path):
    with pytest.raises(RowFailed, match="^ValueError: wrong$"):
        throughput.run(["-c", "raise ValueError('wrong')"], tmp_path, 60)
    with pytest.raises(RowFailed, match="ran out of time after 1 s"):
        throughput.run(["-c", "import time; time.sleep(600)"], tmp_path, 1)


def test_a_whole_run_writes_no_text_for_which_a_vocabulary_may_be_fetched(monkeypatch, tmp_path):
    written = []

    def fail(arguments, *_):
        run_dir = Path(arguments[arguments.index("--runs-dir") + 1]) / "whole-run"
        written.append(json.loads((run_dir / "train.json").read_text()))
        raise RowFailed("not run")

    monkeypatch.setattr(throughput, "run", fail)
    with pytest.raises(RowFailed):
        throughput.measure_row(task_of("x", throughput.WHOLE_RUN_SYSTEM), tmp_path, tmp_path, 1)
    assert written[0]["sample_prompts"] == []


def test_kernels_are_tuned_only_in_the_row_for_it(tokens_path):
    settings = torch._inductor.config
    with settings.patch(max_autotune=False, coordinate_descent_tuning=False):
        for tunes in (False, True):
            measure(replace(TASKS[1], num_steps=10, tunes_kernels=tunes), tokens_path)
            assert settings.max_autotune == settings.coordinate_descent_tuning == tunes
    tuned = [task for task in throughput.tasks_of("cuda") if task.tunes_kernels]
    assert [task.name for task in tuned] == [throughput.TUNED_KERNELS]


def test_a_second_call_measures_what_is_missing_or_has_failed(monkeypatch, tmp_path):
    asked: list[str] = []
    fails = {ORIGINAL}

    def fake(task, *_):
        asked.append(task.name)
        if task.name in fails:
            raise RowFailed("not compiled: no compiler")
        return {
            "tokens_per_second": 1000.0 * len(asked),
            "precision": "fp32",
            "peak_mib": 9.0,
            "losses": [5 - 0.1 * step for step in range(10)],
            "microbatch_size": 2,
            "compile_seconds": 0.0,
            "machine": {"device": "a test"},
        }

    def call(*arguments):
        return CliRunner().invoke(
            throughput.main,
            ["--device", "cpu", "--output", str(tmp_path / "out.jsonl"), *arguments],
        )

    tasks = TASKS[:3]
    monkeypatch.setattr(throughput, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(throughput, "measure_row", fake)
    first = call()
    assert first.exit_code == 1 and asked == [REFERENCE, "ours", ORIGINAL, REFERENCE]
    assert "| failed: not compiled: no compiler " in first.stdout
    statuses = [line["status"] for line in read_lines(tmp_path / "out.jsonl")]
    assert statuses == ["ok", "ok", "failed", "ok"]
    fails.clear()
    second = call()
    assert second.exit_code == 0 and asked[4:] == [ORIGINAL]
    (cells,) = [line.split("|") for line in second.stdout.splitlines() if "| ours " in line]
    assert cells[5].strip() == "2,000" and cells[9].strip() == "0.40"
    one = call("--only", "ours", "--rounds", "2")
    assert one.exit_code == 0 and asked[5:] == ["ours"]  # the second round only
    wrong = call("--only", "none")
    assert wrong.exit_code == 2 and "--only none: wanted one of" in wrong.stderr


def test_the_table_of_the_shipped_speeds_is_that_of_the_document():
    lines = read_lines(PROJECT_DIR / "benchmarks/throughput-cpu.jsonl")
    text = (PROJECT_DIR / "benchmarks/README.md").read_text()
    table = text[text.index("| | vocabulary 50,257, tokens/s |") :].split("\n\n")[0]
    _, _, *shown = (line.strip("| ").split(" | ") for line in table.splitlines())
    names = {
        "ours": "ours (bf16, not compiled: the default)",
        "ours, bf16": "the same again, in turn",
    }
    found = {}
    for title in dict.fromkeys(line["bench"] for line in lines):  # the larger vocabulary first
        _, _, *rows = throughput.speed_table([line for line in lines if line["bench"] == title], 1)
        for name, *cells in (row.strip("| ").split(" | ") for row in rows):
            name = names.get(name, name.replace("Hugging Face", "Hugging Face, SDPA"))
            found.setdefault(name, []).extend((cells[3], *cells[7:9]))
    assert found == {name: cells for name, *cells in shown}


def test_rows_of_a_system_share_a_cache_and_the_first_says_that_it_was_empty(monkeypatch, tmp_path):
    places = []

    def fake(task, tokens_path, place, seconds):
        places.append(place)
        place.mkdir(exist_ok=True)
        return {}

    monkeypatch.setattr(throughput, "measure_row", fake)
    lines = [
        throughput.measured(task_of("x", system), tmp_path, tmp_path, 1)
        for system in ("ours", "hugging face", "whole run", "ours")
    ]
    assert [line["has_cache"] for line in lines] == [False, False, True, True]
    assert places[0] == places[2] == places[3] != places[1]


def test_rows_on_a_gpu_begin_with_what_decides_and_fit_80_gib():
    rows = {task.name: task for task in throughput.tasks_of("cuda", Path("nanogpt"))}
    assert tuple(rows)[: len(throughput.FIRST_ON_GPU)] == throughput.FIRST_ON_GPU
    assert {task.num_steps for task in rows.values()} == {16}
    sizes = {"ours": 64, throughput.WHOLE_RUN: 64, REFERENCE: 32, ORIGINAL: 16}
    assert list(rows)[:2] == list(sizes)[:2]
    sizes |= {"ours, microbatch 16": 16, "ours, Muon, microbatch 16": 16}
    for name, size in sizes.items():
        assert rows[name].microbatch_size == size
    for task in rows.values():
        if task.system == "ours":
            train = resolve_for_device(TrainConfig(**task.train_values), torch.device("cuda", 0))
            setting = Setting(task.model, train, train.precision, 1)
            assert peak_memory(setting, task.microbatch_size).total < usable_gib(79.1) * 2**30


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_divides_the_global_batch_and_has_a_name_of_its_own(device):
    tasks = throughput.tasks_of(device, Path("nanogpt"))
    assert len({(task.name, task.model) for task in tasks}) == len(tasks)
    assert not any(task.global_batch_size % task.microbatch_size for task in tasks)


# --- one change at a time


def ladder_of(device):
    return [task for task in throughput.tasks_of(device) if task.name in throughput.LADDER]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_row_changes_one_thing_and_fits_an_rtx_3090(device):
    def settings(task):
        changed = {field: getattr(task, field) for field in ("pads_vocabulary", "fuses_adamw")}
        return set((task.changes | changed).items())

    tasks = ladder_of(device)
    assert [task.name for task in tasks] == [
        name for name in throughput.LADDER if device == "cuda" or name != "TF32"
    ]
    for before, after in itertools.pairwise(tasks):
        assert len(settings(after) - settings(before)) == 1
        assert replace(before, name="", changes={}, pads_vocabulary=True, fuses_adamw=True) == (
            replace(after, name="", changes={}, pads_vocabulary=True, fuses_adamw=True)
        )
    if device == "cuda":
        place, bytes_there = torch.device("cuda", 0), usable_gib(23.6) * 2**30
        for task in tasks:
            train = resolve_for_device(TrainConfig(**task.train_values), place)
            setting = Setting(task.model, train, train.precision, 1)
            assert peak_memory(setting, task.microbatch_size).total < bytes_there
            # So that there is something to leave out in the rows before.
            if train.precision == "bf16":
                assert choose_forward_options(task.model, train, place).head_multiple == 128


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_row_without_padding_and_the_fused_kernel_trains_without_them(
    monkeypatch, tmp_path, compiles
):
    """As on a GPU, whose default pads the head of code that is not compiled too."""
    states = []

    def build(state, *arguments):
        states.append(state)
        return TrainingStep(state, *arguments)

    def padding(*arguments):
        return replace(choose_forward_options(*arguments), head_multiple=128)

    monkeypatch.setattr(systems, "TrainingStep", build)
    monkeypatch.setattr("trainer.loss_functions.choose_forward_options", padding)
    tasks = [
        replace(gpu.tiny_task(task), changes=task.changes | {"compile": compiles})
        for task in ladder_of("cpu")
        if task.name in ("fp32", "vocabulary padded", "fused AdamW")
    ]
    tokens_path = throughput.write_tokens(tmp_path / "zipf", tasks[0])
    lines = [{"row": task.name} | measure(task, tokens_path) for task in tasks]
    found = [
        (
            state.model.options.attention,
            state.model.options.head_multiple,
            state.optimizer.param_groups[0]["fused"],
        )
        for state in states
    ]
    assert found == [
        ("math", 1, None),
        ("flash", 128, None),
        ("flash", 128, True),
    ]
    assert differences(lines) == []


def test_rows_of_one_change_have_a_table_of_their_own_beside_the_notes(monkeypatch, tmp_path):
    def fake(task, *_):
        if task.name == "bf16":
            raise RowFailed("out of memory")
        return {
            "tokens_per_second": 2000.0 if task.changes["precision"] == "fp32" else 3000.0,
            "precision": "fp32",
            "peak_mib": 9.0,
            "losses": [5.0 - 0.1 * step for step in range(10)],
            "microbatch_size": 2,
            "compile_seconds": 0.0,
            "machine": {"device": "a test"},
        }

    tasks = [TASKS[0], *ladder_of("cuda")]
    monkeypatch.setattr(throughput, "tasks_of", lambda *_: tasks)
    monkeypatch.setattr(throughput, "measure_row", fake)
    monkeypatch.setattr(throughput, "write_tokens", lambda folder, _: folder / "train.safetensors")

    def call(*arguments):
        return CliRunner().invoke(
            throughput.main,
            ["--device", "cpu", "--output", str(tmp_path / "out.jsonl"), *arguments],
        )

    one = call("--only", "TF32")
    assert one.exit_code == 0 and "ours, fp32" not in one.stdout
    both = call()
    assert both.exit_code == 1 and ", cpu, one change at a time\n" in both.stdout
    systems_table, ladder_table = both.stdout.split("one change at a time")
    assert "RTX 3090" not in systems_table and "| / original |" in systems_table
    rows = [line.strip("| ").split(" | ") for line in ladder_table.splitlines() if "| " in line]
    cells = {name.strip(): [cell.strip() for cell in rest] for name, *rest in rows}
    assert cells["TF32"][-3:] == ["1.50", "19,600", "1.39"]
    assert cells["bf16"][0] == "failed: out of memory"
    assert cells["fused AdamW"][-3:] == ["1.50", "54,000", "3.83"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_part_of_a_gpu_measures_these_rows_only_and_its_page_has_the_notes(monkeypatch, device):
    """A second call goes on where the first ended. No row may use up the part."""

    def fake(task, tokens_path, folder, seconds):
        assert seconds <= gpu.ROW_SECONDS[device]
        return {
            "tokens_per_second": 2000.0,
            "precision": task.changes["precision"],
            "peak_mib": 9.0,
            "losses": [5.0, 4.0 if task.name == "fused AdamW" else 3.0],
            "microbatch_size": task.microbatch_size,
            "compile_seconds": 0.0,
        }

    monkeypatch.setattr(throughput, "measure_row", fake)
    monkeypatch.setattr(throughput, "write_tokens", lambda folder, _: folder)
    place = gpu.Place(torch.device(device), None, time.monotonic() + 6000)
    lines = [{"part": "ladder"} | line for line in gpu.ladder(place)]
    known = (*lines[:2], {"part": "ladder", "row": lines[2]["row"], "failed": "x"}, *lines[3:4])
    assert [line["row"] for line in gpu.ladder(replace(place, known=known))] == [
        line["row"] for line in (lines[2], *lines[4:])
    ]
    assert [line["row"] for line in lines] == [task.name for task in ladder_of(device)]
    assert {line["microbatch_size"] for line in lines} == {place.size(8)}
    page = gpu.page(lines)
    assert "| 54,000 |" in page and "fused AdamW: its losses differ by 1.0000" in page


def test_the_figures_of_the_notes_are_those_of_the_document():
    text = (PROJECT_DIR / "benchmarks/README.md").read_text()
    table = text[text.index("| row | adds |") :].split("\n\n")[0]
    shown = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [(name, notes, ratio) for name, _, notes, ratio, *_ in shown] == [
        (name, f"{tokens:,}", f"{tokens / 14_100:.2f}")
        for name, (_, tokens) in throughput.LADDER.items()
    ]


# --- recipes

TWINS = PROJECT_DIR / "benchmarks/twins"


def test_twins_are_valid_runs_of_one_dataset_each():
    for name in (path.name for path in TWINS.iterdir()):
        run = load_run(TWINS, name)
        assert run.config.dataset == f"prose-{name.split('-')[0]}"
        assert run.model.vocab_size == (257 if name.startswith("bytes") else 4096)


def test_the_projected_dollars_are_those_of_lab_plan(tmp_path):
    text = (PROJECT_DIR / "benchmarks/recipes.md").read_text()
    (command,) = re.findall(r"^uv run lab (plan gpt2-small-one-dollar .*)$", text, re.MULTILINE)
    nobodys = str(tmp_path / "runs")  # not the speeds of runs that somebody has trained
    plan = json.loads(run_lab(*command.split(), "--json", "--runs-dir", nobodys).stdout)
    lines = []
    for found in plan["machines"]:
        price, hours, usd = found["price"], found["hours"], found["usd"]
        cells = [
            found["name"],
            f"{found['usd_per_hour']:.2f}",
            price["kind"],
            price["month"],
            f"{price['source_kind']}: {price['provider']}",
            f"{hours['expected']:.2f}",
            f"{usd['expected']:.2f}",
            f"{usd['low']:.2f} to {usd['high']:.2f}",
            found["source"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = text.partition("| machine | US$ an hour | kind | month |")[2].split("\n\n")[0]
    shown = table.splitlines()[2:]
    assert len(shown) >= 10 and set(shown) <= set(lines)


def add_run(sweep_dir, name, *, tokens, losses):
    """Write a finished run with evenly spaced validations."""
    run_dir = sweep_dir / name
    run_dir.mkdir(parents=True)
    for file in ("model.json", "train.json"):
        (run_dir / file).write_text((TWINS / "bytes-original" / file).read_text())
    steps = [tokens * (number + 1) // len(losses) for number in range(len(losses))]
    (run_dir / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"global_step": number, "tokens": step, "validation_loss": loss}) + "\n"
            for number, (step, loss) in enumerate(zip(steps, losses, strict=True))
        )
    )
    (run_dir / "summary.json").write_text(
        json.dumps({"status": "finished", "tokens": tokens, "validation_loss": losses[-1]})
    )


def table(sweeps_dir):
    """Return the cells below the head."""
    result = CliRunner().invoke(recipes.main, ["--sweeps-dir", str(sweeps_dir)])
    assert result.exit_code == 0, result.output
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in result.output.splitlines()[2:]
    ]


def test_the_share_of_a_baselines_tokens_is_paired_by_seed(tmp_path):
    for seed, shift in ((42, 0.0), (43, 0.2)):
        add_run(
            tmp_path / "bytes-original",
            f"baseline-seed-{seed}",
            tokens=1000,
            losses=[3.0 + shift, 2.5 + shift],
        )
        add_run(
            tmp_path / "bytes-muon",
            f"baseline-seed-{seed}",
            tokens=400,
            losses=[2.8 + shift, 2.2 + shift * 1.5],
        )
    assert table(tmp_path) == [
        [
            "bytes-original",
            "1,000",
            "2.600 (2 seeds)",
            "bytes-muon",
            "400",
            "40%",
            "2.350 (2 seeds)",
            "-0.250",
            "-0.885 to +0.385",
            "310",
            "31.0%",
            "18.3% to 43.7%",
        ]
    ]


def test_changed_variants_are_named_and_other_directories_are_left_out(tmp_path):
    nothing = CliRunner().invoke(recipes.main, ["--sweeps-dir", str(tmp_path)]).exception
    assert isinstance(nothing, UserError) and "run those commands" in str(nothing)
    for name in ("baseline-seed-42", "learning_rate-0.01-seed-42", "baseline-seed-42.old"):
        add_run(tmp_path / "bytes-muon", name, tokens=400, losses=[2.8, 2.6])
    add_run(tmp_path / "bytes-original", "baseline-seed-42", tokens=1000, losses=[3.0, 2.5])
    rows = table(tmp_path)
    assert [row[3] for row in rows] == ["bytes-muon", "bytes-muon: learning_rate-0.01"]
    assert {tuple(row[8:]) for row in rows} == {("-", "not reached", "-", "-")}


# --- the prose corpus

SENTENCE = (
    "The words of this paragraph number {} go on until they are long enough to be kept, and"
    " then they end with a full stop."
)
PAGE = (
    b"<html><head><title>No</title></head><body><nav>"
    + SENTENCE.format("menu").encode()
    + b"</nav><p>{}</p><pre>"
    + SENTENCE.format("code").encode()
    + b"</pre></body></html>"
)
NUMBERS = "one two three four".split()


def html_of(number):
    return PAGE.replace(b"{}", SENTENCE.format(number).encode())


def test_the_corpus_has_each_sentence_once_and_nothing_else_in_a_fixed_order(tmp_path, monkeypatch):
    pod = f"=head1 NAME\n\nI<{SENTENCE.format('three')[:9]}>{SENTENCE.format('three')[9:]}\n\n"
    for name, content in {
        "one.html": html_of("one"),
        "again.html": html_of("one"),
        "two.html": html_of("two"),
        "link.de.html": html_of("German"),
        "genindex.html": html_of("index"),
        "LICENSE": html_of("licence"),
        "short.html": PAGE.replace(b"{}", b"It is too short."),
        "code.html": PAGE.replace(b"{}", b"x = y[0] + f(2) * {3: 4};  " * 9 + b"."),
        "four.dict.dz": gzip.compress(f"four\n\n  {SENTENCE.format('four')}".encode()),
        "three.pod": f"{pod}    {SENTENCE.format('code')}\n".encode(),
    }.items():
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / name).write_bytes(content)
    monkeypatch.setattr(prose, "DOCUMENT_CHARACTERS", 150)
    monkeypatch.setattr(prose, "download", lambda names, _: [tmp_path / name for name in names])
    found = []
    for _ in range(2):
        result = CliRunner().invoke(prose.main, [str(tmp_path / "out"), "--package=package"])
        assert result.exit_code == 0, result.output
        found.append([line["text"] for line in read_lines(tmp_path / "out/prose.jsonl")])
    assert found[0] == found[1] and sorted(found[0]) == sorted(map(SENTENCE.format, NUMBERS))
