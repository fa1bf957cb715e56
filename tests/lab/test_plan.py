"""`lab plan`: batches, memory, hours and dollars, the speeds that it expects, a budget's length."""

import json
import os
import re

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from basics.errors import MAX_LINE_LENGTH, UserError
from basics.gpu_readings import GpuReading
from gpt import GPTModel
from lab.compare.published import fit_log_quadratic, loss_points, memory_points, read_published
from lab.compare.rows import compare
from lab.plan import speed_sources
from lab.plan.estimate import Machine, default_precision, num_checkpoints, verdict
from lab.plan.estimate import estimate as estimate_from
from lab.plan.memory import Setting, largest_microbatch, peak_memory
from lab.plan.speed_sources import expected_speed, read_measured, read_own
from optim import decay_line
from processes.distributed import Process
from processes.run_lock import release_run
from reporting.clock import PhaseClock
from reporting.estimate import Pace
from reporting.gpus import GPUS, OTHER_PRICES, PRESET_PRICES, Price, find_gpu
from reporting.summary import RunEnd, summarise
from run_config import ModelConfig, Stage, TrainConfig, load_run
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.runs import thorough_but
from tests.support.torchrun_workers import (
    GPT2_SMALL,
    MANY_TOKENS,
    MANY_WORDS,
    WIDE,
    peak_of_training,
)
from tests.support.workplace import PROJECT_DIR, TINY_MODEL, TINY_TRAIN, forked
from tests.support.workplace import succeeded as process_succeeded
from tokens.batch_plan import BatchPlan, plan_batches

BIG = {
    "vocab_size": 50257,
    "context_length": 1024,
    "emb_dim": 768,
    "n_heads": 12,
    "n_layers": 12,
    "drop_rate": 0.0,
}  # GPT-2 small
BILLION = {"min_train_tokens": 10**9, "precision": "bf16"}
WITHOUT_VALIDATION = BILLION | {
    "validation_interval": None,
    "validation_batches": None,
    "checkpoint_interval": 100,
}
BY_BATCH = BILLION | {"gradient_accumulation_steps": None}


NO_RUNS = PROJECT_DIR / "tests/no-runs"  # without the speeds of anybody's own runs


def plan(*arguments, runs_dir=NO_RUNS):
    return succeeded(run_lab("plan", *arguments, "--runs-dir", str(runs_dir), COLUMNS="200")).output


def planned(*arguments, runs_dir=NO_RUNS):
    return checked(plan(*arguments, "--json", runs_dir=runs_dir))


def by_name(document):
    return {machine.name: machine for machine in document.machines}


def rows_of(output):
    """Return the cells of the table of machines, below its heads."""
    text = output.split("\nmachine ")[1].split("\n\n")[0]
    return [re.split(r"  +", row.strip()) for row in text.splitlines()[2:]]


def configs_of(name):
    """Read the model and the settings of a run of the project."""
    run_dir = PROJECT_DIR / "runs" / name
    return (json.loads((run_dir / file).read_text()) for file in ("model.json", "train.json"))


def estimated(workplace, machine, **train):
    """Estimate a run of GPT-2 small that is made for it."""
    run_dir = workplace.add_run(
        f"run-{len(list(workplace.root.glob('runs/*')))}", model=BIG, train=BILLION | train
    )
    return estimate_from(
        load_run(workplace.runs_dir, run_dir.name),
        Machine.parse(machine),
        tokens=None,
        measured=[],
    )


def test_original_run_has_its_published_figures():
    """The machines are sorted by their expected cost; what was paid is in the estimate's range."""
    document = planned("8xa100m40", "--machine", "mine=4xH200@9.5")
    assert (document.parameters, document.tokens) == (163_009_536, 3_260_190_720)
    assert (document.checkpoint_bytes, document.flops_per_token) == (1_956_114_432, 854_438_400)
    assert document.pinned_bytes == 2 * 2**30
    for parts in document.memory_bytes.values():
        assert sum(parts.values()) == 2 * parts["total"]
    usd = [found.usd.expected for found in document.machines]
    assert usd == sorted(usd)
    assert {found.name: found.usd_per_hour for found in document.machines} == {
        "8x A100-40": 10.32,
        "8x A100-80": 14.32,
        "8x H100": 23.92,
        "8x B200": 39.92,
        "2x H100": 6.38,
        "mine": 9.5,
    }
    machine = by_name(document)["8x A100-40"]
    assert (machine.global_batch_size, machine.steps, machine.checkpoints) == (104, 30_614, 50)
    assert machine.usd.low < 35.56 < machine.usd.high


