"""`lab plan`: batches, hours and dollars, as estimates, in its tables and in its JSON document."""

import json
import re
import sys

import pytest

from basics.errors import MAX_LINE_LENGTH, UserError
from lab.plan.estimate import Bounds, Machine, default_precision, num_checkpoints
from lab.plan.estimate import estimate as estimate_from
from lab.plan.tables import amount, verdict
from reporting.speed import GPUS
from run_config import load_run
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.workplace import PROJECT_DIR, run_command
from tests.support.workplace import succeeded as process_succeeded
from tokens.batch_plan import plan_batches

BIG = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12,
       "drop_rate": 0.0}  # GPT-2 small
BILLION = {"min_train_tokens": 10**9, "precision": "bf16"}
WITHOUT_VALIDATION = BILLION | {"validation_interval": None, "validation_batches": None,
                                "checkpoint_interval": 100}
BY_BATCH = BILLION | {"gradient_accumulation_steps": None}
HOURS, USD, VALIDATION = 2, 4, 7  # columns


def plan(*arguments, runs_dir=PROJECT_DIR / "runs"):
    return succeeded(run_lab("plan", *arguments, "--runs-dir", str(runs_dir))).output


def rows_of(output, *, table):
    """Return the cells of a table of machines, below its heads."""
    text = output.split("\nmachine ")[table].split("\n\n")[0]
    return [re.split(r"  +", row.strip()) for row in text.splitlines()[2:]]


def batch_rows(output):
    return rows_of(output, table=1)


def cost_rows(output):
    return rows_of(output, table=2)


def estimated(workplace, machine, **train):
    """Estimate a run of GPT-2 small that is made for it."""
    run_dir = workplace.add_run(f"run-{len(list(workplace.root.glob('runs/*')))}", model=BIG,
                                train=BILLION | train)
    return estimate_from(load_run(workplace.runs_dir, run_dir.name), Machine.parse(machine),
                         tokens=None, measured={})


def test_original_run_has_its_published_figures():
    output = plan("8xa100m40")
    assert "GPT-2 small, untied (163M), 163,009,536 parameters; 3,260,190,720 tokens\n" in output
    assert "\n20.0 tokens per parameter" in output and "50: 14% / 2.0%" in output
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


def test_gradients_in_bf16_halve_what_is_sent_between_the_gpus(workplace):
    for dtype, sent in (("fp32", "59.9 kB"), ("bf16", "30.0 kB")):
        workplace.add_run(dtype, train={"all_reduce_dtype": dtype, "min_train_tokens": 9999})
        assert (f"\nbetween several GPUs: {sent} of gradients a step (all_reduce_dtype {dtype})\n"
                in plan(dtype, runs_dir=workplace.runs_dir))


def test_memory_is_shown_by_part_and_the_parts_add_up():
    output = plan("original")
    block = output.split("GiB at the peak", 1)[1].split("\n\n")[0].splitlines()[2:]
    numbers = [[float(n) for n in line.split()[-2:]] for line in block]
    assert len(numbers) == 8
    for column in (0, 1):
        parts = [row[column] for row in numbers]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.04)


def test_machines_are_sorted_by_expected_cost():
    arguments = ("original", "--machine", "mine=4xH200@9.5", "--budget", "20")
    output, document = plan(*arguments), checked(run_lab("plan", *arguments, "--json").stdout)
    usd = {found.name: found.usd for found in document.machines}
    assert list(usd) == sorted(usd, key=lambda name: usd[name].expected) and len(usd) == 6
    assert all(found.low < found.expected < found.high for found in usd.values())
    assert list(usd) == [row[0] for row in batch_rows(output)]
    assert [[row[0], row[USD], row[-1]] for row in cost_rows(output)] == [
        [name, f"~{found.expected:.2f}", verdict(found, 20)] for name, found in usd.items()]


