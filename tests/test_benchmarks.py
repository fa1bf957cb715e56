"""The benchmarks measure what they say: speed, recipes, the prose corpus."""

import gzip
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
from lab.sweep import sweep
from lab.sweep.definition import open_sweep, parse_change
from reporting.gpus import GPT2_SMALL_FLOPS_PER_TOKEN, find_gpu
from reporting.speed import usable_gib
from run_config import RUN_NAME, ModelConfig, TrainConfig, load_run
from tests.support.lab_cli import run_lab
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, read_lines, run_command, succeeded
from trainer.precision import choose_forward_options, resolve_for_device

# --- what the compiler writes for a GPU


@pytest.mark.parametrize("card", ["H100", pytest.param("RTX-4090", marks=pytest.mark.thorough)])
def test_a_step_on_a_gpu_has_the_products_of_the_model_and_no_more_kernels_than_it_had(card):
    """Of one layer of GPT-2 small, counted by a process that believes in a GPU."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.gpu_code", "--layers", "1", "--json", "--gpu"]
    printed = succeeded(run_command(*command, card, timeout=800)).stdout
    by_kind = {"kernel": [], "product": [], "attention": [], "update": []}
    for one in map(json.loads, printed.splitlines()):
        by_kind[one["kind"]].append(one)
    kernels, num_tokens = by_kind["kernel"], 64 * 1024
    # The second loop of the loss finds the logits in the cache. Its output is as large.
    logit_bytes = 2 * num_tokens * 50304
    (large,) = (one for one in kernels if one["num_bytes"] > logit_bytes)
    assert "softmax" in large["name"] and large["calls"] == 1 and large["load_bytes"] == 16
    assert large["num_bytes"] == pytest.approx(2 * logit_bytes, rel=0.001)
    assert 25 < sum(one["calls"] for one in kernels) <= 33
    assert sum(one["num_bytes"] for one in kernels) / num_tokens <= 300_000
    model = GPT2_SMALL.model_copy(update={"n_layers": 1})
    padding = 6 * (50304 - model.vocab_size) * model.emb_dim
    attention = 12 * model.context_length * model.emb_dim
    products = sum(one["flops"] for one in by_kind["product"])
    assert products / num_tokens == model.flops_per_token + padding - attention
    forward, backward = sorted(one["flops"] for one in by_kind["attention"])
    # The backward pass of fused attention computes the weights again: 2.5 times the forward pass.
    assert backward == 2.5 * forward and forward / num_tokens == attention / 3


@pytest.mark.thorough
def test_sampled_softmax_leaves_out_most_of_the_products_of_the_head():
    pytest.importorskip("triton")
    command = "benchmarks.gpu_code --layers 1 --microbatch 16 --candidates 8192 --json".split()
    printed = succeeded(run_command(sys.executable, "-m", *command, timeout=800)).stdout
    products = [one for one in map(json.loads, printed.splitlines()) if one["kind"] == "product"]
    model = GPT2_SMALL.model_copy(update={"n_layers": 1})
    left_out = 6 * (model.vocab_size - 8192) * model.emb_dim
    attention = 12 * model.context_length * model.emb_dim
    flops = sum(one["flops"] for one in products) / (16 * 1024)
    assert flops == model.flops_per_token - left_out - attention


# --- what a GPU can tell


def test_the_script_for_a_gpu_runs_its_parts_in_processes_and_prints_a_page(tmp_path):
    output = str(tmp_path / "gpu.jsonl")
    command = ["benchmarks/gpu.py", "--device", "cpu", "--parts", "facts", "--output", output]
    printed = succeeded(run_command(sys.executable, *command)).stdout
    assert printed.startswith("## facts\n") and torch.__version__ in printed


@pytest.mark.parametrize(
    ("part", "num_lines", "figure"),
    [
        ("curve", 3, "last_loss"),
        ("rank", 3, "host_ms"),
        ("kernels", 12, "ms"),
        ("memory", 4, "planned_gib"),
        ("ceilings", 7, "tb_per_s"),
        ("diagnostics", 11, "step_ms"),
        pytest.param("rows", 3, "tokens_per_second", marks=pytest.mark.thorough),
    ],
)
def test_every_part_of_the_script_for_a_gpu_has_figures(tmp_path, part, num_lines, figure):
    output = tmp_path / "gpu.jsonl"
    arguments = ["--device", "cpu", "--only-part", part, "--output", str(output)]
    CliRunner().invoke(gpu.main, arguments, catch_exceptions=False)
    lines = read_lines(output)
    assert len(lines) >= num_lines and not [line for line in lines if "failed" in line]
    figures = [line[figure] for line in lines if figure in line]
    assert figures and min(figures) > 0
    if part == "curve":
        assert lines[0]["last_loss"] < lines[0]["first_loss"] - 0.3
        assert 0 < lines[1]["largest_difference"] < 0.01


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


def test_a_row_that_fails_says_why_and_the_part_goes_on():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 6 GiB")

    assert gpu.attempt({"row": "x"}, lambda: {"ms": 1.0}) == {"row": "x", "ms": 1.0}
    failed = gpu.attempt({"row": "x"}, fail)["failed"]
    assert failed.startswith("OutOfMemoryError: CUDA out of memory.") and "6 GiB" in failed


def test_a_process_that_fails_or_takes_too_long_has_a_reason(tmp_path):
    with pytest.raises(RowFailed, match="^ValueError: wrong$"):
        throughput.run(["-c", "raise ValueError('wrong')"], tmp_path, 60)
    with pytest.raises(RowFailed, match="ran out of time after 1 s"):
        throughput.run(["-c", "import time; time.sleep(600)"], tmp_path, 1)


# --- training speed

SHAPE = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0}).model_dump()


def task_of(name, system, num_steps=80, **changes):
    return SystemTask(name, system, changes, SHAPE, "cpu", 2, 4, num_steps)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """More make such small shapes slow where the cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.loss_functions.share_cpu_cores", lambda process: None)
        yield
    torch.set_num_threads(num_threads)


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