def test_the_figures_of_the_notes_are_those_of_their_page(workplace):
    model, _ = configs_of("original")
    plans = {}
    for name in ("original", "8xa100m40"):
        _, train = configs_of(name)
        train |= {"attention": "math", "compile": False}
        (workplace.add_run(name, model=model) / "train.json").write_text(json.dumps(train))
        plans[name] = planned(name, runs_dir=workplace.runs_dir)
    by_card = {row.card_gib: row.several_gpus for row in plans["original"].largest_microbatch}
    rows = compare(read_published()).rows
    (losses,) = loss_points(rows, "test_loss").values()
    (memory,) = memory_points(rows).values()
    slope, fixed = np.polyfit(*zip(*memory, strict=True), 1)
    _, (batch, _) = fit_log_quadratic(*zip(*losses, strict=True))
    (paid,) = (row.values for row in rows if row.results[0].name == "8x A100 40 GiB")
    with torch.device("meta"):
        openais = GPTModel(ModelConfig(**model | {"qkv_bias": True, "tie_weights": True}))
    original = load_run(workplace.runs_dir, "original")
    decayed = original.config.model_copy(update={"decay_norms_and_biases": False})
    counted = re.findall(r"on (\d+) tensors", decay_line(openais, decayed))
    text = (PROJECT_DIR / "docs/lab-notes.md").read_text()
    assert dict(re.findall(r"^\| (.+) \| .+ \| (.+) \|$", text, re.MULTILINE)) == {
        "figure": "here",
        "parameters of the model": f"{original.model.num_parameters:,}",
        "tokens for 20 a parameter": f"{20 * original.model.num_parameters:,}",
        "largest microbatch in 24 GiB": str(by_card[24]),
        "largest microbatch in 40 GiB": str(by_card[40]),
        "largest microbatch in 80 GiB": str(by_card[80]),
        "largest microbatch in 160 GiB (8x B200)": str(
            by_name(plans["original"])["8x B200"].largest_microbatch
        ),
        "largest microbatch in 192 GiB": str(by_card[192]),
        "hours of the train on 8x A100 40 GiB, with validation": (
            f"{by_name(plans['8xa100m40'])['8x A100-40'].hours.expected:.2f}"
        ),
        "memory of a microbatch, fixed part (GiB)": f"{fixed:.2f}",
        "memory of a microbatch, per sequence (GiB)": f"{slope:.3f}",
        "global batch at the minimum of the loss": f"{batch:.2f}",
        "US$ of the train on 8x A100 40 GiB, without validation": (
            f"{paid['usd_without_validation']:.2f}"
        ),
        "tensors with weight decay, GPT-2 small as OpenAI has it": counted[0],
        "tensors without weight decay, the same model": counted[1],
    }


def test_hours_are_computed_from_flops_and_dollars_from_hours(workplace):
    found = estimated(workplace, "x=2xH100@10", **WITHOUT_VALIDATION)
    run = load_run(workplace.runs_dir, "run-0")
    flops = found["steps"] * found["global_batch_size"] * 1024 * 854.44e6
    saving = found["checkpoints"] * 12 * 163_009_536 / 100e6
    assert found["checkpoints"] == -(-found["steps"] // run.config.checkpoint_interval)
    hours = found["hours"]
    startup = 19 + 46 + 2 * run.config.min_train_tokens / 100e6  # compilation; 100 MB/s
    assert list(hours.values()) == pytest.approx(
        (
            (startup + flops / (2 * 989e12 * 0.41)) / 3600,
            (startup + flops / (2 * 989e12 * 0.39)) / 3600,
            (startup + flops / (2 * 989e12 * 0.053) + saving) / 3600,
        ),
        rel=1e-4,
    )
    assert found["startup_hours"] * 3600 == pytest.approx(startup, rel=1e-4)
    assert found["usd"] == {name: 10 * each for name, each in hours.items()}


@pytest.mark.parametrize(
    ("where", "interval", "waiting"), [("rank0", 10**6, 1), ("all", 10, 4 / 30), ("rank0", 10, 1)]
)
def test_all_gpus_wait_for_a_validation(workplace, where, interval, waiting):
    """A validation has 30 microbatches of 2 sequences; with "all" rank 0 has 4 of them."""
    found = estimated(
        workplace,
        "x=8xH100@10",
        validation_interval=interval,
        validate_on=where,
        validation_batches=30,
    )
    count = -(-found["steps"] // interval)
    training = found["steps"] * found["global_batch_size"] * 1024 * 854.44e6 / 8
    alone = 854.44e6 / 3 * 30 * 2 * 1024 * count
    assert found["hours"]["low"] - found["startup_hours"] == pytest.approx(
        (training + alone * waiting) / (989e12 * 0.41) / 3600, rel=1e-3
    )


def test_the_share_of_validation_is_that_of_the_hours_without_it(workplace):
    train = {"validation_interval": 50, "validation_batches": 300}
    found = estimated(workplace, "x=8xH100@10", **train)
    part, number = found["validation"], -(-found["steps"] // 50)
    assert (part["number"], part["interval"]) == (number, 50)
    hours = found["hours"]["expected"] - found["startup_hours"]
    assert part["share"] == pytest.approx(part["hours"] / hours)
    assert part["usd"] == pytest.approx(10 * part["hours"])
    one_more = estimated(workplace, "x=8xH100@10", **train, validate_at_start=True)["validation"]
    assert one_more["number"] == number + 1
    assert one_more["hours"] == pytest.approx(part["hours"] * (1 + 1 / number))
    without = estimated(workplace, "x=8xH100@10", **WITHOUT_VALIDATION)["validation"]
    assert without["number"] == without["share"] == 0


@pytest.mark.parametrize(
    ("budget", "judged"),
    [(30, "fits"), (20, "probably fits"), (10, "fits if fast"), (9, "too expensive")],
)
def test_a_budget_is_compared_with_high_expected_and_low(budget, judged):
    assert verdict({"low": 10.0, "expected": 20.0, "high": 30.0}, budget) == judged


def test_global_batch_is_the_same_on_every_machine(workplace):
    workplace.add_run(model=BIG, train=BY_BATCH | {"global_batch_size": 512, "compile": False})
    machines = by_name(planned("tiny", runs_dir=workplace.runs_dir))
    assert {machine.global_batch_size for machine in machines.values()} == {512}
    assert machines["8x A100-40"].microbatch_size == 32  # not the run's own 2


def test_higher_precision_takes_longer(workplace):
    found = [
        estimated(workplace, "x=8xA100-80@10", precision=precision)
        for precision in ("bf16", "tf32", "fp32")
    ]
    hours = [each["hours"]["low"] - each["startup_hours"] for each in found]
    assert hours == pytest.approx([hours[0], 2 * hours[0], 16 * hours[0]])


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_a_gpu_without_bf16_trains_in_fp16(workplace, gpu):
    for train in ({}, {"precision": "bf16"}, {"residual_dtype": "bf16"}, {"precision": "fp16"}):
        found = estimated(workplace, f"x=1x{gpu}@1", **{"precision": None} | train)
        assert found["reason"] == ("this GPU has no bf16" if "bf16" in train.values() else None)
    config = load_run(workplace.runs_dir, "run-0").config
    assert default_precision(config, find_gpu(gpu)) == "fp16"
    assert default_precision(config) == "bf16"


@pytest.mark.parametrize(
    ("train", "machine", "reason"),
    [
        ({"microbatch_size": 60}, "8x A100-40", "does not fit in memory"),
        (BY_BATCH | {"global_batch_size": 9}, "8x H100", "batch not divisible"),
    ],
)
def test_machine_that_cannot_train_the_run_shows_the_reason(workplace, train, machine, reason):
    workplace.add_run(model=BIG, train=BILLION | train | {"precision": "fp32"})
    assert by_name(planned("tiny", runs_dir=workplace.runs_dir))[machine].reason == reason


def test_tokens_are_required_only_if_min_train_tokens_is_minus_1(workplace):
    workplace.add_run(model=BIG, train={"min_train_tokens": -1})
    assert "min_train_tokens is -1; --tokens goes with -1" in error_line(
        run_lab("plan", "tiny", "--runs-dir", str(workplace.runs_dir))
    )
    assert "1,000,000 tokens" in plan("tiny", "--tokens", "1000000", runs_dir=workplace.runs_dir)
    assert "drop it" in error_line(run_lab("plan", "original", "--tokens", "1000000"))


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "a=0xH100@3",
        "a=2xH100@-3",
        "a=2xH100@0",
        "2xFoo@3",
        "seventeen letters=2xH100@3",
    ],
)
def test_malformed_machine_is_a_user_error(text):
    with pytest.raises(UserError) as caught:
        Machine.parse(text)
    assert repr(text) in str(caught.value)  # as it was typed
    assert len(f"Error: {caught.value}") <= MAX_LINE_LENGTH  # nothing is cut out of it


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({"validation_interval": 5, "checkpoint_interval": None}, 3),  # 5, 10, 12
        ({"validation_interval": 5, "checkpoint_interval": 4}, 5),  # 4, 5, 8, 10, 12
        ({"validation_interval": 4, "checkpoint_interval": 6}, 4),  # 4, 6, 8, 12
        ({"validation_interval": 4}, 3),  # 4, 8, 12
        ({"validation_interval": 50}, 1),
    ],
)
def test_num_checkpoints_counts_each_saved_step_once(workplace, train, count):
    workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    assert num_checkpoints(run, plan_batches(run, world_size=2, file_tokens=4000)) == count


