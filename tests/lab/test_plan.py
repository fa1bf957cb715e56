from __future__ import annotations

import json
import re
import sys

import pytest

from basics.errors import MAX_LINE_LENGTH, UserError
from lab.plan.estimate import Bounds, Estimate, num_checkpoints
from lab.plan.estimate import estimate as estimate_from
from lab.plan.machines import Machine, known_machines, parse_machine
from lab.plan.speed_sources import SpeedSources
from lab.plan.tables import verdict
from run_config import Run, load_run
from tests.support.json_schemas import checked
from tests.support.lab_cli import run_lab
from tests.support.plan_output import (
    BIG,
    HOURS,
    HOURS_RANGE,
    USD,
    USD_RANGE,
    VALIDATION,
    batch_rows,
    cost_rows,
    low_to_high,
    number,
    plan,
)
from tests.support.workplace import Workplace, run_command, succeeded
from tokens.batch_plan import plan_batches


def estimate(run: Run, machine: Machine) -> Estimate:
    return estimate_from(run, machine, tokens=None, sources=SpeedSources())


def test_original_run_has_its_published_figures() -> None:
    output = plan("8xa100m40")
    assert "GPT-2 small, untied (163M), 163,009,536 parameters; 3,260,190,720 tokens\n" in output
    assert "\n20.0 tokens per parameter" in output and "50: 14% / 2.0%" in output
    assert re.search(r"validation every.*\n.* 617 steps", output)
    assert "854.4 MFLOP per token" in output
    assert ("disk: 1.96 GB a checkpoint (how many: below), 6.52 GB or more for the tokens,"
            " 6.00 GB for the packages\n"
            "host RAM: rank 0 pins about 2.00 GiB on a GPU, for the copy from which checkpoints are"
            " written\nbetween several GPUs: 652 MB of gradients a step (all_reduce_dtype fp32)\n"
            ) in output
    row = next(row for row in batch_rows(output) if row[0] == "8x A100-40")
    assert row[1] == "13 x 1"
    assert row[3:5] == ["104", "30,614"]  # global batch, steps
    assert row[5:] == ["50 (97.8 GB)", "50"]  # the published number of validations


def test_gradients_in_bf16_halve_what_is_sent_between_the_gpus(workplace: Workplace) -> None:
    for dtype, sent in (("fp32", "59.9 kB"), ("bf16", "30.0 kB")):
        workplace.add_run(dtype, train={"all_reduce_dtype": dtype, "min_train_tokens": 9999})
        assert (f"\nbetween several GPUs: {sent} of gradients a step (all_reduce_dtype {dtype})\n"
                in plan(dtype, runs_dir=workplace.runs_dir))


def test_memory_is_shown_by_part_and_the_parts_add_up() -> None:
    output = plan("original")
    for part in ("weights", "optimizer", "gradients", "DDP buckets", "activations", "logits"):
        assert re.search(rf"^{part}.* \d+\.\d\d +\d+\.\d\d$", output, re.MULTILINE)
    block = output.split("GiB at the peak", 1)[1].split("\n\n")[0].splitlines()[1:]
    numbers = [[float(n) for n in line.split()[-2:]] for line in block]
    for column in (0, 1):
        parts = [row[column] for row in numbers]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.04)


def test_machines_are_sorted_by_expected_cost() -> None:
    output = plan("original", "--machine", "mine=4xH200@9.5")
    rows = cost_rows(output)
    assert sorted(row[0] for row in rows) == ["2x H100", "8x A100-40", "8x A100-80", "8x B200",
                                              "8x H100", "mine"]
    costs = [number(row[USD]) for row in rows]
    assert costs == sorted(costs)
    assert [row[0] for row in batch_rows(output)] == [row[0] for row in rows]
    for row in rows:
        for expected, bounds in ((HOURS, HOURS_RANGE), (USD, USD_RANGE)):
            low, high = low_to_high(row[bounds])
            assert low < number(row[expected]) < high