def measured(speed, losses):
    """Return what a row measures."""
    return {
        "tokens_per_second": speed,
        "precision": "fp32",
        "peak_mib": 9.0,
        "losses": losses,
        "microbatch_size": 2,
        "compile_seconds": 0.0,
        "machine": {"device": "a test"},
    }


def test_a_second_call_measures_what_is_missing_or_has_failed(monkeypatch, tmp_path):
    asked: list[str] = []
    fails = {ORIGINAL}

    def fake(task, *_):
        asked.append(task.name)
        if task.name in fails:
            raise RowFailed("not compiled: no compiler")
        return measured(1000.0 * len(asked), [5 - 0.1 * step for step in range(10)])

    def call(*arguments):
        output = ["--output", str(tmp_path / "out.jsonl")]
        return CliRunner().invoke(throughput.main, ["--device", "cpu", *output, *arguments])

    monkeypatch.setattr(throughput, "tasks_of", lambda *_: TASKS[:3])
    monkeypatch.setattr(throughput, "measure_row", fake)
    first = call()
    assert first.exit_code == 1 and asked == [REFERENCE, "ours", ORIGINAL, REFERENCE]
    assert "| failed: not compiled: no compiler " in first.stdout
    fails.clear()
    second = call()
    assert second.exit_code == 0 and asked[4:] == [ORIGINAL]
    (cells,) = [line.split("|") for line in second.stdout.splitlines() if "| ours " in line]
    assert cells[5].strip() == "2,000" and cells[9].strip() == "0.40"
    assert call("--only", "ours", "--rounds", "2").exit_code == 0
    assert asked[5:] == ["ours"]  # the second round only
    assert call("--only", "none").exit_code == 2


def fits(task, free_gib):
    """Return whether the peak of a row on a GPU fits into so much memory."""
    train = resolve_for_device(TrainConfig(**task.train_values), torch.device("cuda", 0))
    setting = Setting(task.model, train, train.precision, 1)
    return peak_memory(setting, task.microbatch_size).total < usable_gib(free_gib) * 2**30


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_divides_the_global_batch_has_a_name_of_its_own_and_fits_80_gib(device):
    tasks = throughput.tasks_of(device, Path("nanogpt"))
    assert len({(task.name, task.model) for task in tasks}) == len(tasks)
    assert not any(task.global_batch_size % task.microbatch_size for task in tasks)
    if device == "cuda":
        names = tuple(task.name for task in tasks)  # what decides is first
        assert names[: len(throughput.FIRST_ON_GPU)] == throughput.FIRST_ON_GPU
        assert all(fits(task, 79.1) for task in tasks if task.system == "ours")


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
        same = {"name": "", "changes": {}, "pads_vocabulary": True, "fuses_adamw": True}
        assert replace(before, **same) == replace(after, **same)
    assert device == "cpu" or all(fits(task, 23.6) for task in tasks)