@pytest.mark.parametrize(("keep", "kept"), [(None, 21), (3, 5), (30, 21)])
def test_checkpoints_on_disk_are_those_that_are_kept(workplace, keep, kept):
    """Beside those that a limit keeps are the best one and the one that is being written."""
    train = {"min_train_tokens": 21 * 96 * 1024, "global_batch_size": 96, "checkpoint_interval": 1}
    keys = WITHOUT_VALIDATION | BY_BATCH | train | {"keep_checkpoints": keep}
    workplace.add_run(model=BIG, train=keys)
    for machine in planned("tiny", runs_dir=workplace.runs_dir).machines:
        assert (machine.checkpoints, machine.checkpoints_kept) == (21, kept)


def test_a_budget_considers_each_known_price_also_of_single_cards():
    machines = planned("gpt2-small-one-dollar", "--machine", "m=4xH200@9.5", "--budget", "8")
    assert len(machines.machines) == len(PRESET_PRICES) + len(OTHER_PRICES) + 1
    for found in machines.machines:
        assert found.budget == verdict(found.usd.model_dump(), 8)
    assert any(found.num_gpus == 1 and found.budget == "fits" for found in machines.machines)


# Prices, and what a US dollar buys

PRICE = {
    "gpu": "RTX-4090",
    "num_gpus": 1,
    "usd_per_hour": 0.45,
    "month": "2026-05",
    "kind": "on demand",
    "source_kind": "marketplace",
    "provider": "somebody",
    "source": "a page",
}
ONE_DOLLAR = ("gpt2-small-one-dollar", "--compare")


def price_rows(output):
    """Return the cells of the table of a comparison."""
    table = output.split("\n\n")[0]
    return [re.split(r"  +", row) for row in table.splitlines()[3:]]


def test_every_shipped_price_is_of_a_known_gpu_once_and_plausible():
    prices = [*PRESET_PRICES, *OTHER_PRICES]
    offers = {(each.gpu, each.num_gpus, each.usd_per_hour, each.kind) for each in prices}
    assert len(offers) == len(prices)
    for price in prices:
        assert 0.05 < price.usd_per_hour / price.num_gpus < 20, price
        assert find_gpu(price.gpu) in GPUS and "://" not in price.source, price