def test_hours_are_computed_from_flops_and_dollars_from_hours(workplace):
    found = estimated(workplace, "x=2xH100@10", **WITHOUT_VALIDATION)
    run = load_run(workplace.runs_dir, "run-0")
    flops = found.plan.num_tokens * 854.44e6
    saving = num_checkpoints(run, found.plan) * 12 * 163_009_536 / 100e6
    hours = found.hours
    assert (hours.low, hours.expected, hours.high) == pytest.approx((
        flops / (2 * 989e12 * 0.41) / 3600,
        flops / (2 * 989e12 * 0.39) / 3600,
        (flops / (2 * 989e12 * 0.053) + saving) / 3600), rel=1e-4)
    assert found.usd == Bounds(*(10 * each for each in (hours.low, hours.expected, hours.high)))


@pytest.mark.parametrize(("where", "interval", "waiting"), [
    ("rank0", 10**6, 1), ("all", 10, 4 / 30), ("rank0", 10, 1)])
def test_all_gpus_wait_for_a_validation(workplace, where, interval, waiting):
    """A validation has 30 microbatches of 2 sequences; with "all" rank 0 has 4 of them."""
    found = estimated(workplace, "x=8xH100@10", validation_interval=interval, validate_on=where,
                      validation_batches=30)
    count = -(-found.plan.num_steps // interval)
    training = found.plan.num_tokens * 854.44e6 / 8
    alone = 854.44e6 / 3 * 30 * 2 * 1024 * count
    assert found.hours.low == pytest.approx(
        (training + alone * waiting) / (989e12 * 0.41) / 3600, rel=1e-3)
    assert found.validation == pytest.approx((
        alone / (training + alone), alone * 4 / 30 / (training + alone * 4 / 30)), rel=1e-3)


def test_the_cost_table_shows_validation_and_the_budget(workplace):
    workplace.add_run(model=BIG, train=BILLION | {
        "min_train_tokens": 8000 * 1024, "global_batch_size": 80, "validation_interval": 10,
        "gradient_accumulation_steps": None, "validation_batches": None,
        "validation_sequences": 80, "validate_on": "all"})
    output = plan("tiny", "--machine", "one=1xH100@3", "--machine",
                  "sixteen letters,=64xRTX-6000-Ada@123.5", "--budget", "12345678.9",
                  runs_dir=workplace.runs_dir)
    rows = {row[0]: row for row in cost_rows(output)}
    assert rows["8x H100"][VALIDATION] == "10: 21% / 3.2%"
    assert rows["one"][VALIDATION] == "10: 3.2%"
    assert {row[-1] for row in rows.values()} == {"fits"} and "sixteen letters," in {
        row[0] for row in batch_rows(output)}
    assert '"validate_on": "all" is counted' in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 120


def test_a_run_without_validation_has_no_such_column(workplace):
    workplace.add_run(model=BIG, train=WITHOUT_VALIDATION)
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert "validation every" not in output and "validate_on" not in output
    assert {row[-1] for row in cost_rows(output)} == {"public"}


@pytest.mark.parametrize(("budget", "judged"), [
    (30, "fits"), (29, "probably fits"), (20, "probably fits"), (19, "fits if fast"),
    (10, "fits if fast"), (9, "too expensive"),
])
def test_a_budget_is_compared_with_high_expected_and_low(budget, judged):
    assert verdict(Bounds(10.0, 20.0, 30.0), budget) == judged


def test_global_batch_is_the_same_on_every_machine(workplace):
    workplace.add_run(model=BIG, train=BY_BATCH | {"global_batch_size": 512, "compile": False})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    rows = batch_rows(output)
    assert {row[3] for row in rows} == {"512"}
    assert {row[1] for row in rows if row[0] == "8x A100-40"} == {"32 x 2"}
    assert "\nmicrobatch: the largest that fits and divides the batch; train.json has 2\n" in output


@pytest.mark.parametrize(("machine", "published"), [
    ("8x A100-40=8xA100-40@10.32", 35.56), ("8x A100-80=8xA100-80@14.32", 39.14),
    ("8x H100=8xH100@23.92", 39.14), ("8x B200=8xB200@39.92", 39.14)])
def test_published_cost_is_between_low_and_high_estimate(machine, published):
    run = {"A100-40": "8xa100m40", "A100-80": "8xa100m80", "H100": "8xh100m80",
           "B200": "8xb200m160"}[machine.split("=")[0][3:]]
    found = estimate_from(load_run(PROJECT_DIR / "runs", run), Machine.parse(machine),
                          tokens=None, measured={})
    assert found.usd.low < 35.56 and published < found.usd.high


def test_higher_precision_takes_longer(workplace):
    hours = [estimated(workplace, "x=8xA100-80@10", precision=precision).hours.low
             for precision in ("bf16", "tf32", "fp32")]
    assert hours == pytest.approx([hours[0], 2 * hours[0], 16 * hours[0]])


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_a_gpu_without_bf16_trains_in_fp16(workplace, gpu):
    for train in ({}, {"precision": "bf16"}, {"residual_dtype": "bf16"}, {"precision": "fp16"}):
        found = estimated(workplace, f"x=1x{gpu}@1", **{"precision": None} | train)
        assert found.reason == ("this GPU has no bf16" if "bf16" in train.values() else "")
    run = load_run(workplace.runs_dir, "run-0")
    assert default_precision(run.train, found.machine.gpu) == "fp16"
    assert default_precision(run.train) == "bf16"


@pytest.mark.parametrize(("train", "reason"), [
    ({"microbatch_size": 60}, "does not fit in memory"),
    ({"gradient_accumulation_steps": None, "global_batch_size": 9}, "batch not divisible"),
])
def test_machine_that_cannot_train_the_run_shows_the_reason(workplace, train, reason):
    workplace.add_run("large", model=BIG, train={"min_train_tokens": 10**9} | train)
    output = plan("large", runs_dir=workplace.runs_dir)
    assert batch_rows(output)[-1][-1] == reason
    is_none = reason != "does not fit in memory"
    assert output.endswith("\nno machine in the table can train this run\n") == is_none
    assert is_none or "8x A100-40" not in {row[0] for row in cost_rows(output)}


def test_too_few_tokens_are_not_reported_as_an_indivisible_batch(workplace):
    workplace.add_run(model=BIG, train=BY_BATCH | {"global_batch_size": 512,
                                                   "min_train_tokens": -1})
    output = plan("tiny", "--tokens", "1000", runs_dir=workplace.runs_dir)
    assert "wanted 524289 training tokens" in " ".join(output.split())
    assert "divisible" not in output


def test_tokens_are_required_only_if_min_train_tokens_is_minus_1(workplace):
    workplace.add_run(model=BIG, train={"min_train_tokens": -1})
    options = ("--runs-dir", str(workplace.runs_dir))
    assert re.search("min_train_tokens is -1 .* --tokens", error_line(run_lab(
        "plan", "tiny", *options)))
    assert "1,000,000 tokens" in plan("tiny", "--tokens", "1000000", runs_dir=workplace.runs_dir)
    workplace.add_run("again", model=BIG, train={"min_train_tokens": 10**6, "repeat_data": True})
    for arguments, times in ((["--tokens", "400000"], "2.5 times"), ([], "--tokens says how")):
        assert f"repeat_data: the dataset is read again where it ends ({times}" in plan(
            "again", *arguments, runs_dir=workplace.runs_dir)
    assert "min_train_tokens is not -1, so --tokens" in error_line(run_lab(
        "plan", "original", "--tokens", "1000000"))
    assert "nan is not a finite number" in run_lab("plan", "original", "--budget", "nan").output


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
def test_malformed_machine_is_a_user_error(text, message):
    with pytest.raises(UserError, match=message) as caught:
        Machine.parse(text)
    assert len(f"Error: {caught.value}") <= MAX_LINE_LENGTH  # nothing is cut out of it


@pytest.mark.parametrize(("train", "count"), [
    ({"validation_interval": 5, "checkpoint_interval": None}, 3),  # 5, 10, 12
    ({"validation_interval": 5, "checkpoint_interval": 4}, 5),  # 4, 5, 8, 10, 12
    ({"validation_interval": 4, "checkpoint_interval": 6}, 4),  # 4, 6, 8, 12
    ({"validation_interval": 4}, 3),  # 4, 8, 12
    ({"validation_interval": 50}, 1),
])
def test_num_checkpoints_counts_each_saved_step_once(workplace, train, count):
    workplace.add_run(train=train)
    run = load_run(workplace.runs_dir, "tiny")
    assert num_checkpoints(run, plan_batches(run, world_size=2, file_tokens=4000)) == count


@pytest.mark.parametrize(("keep", "most"), [(None, "21 (41.1 GB)"), (3, "5 (9.78 GB)"),
                                            (30, "21 (41.1 GB)")])
def test_checkpoints_on_disk_are_those_that_are_kept(workplace, keep, most):
    workplace.add_run(model=BIG, train=WITHOUT_VALIDATION | {
        "min_train_tokens": 21 * 96 * 1024, "global_batch_size": 96, "keep_checkpoints": keep,
        "gradient_accumulation_steps": None, "checkpoint_interval": 1})
    for row in batch_rows(plan("tiny", runs_dir=workplace.runs_dir)):
        assert row[4:] == ["21", most, "21"]


@pytest.mark.parametrize(("value", "text"), [
    (0.0049, "<0.01"), (0.005, "0.01"), (999.996, "1,000"), (999_999.6, "1.0e+06")])
def test_amounts_are_short(value, text):
    assert amount(value) == text


def test_a_small_model_shows_small_sizes_and_that_its_speed_is_a_guess(workplace):
    workplace.add_run(train={"min_train_tokens": 10**4})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert {row[HOURS] for row in cost_rows(output)} == {"<0.01"}
    assert {row[USD] for row in cost_rows(output)} == {"~<0.01"}
    assert "a model below a million parameters (the speed is a guess)" in " ".join(output.split())
    assert not re.search(r"\b0(\.0+)? (GB|MB|GiB|MiB)\b", output)
    assert re.search(r"^disk: [\d.]+ kB a checkpoint \(how", output, re.MULTILINE)
    assert "\nMiB at the peak, " in output


def test_plan_does_not_import_torch_and_writes_no_files(workplace):
    workplace.add_run(model=BIG, train={"min_train_tokens": 10**9})
    before = workplace.files()
    code = ("import json, sys; sys.argv = ['lab', 'plan', 'tiny', '--runs-dir', sys.argv[1]]\n"
            "from lab.__main__ import cli\n"
            "cli(standalone_mode=False)\n"
            "print(json.dumps(sorted(sys.modules)))")
    result = process_succeeded(run_command(sys.executable, "-c", code, str(workplace.runs_dir)))
    modules = json.loads(result.stdout.splitlines()[-1])
    assert "torch" not in modules and "matplotlib" not in modules
    assert workplace.files() == before


def test_the_plan_is_a_json_document_with_the_figures_of_the_tables():
    document = checked(run_lab("plan", "8xa100m40", "--json", "--budget", "40").stdout)
    assert document.parameters == 163_009_536 and document.checkpoint_bytes == 1_956_114_432
    for parts in document.memory_bytes.values():
        assert sum(size for part, size in parts.items() if part != "total") == parts["total"]
    assert {found.name: found.usd_per_hour for found in document.machines} == {
        "8x A100-40": 10.32, "8x A100-80": 14.32, "8x H100": 23.92, "8x B200": 39.92,
        "2x H100": 6.38}  # the prices of the original's runs
    machine = next(found for found in document.machines if found.name == "8x A100-40")
    assert (machine.microbatch_size, machine.global_batch_size, machine.steps,
            machine.checkpoints) == (13, 104, 30_614, 50)
    assert machine.usd.low < machine.usd.expected < machine.usd.high and machine.budget
    odd = checked(run_lab("plan", "gpt2-small-muon", "--json", "--machine", "odd=7xH100@9").stdout)
    assert [(found.name, found.steps) for found in odd.machines
            if found.reason == "batch not divisible"] == [("odd", None)]


def test_the_help_lists_all_gpus():
    text = " ".join(run_lab("plan", "--help").output.split())
    assert all(gpu.name in text for gpu in GPUS)