def test_a_row_without_padding_and_the_fused_kernel_trains_without_them(monkeypatch, tmp_path):
    """As on a GPU, whose default pads the head of code that is not compiled too."""
    states = []

    def build(state, *arguments):
        states.append(state)
        return TrainingStep(state, *arguments)

    def padding(*arguments):
        return replace(choose_forward_options(*arguments), head_multiple=128)

    monkeypatch.setattr(systems, "TrainingStep", build)
    monkeypatch.setattr("trainer.loss_functions.choose_forward_options", padding)
    monkeypatch.setattr(throughput, "MIN_FALL", 0.0)  # few steps
    tasks = [
        replace(gpu.tiny_task(task), changes=task.changes | {"compile": False}, num_steps=10)
        for task in ladder_of("cpu")
        if task.name in ("fp32", "vocabulary padded", "fused AdamW")
    ]
    tokens_path = throughput.write_tokens(tmp_path / "zipf", tasks[0])
    lines = [{"row": task.name} | measure(task, tokens_path) for task in tasks]
    found = [
        (state.model.options.head_multiple, state.optimizer.param_groups[0]["fused"])
        for state in states
    ]
    assert found == [(1, None), (128, None), (128, True)]
    assert differences(lines) == []


# --- recipes

TWINS = PROJECT_DIR / "benchmarks/twins"


def test_twins_are_valid_runs_of_one_dataset_each():
    for name in (path.name for path in TWINS.iterdir()):
        run = load_run(TWINS, name)
        assert run.config.dataset == f"prose-{name.split('-')[0]}"
        sizes = {"bytes": 257, "bpe": 4096, "50k": 50257}
        assert run.model.vocab_size == sizes[name.split("-")[0]]