@pytest.mark.parametrize(
    "change",
    [
        {"month": "May 2026"},
        {"month": "2026-13"},
        {"kind": "cheap"},
        {"source_kind": "hearsay"},
        {"usd_per_hour": 0.0},
        {"num_gpus": 0},
        {"source": None},
        {"price": 1.0},
    ],
    ids=str,
)
def test_a_price_without_its_month_kind_or_source_is_refused(change):
    assert Price(**PRICE).note == ""
    with pytest.raises(ValidationError):
        Price(**PRICE | change)


def test_a_comparison_shows_each_known_price_and_the_tokens_of_a_dollar():
    document = planned(*ONE_DOLLAR)
    shipped = [each.model_dump() for each in (*PRESET_PRICES, *OTHER_PRICES)]
    assert len(document.machines) == len(shipped)
    assert all(found.price.model_dump() in shipped for found in document.machines)
    rows = price_rows(plan(*ONE_DOLLAR))
    for row, found in zip(rows, document.machines, strict=True):
        peak = find_gpu(found.gpu).peak("bf16")
        speed = found.num_gpus * found.mfu * peak / document.flops_per_token
        assert found.tokens_per_second == pytest.approx(speed)
        assert found.tokens_per_usd == pytest.approx(speed * 3600 / found.price.usd_per_hour)
        is_measured = (found.gpu, found.num_gpus) == ("H200", 1)
        assert found.source in (("measured",) if is_measured else ("public", "assumed"))
        about_price = [f"{found.usd_per_hour:.2f}", found.price.kind, found.price.month]
        assert [row[0].removesuffix(" *"), *row[1:4]] == [found.name, *about_price]
        assert row[6] == f"{found.usd.expected:.2f}"


def test_a_comparison_has_own_speeds_and_what_does_not_fit(workplace):
    workplace.add_run(model=BIG, train=BILLION | {"microbatch_size": 60})
    add_summary(workplace.runs_dir, "mine")
    options = ("--compare", "--machine", "today=1xH100@2", "--machine", "small=1xRTX-4090@0.4")
    machines = by_name(planned("tiny", *options, runs_dir=workplace.runs_dir))
    for name in ("today", "1x H100"):
        assert machines[name].source == "own run"
        assert machines[name].tokens_per_second == pytest.approx(375_000, rel=1e-3)  # of one card
    assert machines["today"].price is None and machines["1x A100-80"].source == "public"
    assert machines["small"].reason == "does not fit in memory"


@pytest.mark.parametrize(
    ("machine", "marked"), [("mine=1xRTX-4090@0.01", "mine *"), ("mine=1xT4@9", "1x RTX-4090 *")]
)
def test_the_row_to_take_is_the_cheapest_machine_that_is_not_spot(machine, marked):
    rows = price_rows(plan(*ONE_DOLLAR, "--machine", machine))
    (place,) = (place for place, row in enumerate(rows) if row[0].endswith(" *"))
    assert rows[place][0] == marked and all(row[2] == "spot" for row in rows[:place])


@pytest.mark.parametrize(
    ("width", "layers", "is_known"), [(64, 4, False), (256, 8, False), (512, 8, True)]
)
def test_no_speed_is_estimated_for_a_model_that_is_too_small_for_the_formula(
    workplace, width, layers, is_known
):
    """From a tenth of GPT-2 small's FLOPs per token on there is a figure, or with an own run."""
    small = {"emb_dim": width, "n_layers": layers, "n_heads": 4, "vocab_size": 4096}
    workplace.add_run(model=BIG | small, train=BILLION)
    model = load_run(workplace.runs_dir, "tiny").model
    for found in planned("tiny", runs_dir=workplace.runs_dir).machines:
        assert found.reason == (None if is_known else "too small for the formula")
    of_half_the_peak = LAUNCH["tokens"] * model.flops_per_token / 8 / 989e12 / 0.5
    launch = LAUNCH | {"seconds": of_half_the_peak}
    add_summary(workplace.runs_dir, "mine", model=model.model_dump(), this_launch=launch)
    of_own = by_name(planned("tiny", runs_dir=workplace.runs_dir))["8x H100"]
    assert of_own.source == "own run" and of_own.hours.expected > 0


@pytest.mark.parametrize("options", [(), ("--compare",)])
def test_the_plan_of_a_run_that_has_trained_here_says_first_how_long_it_takes(workplace, options):
    train = WITHOUT_VALIDATION | {"min_train_tokens": 7200 * STEP}
    launch = {"steps": 50, "tokens": 50 * STEP, "seconds": 5.0}
    run_dir = add_measured(workplace, file="summary.json", train=train, this_launch=launch)
    assert plan("tiny", *options, runs_dir=run_dir.parent).startswith("here about 0:12:00, ")
    (run_dir / "summary.json").unlink()
    assert "here about" not in plan("tiny", *options, runs_dir=run_dir.parent)