def test_hours_are_computed_from_flops_and_dollars_from_hours(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={"min_train_tokens": 10**9, "validation_interval": None,
                                        "validation_batches": None, "checkpoint_interval": 100,
                                        "precision": "bf16"})
    run = load_run(workplace.runs_dir, "tiny")
    found = estimate(run, parse_machine("x=2xH100@10"))
    flops = found.plan.num_tokens * 854.44e6
    saving = num_checkpoints(run, found.plan) * 12 * 163_009_536 / 100e6
    hours = found.hours
    assert (hours.low, hours.expected, hours.high) == pytest.approx((
        flops / (2 * 989e12 * 0.41) / 3600,
        flops / (2 * 989e12 * 0.39) / 3600,
        (flops / (2 * 989e12 * 0.053) + saving) / 3600), rel=1e-4)
    assert found.usd == Bounds(*(10 * each for each in (hours.low, hours.expected, hours.high)))


def test_all_gpus_wait_for_a_validation_on_rank_0(workplace: Workplace) -> None:
    hours = []  # with "all" rank 0 has 4 of 30 microbatches
    for name, interval, where, validating_gpus in (
            ("seldom", 10**6, "rank0", 1), ("shared", 10, "all", 30 / 4),
            ("often", 10, "rank0", 1)):
        workplace.add_run(name, model=BIG, train={
            "min_train_tokens": 10**9, "validation_interval": interval, "validate_on": where,
            "validation_batches": 30, "precision": "bf16"})
        run = load_run(workplace.runs_dir, name)
        found = estimate(run, parse_machine("x=8xH100@10"))
        hours.append(found.hours.low)
        flops = 854.44e6 / 3 * 30 * 2 * 1024 * -(-found.plan.num_steps // interval)
        validating = flops / (989e12 * 0.41) / 3600 / validating_gpus
        assert found.hours.low == pytest.approx(
            found.plan.num_tokens * 854.44e6 / (8 * 989e12 * 0.41) / 3600 + validating, rel=1e-3)
    assert hours[0] < hours[1] < hours[2]


@pytest.mark.parametrize(("where", "counted"), [("rank0", 0), ("all", 1)])
def test_validation_shares_are_shown_for_rank_0_and_for_all(
    workplace: Workplace, where: str, counted: int
) -> None:
    """Validation has a third of the FLOPs: 80 of 800 sequences, 8 GPUs, all but one idle."""
    workplace.add_run(model=BIG, train={
        "min_train_tokens": 8000 * 1024, "global_batch_size": 80, "validate_on": where,
        "gradient_accumulation_steps": None, "validation_interval": 10, "precision": "bf16",
        "validation_batches": None, "validation_sequences": 80})
    output = plan("tiny", "--machine", "one=1xH100@3", runs_dir=workplace.runs_dir)
    shares = {row[0]: row[VALIDATION] for row in cost_rows(output)}
    assert shares["8x H100"] == "10: 21% / 3.2%" and shares["one"] == "10: 3.2%"
    found = estimate(load_run(workplace.runs_dir, "tiny"), parse_machine("x=8xH100@10"))
    assert found.validation == pytest.approx((80 / 3 / (100 + 80 / 3), 10 / 3 / (100 + 10 / 3)))
    training = found.plan.num_tokens * 854.44e6 / (8 * 989e12 * 0.39) / 3600
    assert found.hours.expected * (1 - found.validation[counted]) == pytest.approx(training, 1e-4)
    assert f'"validate_on": "{where}" is counted' in " ".join(output.split())
    assert "validation every" in output and " 10 steps" in output


def test_a_run_without_validation_has_no_such_column(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={
        "min_train_tokens": 10**9, "validation_interval": None, "validation_batches": None,
        "checkpoint_interval": 100, "precision": "bf16"})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert "validation every" not in output and "validate_on" not in output
    assert {row[-1] for row in cost_rows(output)} == {"public"}


@pytest.mark.parametrize(("budget", "judged"), [
    (30, "fits"), (29, "probably fits"), (20, "probably fits"), (19, "fits if fast"),
    (10, "fits if fast"), (9, "too expensive"),
])
def test_a_budget_is_compared_with_high_expected_and_low(budget: float, judged: str) -> None:
    assert verdict(Bounds(10.0, 20.0, 30.0), budget) == judged


@pytest.mark.parametrize(("budget", "judged", "within"), [
    (1000, "fits", "fits: 8x H100, 8x A100-40, 2x H100, 8x B200, 8x A100-80."),
    (20, "probably fits", "probably fits: 8x H100, 8x A100-40, 2x H100, 8x B200, 8x A100-80."),
    (1, "too expensive", "none."),
])
def test_budget_shows_which_machines_fit(budget: int, judged: str, within: str) -> None:
    output = plan("8xa100m40", "--budget", str(budget))
    assert output.endswith(f"\n\nWithin ${budget:,.2f}: {within}\n")
    assert {row[-1] for row in cost_rows(output)} == {judged}


def test_global_batch_is_the_same_on_every_machine(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={
        "gradient_accumulation_steps": None, "global_batch_size": 512, "min_train_tokens": 10**9,
        "precision": "bf16", "compile": False})
    rows = batch_rows(plan("tiny", runs_dir=workplace.runs_dir))
    assert {row[3] for row in rows} == {"512"}
    assert {row[1] for row in rows if row[0] == "8x A100-40"} == {"32 x 2"}


@pytest.mark.parametrize(("run", "published"), [
    ("8xa100m40", 35.56), ("8xa100m80", 39.14), ("8xh100m80", 39.14), ("8xb200m160", 39.14),
])
def test_published_cost_is_between_low_and_high_estimate(run: str, published: float) -> None:
    names = {"8xa100m40": "8x A100-40", "8xa100m80": "8x A100-80", "8xh100m80": "8x H100",
             "8xb200m160": "8x B200"}
    row = next(row for row in cost_rows(plan(run)) if row[0] == names[run])
    low, high = low_to_high(row[USD_RANGE])
    assert low < 35.56 and published < high


def test_higher_precision_takes_longer(workplace: Workplace) -> None:
    hours = []
    for precision in ("bf16", "tf32", "fp32"):
        workplace.add_run(precision, model=BIG, train={"min_train_tokens": 10**9,
                                                       "precision": precision})
        run = load_run(workplace.runs_dir, precision)
        hours.append(estimate(run, parse_machine("x=8xA100-80@10")).hours.low)
    assert hours == pytest.approx([hours[0], 2 * hours[0], 16 * hours[0]])


def test_too_few_tokens_are_not_reported_as_an_indivisible_batch(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={
        "gradient_accumulation_steps": None, "global_batch_size": 512, "min_train_tokens": -1,
        "precision": "bf16"})
    output = plan("tiny", "--tokens", "1000", runs_dir=workplace.runs_dir)
    assert "wanted 524289 training tokens" in output and "divisible" not in output


def test_large_numbers_and_long_names_stay_in_their_columns(workplace: Workplace) -> None:
    workplace.add_run(model=BIG | {"emb_dim": 1600, "n_heads": 25, "n_layers": 48}, train={
        "min_train_tokens": 31 * 10**9, "validation_interval": 10, "precision": "bf16",
        "microbatch_size": 1, "gradient_accumulation_steps": 1})
    name = "sixteen letters,"
    output = plan("tiny", "--machine", f"{name}=8xH100@9000.5", runs_dir=workplace.runs_dir)
    for rows, columns in ((batch_rows(output), 7), (cost_rows(output), 9)):
        assert {len(row) for row in rows} == {columns} and name in {row[0] for row in rows}


def test_machine_that_cannot_train_the_run_shows_the_reason(workplace: Workplace) -> None:
    workplace.add_run("large", model=BIG, train={"microbatch_size": 60,
                                                 "min_train_tokens": 10**9})
    workplace.add_run("odd", model=BIG, train={
        "gradient_accumulation_steps": None, "global_batch_size": 9, "min_train_tokens": 10**9})
    output = plan("large", runs_dir=workplace.runs_dir)
    last = batch_rows(output)[-1]
    assert last[0] == "8x A100-40" and last[-1] == "does not fit in memory"
    assert "8x A100-40" not in {row[0] for row in cost_rows(output)}
    output = plan("odd", runs_dir=workplace.runs_dir)
    assert {row[-1] for row in batch_rows(output)} == {"batch not divisible"}
    assert output.endswith("\nno machine in the table can train this run\n")


def test_tokens_are_required_only_if_min_train_tokens_is_minus_1(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={"min_train_tokens": -1})
    with pytest.raises(UserError, match="min_train_tokens is -1 .* --tokens"):
        plan("tiny", runs_dir=workplace.runs_dir)
    assert "1,000,000 tokens" in plan("tiny", "--tokens", "1000000", runs_dir=workplace.runs_dir)
    with pytest.raises(UserError, match="min_train_tokens is not -1, so --tokens"):
        plan("original", "--tokens", "1000000")
    workplace.add_run("again", model=BIG, train={"min_train_tokens": 10**6, "repeat_data": True})
    for arguments, times in ((["--tokens", "400000"], "2.5 times"), ([], "--tokens says how")):
        assert f"repeat_data: the dataset is read again where it ends ({times}" in plan(
            "again", *arguments, runs_dir=workplace.runs_dir)
    with pytest.raises(AssertionError, match="'--budget': nan is not a finite number"):
        plan("original", "--budget", "nan")


@pytest.mark.parametrize(("text", "message"), [
    ("nonsense", "wanted name=COUNTxGPU@USD_PER_HOUR"),
    ("a=0xH100@3", "wanted name=COUNTxGPU@USD_PER_HOUR"),
    ("a=2xH100@-3", "wanted name=COUNTxGPU@USD_PER_HOUR"),
    ("a=2xFoo@3", "unknown GPU 'Foo'; wanted one that lab plan --help lists$"),
    ("a=2xH900@3", "unknown GPU 'H900'; wanted .* such as H200, H100"),
    ("seventeen letters=2xH100@3", "16 characters at most"),
    ("two\nlines=2xH100@3", "wanted name=COUNTxGPU@USD_PER_HOUR"),
    (f"a=2xH100@{'9' * 400}", "wanted name=COUNTxGPU@USD_PER_HOUR"),
    ("a=2xH100@0", "the price is 0"),
])
def test_malformed_machine_is_a_user_error(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_machine(text)
    assert len(f"Error: {caught.value}") <= MAX_LINE_LENGTH  # nothing is cut out of it


def test_known_machines_have_the_prices_of_the_original_runs() -> None:
    assert {machine.name: machine.usd_per_hour for machine in known_machines()} == {
        "8x A100-40": 10.32, "8x A100-80": 14.32, "8x H100": 23.92, "8x B200": 39.92,
        "2x H100": 6.38}


@pytest.mark.parametrize(("train", "count"), [
    ({"validation_interval": 5, "checkpoint_interval": None}, 3),  # 5, 10, 12
    ({"validation_interval": 5, "checkpoint_interval": 4}, 5),  # 4, 5, 8, 10, 12
    ({"validation_interval": 4, "checkpoint_interval": 6}, 4),  # 4, 6, 8, 12
    ({"validation_interval": 4}, 3),  # 4, 8, 12
    ({"validation_interval": 50}, 1),
])
def test_num_checkpoints_counts_each_saved_step_once(
    workplace: Workplace, train: dict, count: int
) -> None:
    workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    assert num_checkpoints(run, plan_batches(run, world_size=2, file_tokens=4000)) == count


def test_plan_does_not_import_torch_and_writes_no_files(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={"min_train_tokens": 10**9})
    before = workplace.files()
    code = ("import sys; sys.argv = ['lab', 'plan', 'tiny', '--runs-dir', sys.argv[1]]\n"
            "from lab.__main__ import cli\n"
            "cli(standalone_mode=False)\n"
            "print(json.dumps(sorted(sys.modules)))")
    result = succeeded(run_command(sys.executable, "-c", "import json\n" + code,
                                   str(workplace.runs_dir)))
    modules = json.loads(result.stdout.splitlines()[-1])
    assert "torch" not in modules and "matplotlib" not in modules
    assert workplace.files() == before


def test_the_plan_is_a_json_document_with_the_figures_of_the_tables() -> None:
    document = checked(run_lab("plan", "8xa100m40", "--json", "--budget", "40").stdout)
    assert document.parameters == 163_009_536 and document.checkpoint_bytes == 1_956_114_432
    for parts in document.memory_bytes.values():
        assert sum(size for part, size in parts.items() if part != "total") == parts["total"]
    machine = next(found for found in document.machines if found.name == "8x A100-40")
    assert (machine.microbatch_size, machine.global_batch_size, machine.steps,
            machine.checkpoints) == (13, 104, 30_614, 50)
    assert machine.usd.low < machine.usd.expected < machine.usd.high and machine.budget
    odd = checked(run_lab("plan", "gpt2-small-muon", "--json", "--machine", "odd=7xH100@9").stdout)
    assert [(found.name, found.steps) for found in odd.machines
            if found.reason == "batch not divisible"] == [("odd", None)]