def test_each_sweep_of_the_page_is_accepted(tmp_path):
    """Each block in a shell of its own, in the page's order, up to where `lab sweep` trains."""
    text = (PROJECT_DIR / "benchmarks/recipes.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for place in ("runs", "benchmarks/twins"):
        for path in (PROJECT_DIR / place).glob("*/*"):
            if path.name in ("model.json", "train.json"):
                copy = tmp_path / place / path.parent.name / path.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    shown = """uv() { printf '%s\\0' "$@" >> commands; printf '\\n\\0' >> commands; }\n"""
    for block in blocks:
        subprocess.run(["bash", "-euc", shown + block], cwd=tmp_path, check=True)
    commands = (tmp_path / "commands").read_text().removesuffix("\n\0").split("\n\0")
    sweeps = [words[3:] for words in (one.split("\0")[:-1] for one in commands) if "sweep" in words]
    for words in sweeps:
        options = sweep.command.make_context("sweep", words).params
        name = options["name"] or options["base"]
        assert RUN_NAME.fullmatch(name) and not options["ranges"]
        open_sweep(
            load_run(tmp_path / options["runs_dir"], options["base"]),
            tmp_path / "sweeps" / name,
            [parse_change(change) for change in options["changes"]],
            options["seeds"],
        )
    assert len(sweeps) >= 40


def test_the_projected_dollars_are_those_of_lab_plan(tmp_path):
    text = (PROJECT_DIR / "benchmarks/recipes.md").read_text()
    (command,) = re.findall(r"^uv run lab (plan gpt2-small-one-dollar .*)$", text, re.MULTILINE)
    nobodys = str(tmp_path / "runs")  # not the speeds of runs that somebody has trained
    plan = json.loads(run_lab(*command.split(), "--json", "--runs-dir", nobodys).stdout)
    planned = set()
    for found in plan["machines"]:
        hours, usd = found["hours"]["expected"], found["usd"]
        figures = f"{hours:.2f} | {usd['expected']:.2f} | {usd['low']:.2f} to {usd['high']:.2f}"
        planned.add((found["name"], figures))
    rows = re.findall(
        r"^\| (\d+x .*?) \| .* \| ([\d.]+ \| [\d.]+ \| [\d.]+ to [\d.]+) \|", text, re.M
    )
    assert len(rows) >= 10 and set(rows) <= planned


def test_the_share_of_a_baselines_tokens_is_paired_by_seed_and_variants_are_named(tmp_path):
    def add_run(dataset, name, tokens, *losses):
        """Write a finished run with evenly spaced validations."""
        run_dir = tmp_path / dataset / name
        run_dir.mkdir(parents=True)
        for file in ("model.json", "train.json"):
            shutil.copy(TWINS / "bytes-original" / file, run_dir)
        steps = [tokens * (number + 1) // len(losses) for number in range(len(losses))]
        records = [
            {"global_step": number, "tokens": step, "validation_loss": loss}
            for number, (step, loss) in enumerate(zip(steps, losses, strict=True))
        ]
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
        summary = {"status": "finished", "tokens": tokens, "validation_loss": losses[-1]}
        (run_dir / "summary.json").write_text(json.dumps(summary))

    def call():
        return CliRunner().invoke(recipes.main, ["--sweeps-dir", str(tmp_path)])

    assert isinstance(call().exception, UserError)  # no sweep has run
    for seed, shift in ((42, 0.0), (43, 0.2)):
        add_run("bytes-original", f"baseline-seed-{seed}", 1000, 3.0 + shift, 2.5 + shift)
        add_run("bytes-muon", f"baseline-seed-{seed}", 400, 2.8 + shift, 2.2 + shift * 1.5)
    add_run("bytes-muon", "learning_rate-0.01-seed-42", 400, 2.8, 2.6)
    add_run("bytes-muon", "baseline-seed-42.old", 400, 2.8, 2.6)  # no variant
    result = call()
    assert result.exit_code == 0, result.output
    rows = [re.sub(" *\\| *", "|", line) for line in result.output.splitlines()[2:]]
    baseline = "|bytes-original|1,000|2.600 (2 seeds)|bytes-muon"
    assert rows[0] == (
        f"{baseline}|400|40%|2.350 (2 seeds)|-0.250|-0.885 to +0.385|310|31.0%|18.3% to 43.7%|"
    )
    (variant,) = rows[1:]
    assert "|bytes-muon: learning_rate-0.01|" in variant and "|not reached|" in variant


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


def test_the_figures_of_one_h200_are_those_of_its_file():
    path = PROJECT_DIR / "benchmarks/throughput-h200.jsonl"
    lines = [line for line in read_lines(path) if "blocks" in line]
    speeds = {line["row"]: line["tokens_per_second"] for line in lines}
    page = (PROJECT_DIR / "benchmarks/README.md").read_text()
    rows = page.replace("**", "").splitlines()
    for line in lines:
        cells = [f"| {line['tokens_per_second']:,.0f} |", f"| {line['step_ms']:,.1f} |"]
        cells += [f"| {line['peak_mib'] / 1024:.1f} |"]
        assert any(all(cell in row for cell in cells) for row in rows), line["row"]
    others = ("Hugging Face, bf16, compiled", "nanoGPT, bf16, compiled", "original")
    ratios = [f"{speeds['ours'] / speeds[other]:.2f}" for other in others]
    assert all(f"**{ratio}**" in page for ratio in ratios)
    begins = " ".join((PROJECT_DIR / "README.md").read_text().partition("## ")[0].split())
    assert f"at {speeds['ours'] / 1000:.0f},000 tokens a second" in begins
    assert f"{ratios[0]} times Hugging Face's model and {ratios[1]} times nanoGPT's" in begins
    h200 = find_gpu("NVIDIA H200")
    measured = "original", "ours", "ours, Muon, microbatch 16"
    mfus = (h200.mfu(speeds[row] * GPT2_SMALL_FLOPS_PER_TOKEN) for row in measured)
    for mfu, figure in zip(mfus, (h200.low_mfu, h200.high_mfu, h200.own_mfu), strict=True):
        assert figure.share == pytest.approx(mfu, abs=0.0015), figure
    # Named on the page, with its likely cause.
    assert differences(lines) == ["original: its losses differ by 0.0393"]