def test_the_comparison_of_the_page_is_that_of_the_command():
    text = (PROJECT_DIR / "docs/rented-machines.md").read_text()
    section = text.partition("## Which card\n")[2].partition("\n## ")[0]
    (shown,) = re.findall(r"^```text\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    assert f"`uv run lab plan {' '.join(ONE_DOLLAR)}`" in section
    assert shown == plan(*ONE_DOLLAR).split("\n\n")[0]


# Memory, compared with PyTorch's profiler, and with a GPU if there is one

SHAPES = {"many tokens": MANY_TOKENS, "large vocabulary": MANY_WORDS, "wide": WIDE}
ONE_STEP = {"microbatch_size": 6, "gradient_accumulation_steps": 1}
CHANGES = {
    "microbatch 1": ONE_STEP | {"microbatch_size": 1},
    "microbatch 6": ONE_STEP,
    "accumulation and dropout": ONE_STEP | {"gradient_accumulation_steps": 2, "drop_rate": 0.1},
    "tied weights": ONE_STEP | {"microbatch_size": 3, "tie_weights": True, "qkv_bias": True},
    "one head chunk": ONE_STEP | {"head_chunks": 1},
    "three head chunks": ONE_STEP | {"gradient_accumulation_steps": 2, "head_chunks": 3},
    "activation checkpointing": ONE_STEP | {"activation_checkpointing": True},
    "math attention": ONE_STEP | {"attention": "math"},
    "math attention and dropout": ONE_STEP | {"attention": "math", "drop_rate": 0.1},
    "muon": ONE_STEP | {"microbatch_size": 1, "optimizer": "muon"},
}
CASES = [
    ([*SHAPES][(i + j) % len(SHAPES)], precision, change)  # each change with two shapes
    for i, change in enumerate(CHANGES)
    for j, precision in enumerate(("fp32", "bf16"))
]
CHANGES["residual stream in bf16"] = ONE_STEP | {"residual_dtype": "bf16"}
CASES.append(("many tokens", "bf16", "residual stream in bf16"))
CPU = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def configs(shape, **changes):
    model = {k: v for k, v in changes.items() if k in ModelConfig.model_fields}
    train = {k: v for k, v in changes.items() if k in TrainConfig.model_fields}
    return (
        ModelConfig(**{"drop_rate": 0.0, "qkv_bias": False} | shape | model),
        TrainConfig(**TINY_TRAIN | train),
    )


@pytest.mark.parametrize("has", [False, True])
def test_num_parameters_equals_that_of_the_built_model(has):
    model = ModelConfig(**TINY_MODEL | {"tie_weights": has, "qkv_bias": has})
    assert model.num_parameters == sum(each.numel() for each in GPTModel(model).parameters())


@pytest.mark.parametrize(
    ("shape", "precision", "change"),
    # Training in bf16 is slow on CPUs without instructions for it.
    thorough_but(
        [
            case
            for case in CASES
            if case[1] == "fp32" or case[2] in ("microbatch 1", "muon", "residual stream in bf16")
        ],
        CASES,
    ),
)
def test_prediction_is_within_10_percent_of_the_measured_peak(shape, precision, change):
    model, train = configs(SHAPES[shape], precision=precision, **CHANGES[change])
    measured = peak_of_training(model, train, CPU)
    setting = Setting(model, train, precision, num_processes=1, on_gpu=False)
    assert peak_memory(setting, train.microbatch_size).total == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.thorough)])
def test_ddp_buckets_replace_gradients_with_several_processes(optimizer, workplace):
    model, train = configs(WIDE, **ONE_STEP, precision="fp32", optimizer=optimizer)
    workplace.add_run(model=model.model_dump(), train=train.model_dump(exclude_none=True))
    worker = ["peak-memory", str(workplace.root)]
    result = forked("tests/support/torchrun_workers.py", worker, num_processes=2)
    measured = int(process_succeeded(result).stdout.split()[-1])
    setting = Setting(model, train, "fp32", num_processes=2, on_gpu=False)
    predicted = peak_memory(setting, 6)
    assert (predicted.buckets, predicted.gradients) == (4 * model.num_parameters, 0)
    assert predicted.buckets > 0.1 * measured
    assert predicted.total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("num_processes", [1, 8])
@pytest.mark.parametrize("global_batch_size", [None, 12, 40])
def test_largest_microbatch_fits_and_the_next_one_does_not(global_batch_size, num_processes):
    model, train = configs(GPT2_SMALL, **ONE_STEP)
    train = train.model_copy(update={"global_batch_size": global_batch_size})
    setting = Setting(model, train, "bf16", num_processes)
    for gib in (2, 11.6, 39, 180):
        largest = largest_microbatch(setting, gib)
        sizes = range(1, largest + 1)
        assert all(peak_memory(setting, size).total <= gib * 2**30 for size in sizes)
        if global_batch_size is None:
            assert peak_memory(setting, largest + 1).total > gib * 2**30


# Expected speeds: own runs, shipped measurements, estimates

H100 = "NVIDIA H100 80GB HBM3"
LAUNCH = {"steps": 999, "tokens": 3_000_000_000, "seconds": 1000.0}  # 3 M tokens a second
MACHINE = {
    "device": H100,
    "device_type": "cuda",
    "processes": 8,
    "precision": "bf16",
    "compiled": True,
    "attention": "flash",
    "torch": "2.11",
}
MODEL = load_run(PROJECT_DIR / "runs", "original").model.model_copy(update={"drop_rate": 0.0})
TRAIN = load_run(PROJECT_DIR / "runs", "gpt2-small-1gpu").config
WANTED = Setting(MODEL, TRAIN, "bf16", num_processes=1)


CHECKPOINTED = {"attention": "math", "activation_checkpointing": True}


def add_summary(runs_dir, name, *, age=0, **changes):
    """Write a summary of 1,000 steps at 3 M tokens a second on eight H100."""
    path = runs_dir / name / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "run": "mine",
                "status": "finished",
                "global_step": 999,
                "tokens": 3_003_003_003,
                "seconds": {"training": 5e6, "waiting": 1.0},
                "this_launch": LAUNCH,
                "machine": MACHINE,
                "model": MODEL.model_dump(),
                "train": {"activation_checkpointing": False, "microbatch_size": 64},
            }
            | changes
        )
    )
    os.utime(path, (1_700_000_000 - age,) * 2)
    return path


def expected(runs_dir, device=H100, wanted=WANTED):
    return expected_speed(wanted, find_gpu(device), read_measured(runs_dir))


UNLIKE = [
    {"status": "failed"},
    {"this_launch": None},
    {"this_launch": LAUNCH | {"steps": 48}},
    {"machine": MACHINE | {"compiled": False}},
    {"machine": MACHINE | {"precision": "tf32"}},
    {"machine": MACHINE | {"attention": "math"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 NVL"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}},
    {"machine": MACHINE | {"device_type": "cpu"}},
    {"machine": "NVIDIA H100 80GB HBM3"},
    {"train": {"activation_checkpointing": True}},
    {"model": MODEL.model_dump() | {"n_layers": 36}},  # more than twice the FLOPs
    {"model": MODEL.model_dump() | {"drop_rate": 0.1}},
    {"this_launch": LAUNCH | {"tokens": 10**14}},
    {"this_launch": LAUNCH | {"tokens": 10**7}},
    {"this_launch": LAUNCH | {"seconds": 0}},
    {"this_launch": LAUNCH | {"tokens": "3000"}},
    {"model": {}},
]
LIKE = [
    {"status": "stopped"},
    {"this_launch": {"steps": 49, "tokens": 3_000_000, "seconds": 1.0}},
    {"machine": MACHINE | {"precision": "fp16"}},
    {"machine": MACHINE | {"attention": "cudnn"}},
    {"model": MODEL.model_dump() | {"n_layers": 24}},
]


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        *((one, "public") for one in UNLIKE),
        *((one, "own run") for one in LIKE),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_speed_is_that_of_an_own_run_if_it_can_be_compared(tmp_path, changes, source):
    add_summary(tmp_path, "mine", **changes)
    assert expected(tmp_path).source == source


def test_the_nearest_in_size_and_then_the_newest_run_is_used(tmp_path):
    add_summary(tmp_path, "smaller", model=MODEL.model_dump() | {"n_layers": 8}, age=0)
    assert expected(tmp_path).detail.endswith("(run smaller)")
    for name, age in (("old", 300), ("new", 100), ("middle", 200)):
        add_summary(tmp_path, name, age=age)
    assert expected(tmp_path).detail.endswith("(run new)")


@pytest.mark.parametrize(
    ("device", "model", "train", "precision", "mfu", "source"),
    [
        (H100, {}, {}, "bf16", 0.39, "public"),
        ("AMD Instinct MI300X", {}, {}, "bf16", 0.32, "assumed"),
        ("NVIDIA H200", {}, {}, "bf16", 0.45, "measured"),
        ("NVIDIA H200", {"drop_rate": 0.1}, {}, "bf16", 0.45, "assumed"),
        # A public figure counts only for a run like GPT-2 small, compiled, in 16 bits.
        (H100, {}, {}, "fp32", 0.39, "assumed"),
        (H100, {}, {}, "tf32", 0.39, "assumed"),
        (H100, {"drop_rate": 0.1}, {}, "bf16", 0.39, "assumed"),
        (H100, {"n_layers": 36}, {}, "bf16", 0.39, "assumed"),
        (H100, {"vocab_size": 99, "n_layers": 1, "emb_dim": 96}, {}, "bf16", 0.39, "assumed"),
        (H100, {}, {"compile": False}, "fp32", 0.39, "assumed"),
        (H100, {}, {"activation_checkpointing": True}, "bf16", 0.75 * 0.39, "assumed"),
        (H100, {}, {"sampled_softmax": 8192}, "bf16", 0.39, "assumed"),
        # The speed of the original system is that of a run in its form.
        (H100, {}, {"compile": False}, "bf16", 0.053, "public"),
        (H100, {"drop_rate": 0.1}, {"attention": "math"}, "bf16", 0.053, "public"),
        (H100, {}, CHECKPOINTED, "bf16", 0.75 * 0.053, "assumed"),
        (H100, {"n_layers": 36}, {"compile": False}, "bf16", 0.053, "assumed"),
        ("NVIDIA L4", {}, {"compile": False}, "bf16", 0.05, "assumed"),
    ],
)
def test_a_speed_without_an_own_run_is_measured_or_public_for_such_a_run_else_assumed(
    tmp_path, device, model, train, precision, mfu, source
):
    model, train = MODEL.model_copy(update=model), TRAIN.model_copy(update=train)
    found = expected(tmp_path, device, Setting(model, train, precision, 1))
    assert (found.mfu, found.source) == (pytest.approx(mfu), source)


def test_what_was_measured_on_one_gpu_is_not_expected_of_several(tmp_path):
    found = expected(tmp_path, "NVIDIA H200", Setting(MODEL, TRAIN, "bf16", 2))
    assert (found.mfu, found.source) == (0.39, "public")


@pytest.mark.parametrize(("seconds", "is_slow"), [(750.0, False), (15_000.0, True)])
def test_the_plan_of_a_run_uses_an_own_run_and_says_which(workplace, seconds, is_slow):
    """One that is faster or slower than all public figures is the lowest or highest estimate."""
    workplace.add_run(model=MODEL.model_dump(), train=WITHOUT_VALIDATION)
    add_summary(workplace.runs_dir, "mine", this_launch=LAUNCH | {"seconds": seconds})
    found = by_name(planned("tiny", runs_dir=workplace.runs_dir))["8x H100"]
    assert found.source == "own run" and "(run mine)" in found.detail
    # Of the last launch alone, after its first step.
    assert found.mfu == pytest.approx(3e9 / seconds * 854.44e6 / 8 / 989e12, rel=1e-4)
    hours, training = found.hours, 10**9 / (3e9 / seconds) / 3600
    assert hours.expected - found.startup_hours == pytest.approx(training, rel=1e-4)
    assert hours.low < hours.expected < hours.high if is_slow else hours.low == hours.expected


def test_the_summary_of_a_resumed_run_tells_the_speed_of_its_last_launch(workplace):
    workplace.add_run(model=MODEL.model_dump())
    run = load_run(workplace.runs_dir, "tiny")
    clock, plan = PhaseClock(), BatchPlan(8, 1, 8, 1024, 2000)
    clock.resume({"training": 5000.0, "waiting": 1.0}, {})
    pace = Pace(run, plan, clock)
    pace.begin(run.stages(2000, first_step=900))
    clock._spent |= {"training": 8.0, "waiting": 2.0}

    def speed():
        launch, facts = pace.this_launch(999), {"machine": MACHINE}
        end = RunEnd(999, None, lacks_validation=False, this_launch=launch, facts=facts)
        run.summary_path.write_text(json.dumps(summarise(run, plan, clock, end, [])))
        own = read_own(run.run_dir)
        return own.tokens_per_second, own.model

    assert speed() == (pytest.approx(99 * 65536 / 10), MODEL)
    # The model has grown 50 steps ago, or it has one layer yet.
    for model in (MODEL, MODEL.with_layers(1)):
        pace.begin([Stage(model, range(949, 2000))])
        clock._spent["training"] += 20.0
        assert speed() == (pytest.approx(50 * 65536 / 20), model)


# The length that a budget buys, at a measured speed

STEP = 2 * 2 * 2 * 16  # tokens of a step on two processes
SHORT = {"steps": 49, "tokens": 49 * STEP, "seconds": 4.9}  # 10 steps a second


@pytest.fixture(autouse=True)
def released(monkeypatch):
    monkeypatch.setattr(speed_sources, "read_gpus", list)
    yield
    release_run()


def add_measured(workplace, *, file="microbatch-search.json", train=None, **changes):
    """Write a run with a file of a speed: 10 steps a second on two processes."""
    run_dir = workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    record = {
        "tokens_per_second": 10.0 * STEP,
        "machine": {"device": "A100", "processes": 2},
        "model": run.model.model_dump(),
        "train": run.config.model_dump(),
    } | changes
    (run_dir / file).write_text(json.dumps(record))
    return run_dir


def save(workplace, *arguments):
    return run_lab("plan", "tiny", "--runs-dir", str(workplace.runs_dir), "--save", *arguments)


@pytest.mark.parametrize(
    ("speed", "growth_at"),
    [
        ({}, 0),
        ({"file": "summary.json", "tokens_per_second": 1.0, "this_launch": SHORT}, 0),
        ({"train": {"grow": {"at": 0.5}}}, 0.5),
    ],
)
def test_the_length_is_what_the_budget_buys_at_the_measured_speed(workplace, speed, growth_at):
    """It was measured with all layers; before a growth a step and a validation cost less."""
    run_dir = add_measured(workplace, **speed)
    result = succeeded(save(workplace, "--budget", "10", "--usd-per-hour", "3600"))  # 10 seconds
    tokens = json.loads((run_dir / "train.json").read_text())["min_train_tokens"]
    steps, rest = divmod(tokens, STEP)
    assert rest == 0
    model = load_run(workplace.runs_dir, "tiny").model
    small, whole = (model.with_layers(n).flops_per_token for n in (1, 2))

    def seconds(steps):
        growth = round(growth_at * steps)
        flops = STEP * (growth * small + (steps - growth) * whole)
        for step in range(1, steps + 1):
            if step % 5 == 0 or step == steps:
                # A validation of 6 sequences on one of two processes, while the other one waits.
                flops += 2 * 6 * 16 / 3 * (small if step <= growth else whole)
        return flops / (10 * STEP * whole)

    assert seconds(steps) <= 10 < seconds(steps + 1)
    saved = f"{run_dir / 'train.json'}: min_train_tokens {tokens} ({steps} steps)\n"
    assert saved in result.output and f"US${seconds(steps):.2f} at 3600" in result.output


def test_a_plan_has_hours_and_dollars_of_both_parts_of_a_growth(workplace):
    whole = estimated(workplace, "box=8xH100@20")
    grown = estimated(workplace, "box=8xH100@20", grow={"from_layers": 1, "at": 0.5})
    # Matrices of 12 L C^2, the head, and attention, without validation: MFLOP per token.
    small, large = 6 * (12 * 768**2 + 50257 * 768) + 12 * 1024 * 768, 854.438400e6
    share = (small + large) / 2 / large
    first, second = grown["parts"]
    assert (first["n_layers"], second["n_layers"]) == (1, 12)
    assert first["steps"] + second["steps"] == grown["steps"]
    for key, price in (("hours", 1), ("usd", 20)):
        (training, shortened) = (
            found[key]["expected"] - found["startup_hours"] * price for found in (whole, grown)
        )
        assert shortened == pytest.approx(share * training, rel=1e-3)
        assert first[key] + second[key] == pytest.approx(shortened)
        assert first[key] / second[key] == pytest.approx(small / large, rel=1e-3)
    more = grown["startup_hours"] - whole["startup_hours"]  # it compiles once more
    assert more == pytest.approx(46 / 3600, rel=1e-3)
    assert grown["tokens_per_second"] == pytest.approx(whole["tokens_per_second"] / share, rel=1e-3)
    assert second["tokens_per_second"] == pytest.approx(whole["tokens_per_second"])
    assert "\ngrows: 1 layer for 50% of the steps" in plan("run-1", runs_dir=workplace.runs_dir)
    document = planned("run-1", runs_dir=workplace.runs_dir)
    assert document.flops_per_token == pytest.approx((small + large) / 2)


def test_all_other_text_of_the_file_stays(workplace):
    rest = (
        ' "microbatch_size": 2, "gradient_accumulation_steps": 2, "checkpoint_interval": 5,'
        ' "precision": "fp32", "usd_per_hour": 3600.0}'
    )
    run_dir = add_measured(workplace)
    for before, after in (
        (
            '{ "dataset" : "tiny",\n\n  "min_train_tokens" :1536 ,',
            '{ "dataset" : "tiny",\n\n  "min_train_tokens" :12800 ,',
        ),
        ('{\n\t"dataset": "tiny",', '{\n\t"min_train_tokens": 12800,\n\t"dataset": "tiny",'),
    ):
        (run_dir / "train.json").write_text(before + rest)
        succeeded(save(workplace, "--budget", "10.01"))
        assert (run_dir / "train.json").read_text() == after + rest
        release_run()


NOT_MEASURED = (
    "no speed was measured with its settings on this machine; run ddp_train.py tiny"
    " --find-max-microbatch --save"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "elsewhere.json"},
        {"model": {}},
        {"machine": "A100"},
        {"tokens_per_second": None},
        {"tokens_per_second": 1e300},
        {"machine": {"device": "A100", "processes": 10**400}},
        {"machine": {"processes": 2}},
        {"file": "summary.json", "this_launch": SHORT | {"steps": 48}},
        {"file": "summary.json", "this_launch": SHORT | {"seconds": 0}},
        {"train": None},
        {"train": TINY_TRAIN | {"microbatch_size": 4}},
        {"train": TINY_TRAIN | {"optimizer": "muon"}},
        {"train": TINY_TRAIN | {"compile": True}},
    ],
    ids=str,
)
def test_without_a_speed_of_such_a_run_nothing_is_written(workplace, changes):
    of_file = {"file": changes.pop("file")} if "file" in changes else {}
    run_dir = add_measured(workplace, **of_file)
    for path in run_dir.glob("*[hy].json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    before = workplace.files()
    assert NOT_MEASURED in error_line(save(workplace, "--budget", "10", "--usd-per-hour", "3600"))
    assert workplace.files() == before


@pytest.mark.parametrize(
    ("gpus", "is_here"),
    [(["A100", "A100"], True), (["H100"], False), (["A100"], False), ([None], True)],
)
def test_a_speed_of_other_gpus_than_this_machine_has_is_not_used(
    workplace, monkeypatch, gpus, is_here
):
    add_measured(workplace)
    readings = [GpuReading(name=name) for name in gpus]
    monkeypatch.setattr(speed_sources, "read_gpus", lambda: readings)
    result = save(workplace, "--budget", "10", "--usd-per-hour", "3600")
    assert is_here or NOT_MEASURED in error_line(result)
    assert (result.exit_code == 0) == is_here


def test_a_run_that_has_begun_keeps_its_length(workplace):
    run_dir = add_measured(
        workplace,
        train=WITHOUT_VALIDATION | {"min_train_tokens": 100 * STEP - 5, "usd_per_hour": 3600.0},
    )
    checkpoint = run_dir / "checkpoints/20261123Z120000-iteration-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    before = workplace.files()
    assert (
        "has checkpoints, so its length cannot become 200 steps; to start over with that, move"
        " checkpoints/ away"
    ) in error_line(save(workplace, "--budget", "20.01"))
    assert workplace.files() == before
    release_run()
    assert "12800 (100 steps)" in succeeded(save(workplace, "--budget", "10.01")).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "9"], "--save needs the machine's price; set usd_per_hour, or pass"),
        (["--budget", "0.0001", "--usd-per-hour", "36"], "buys no step, which costs US$0.0"),
        ([], "--save needs --budget"),
        (["--budget", "9", "--json"], "--json does not go with --save"),
        (["--budget", "9", "--machine", "a=1xH100@2"], "--machine does not go with --save"),
        (["--budget", "9", "--compare"], "--compare does not go with --save"),
    ],
)
def test_what_cannot_be_saved_is_one_line(workplace, arguments, message):
    add_measured(workplace)
    before = workplace.files()
    assert message in error_line(save(workplace, *arguments))
    assert workplace.files() == before
