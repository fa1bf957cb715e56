"""The tables of `lab plan` and the notes under them."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from lab.__main__ import cli
from lab.plan.estimate import Estimate, default_precision, estimate
from lab.plan.machines import parse_machine
from lab.plan.speed_sources import ExpectedSpeed, SpeedSources
from lab.plan.tables import WIDTH, _shares, amount
from reporting.speed import GPUS
from run_config import load_run
from tests.support.plan_output import BIG, HOURS, USD, batch_rows, cost_rows, plan
from tests.support.workplace import Workplace


@pytest.mark.parametrize("arguments", [(), ("--budget", "12345678.9")])
def test_the_cost_table_has_its_heads_and_fits_a_terminal(
    workplace: Workplace, arguments: tuple[str, ...]
) -> None:
    workplace.add_run(model=BIG, train={
        "min_train_tokens": 3 * 10**9, "global_batch_size": 480, "validation_interval": 100,
        "gradient_accumulation_steps": None, "validation_batches": None,
        "validation_sequences": 8000, "precision": "bf16"})
    machines = ("--machine", "sixteen letters,=64xRTX-6000-Ada@123.5",
                "--machine", "four T4 cards=4xT4@1.2")
    output = plan("tiny", *machines, *arguments, runs_dir=workplace.runs_dir)
    assert max(map(len, output.splitlines())) <= WIDTH
    costs = output.split("\nmachine ")[2].splitlines()
    assert costs[0].split() == ["US$", "hours,", "hours,", "US$,", "US$,", "MFU", "validation",
                                "every", "source", *(["budget"] if arguments else [])]
    said = "per hour expected fewest to most expected fewest to most 100 steps"
    assert costs[1].split() == [*said.split(), *(["$1.2e+07"] if arguments else [])]
    assert ("\n\nWithin $12,345,678.90: fits: " in output) == bool(arguments)


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "<0.01"), (0.0049, "<0.01"), (0.005, "0.01"), (9.876, "9.88"), (999.99, "999.99"),
    (999.996, "1,000"), (123_456.7, "123,457"), (999_999.6, "1.0e+06"), (1e200, "1.0e+200"),
])
def test_amounts_are_short(value: float, text: str) -> None:
    assert amount(value) == text


def test_little_time_is_not_shown_as_none(workplace: Workplace) -> None:
    workplace.add_run(train={"min_train_tokens": 10**4})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert {row[HOURS] for row in cost_rows(output)} == {"<0.01"}
    assert {row[USD] for row in cost_rows(output)} == {"~<0.01"}


def test_the_notes_name_the_origin_of_every_bound(workplace: Workplace) -> None:
    workplace.add_run(model=BIG, train={"min_train_tokens": 10**9, "precision": "bf16",
                                        "compile": None})
    output = plan("tiny", "--machine", "a=1xL40S@1",
                  "--machine", "b=8xMI300X@20", "--machine", "c=1xRTX-4090@1",
                  "--machine", "d=1xRTX-3090@0.3", runs_dir=workplace.runs_dir)
    notes = " ".join(output.split("\n\n")[-1].split())
    assert "A100-40 54% (from A100-80)" in notes and "B200 40% (assumed)" in notes
    assert "L40S 40% (assumed)" in notes and "L40S 5.0% (assumed)" in notes
    assert ("MI300X, rough: no public figure for several MI300X; assumed 32%, 80% of an assumed"
            " best of 40%") in notes
    assert ("RTX-4090, rough: no public figure for one RTX-4090; assumed 52%, 80% of the best"
            " of 65% (from RTX-3090)") in notes
    assert "RTX-3090, public: 63% in public runs on several GPUs" in notes
    assert "fewest hours: at the best public MFU" in notes and "most hours: at the MFU of" in notes
    assert "L40S, public: 18% in public runs on several GPUs; not measured with" in notes
    dollars = {row[0]: row[USD] for row in cost_rows(output)}
    assert dollars["b"].startswith("~") and "~" not in dollars["a"]


@pytest.mark.parametrize(("keep", "most"), [(None, "21"), (3, "5"), (30, "21")])
def test_checkpoints_on_disk_are_those_that_are_kept(
    workplace: Workplace, keep: int | None, most: str
) -> None:
    workplace.add_run(model=BIG, train={
        "min_train_tokens": 21 * 96 * 1024, "global_batch_size": 96, "keep_checkpoints": keep,
        "gradient_accumulation_steps": None, "validation_interval": None,
        "validation_batches": None, "checkpoint_interval": 1, "precision": "bf16"})
    sizes = {"21": "41.1 GB", "5": "9.78 GB"}
    for row in batch_rows(plan("tiny", runs_dir=workplace.runs_dir)):
        assert row[4:] == ["21", f"{most} ({sizes[most]})", "21"]


@pytest.mark.parametrize(("batch", "is_noted"), [(64, True), (None, False)])
def test_a_microbatch_that_is_not_the_runs_own_is_explained(
    workplace: Workplace, batch: int | None, is_noted: bool
) -> None:
    workplace.add_run(train={
        "min_train_tokens": 10**6, "microbatch_size": 2, "global_batch_size": batch,
        "gradient_accumulation_steps": None if batch else 3})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert {row[1] for row in batch_rows(output)} == ({"8 x 1", "32 x 1"} if batch else {"2 x 3"})
    assert ("\nmicrobatch: the largest that fits and divides the batch; train.json has 2\n"
            in output) == is_noted


def test_small_sizes_are_not_shown_as_nothing(workplace: Workplace) -> None:
    workplace.add_run(train={"min_train_tokens": 10**5})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert not re.search(r"\b0(\.0+)? (GB|MB|GiB|MiB)\b", output)
    assert re.search(r"^disk: [\d.]+ kB a checkpoint \(how", output, re.MULTILINE)
    total = re.search(r"^total +([\d.]+)", output, re.MULTILINE)[1]
    assert "\nMiB at the peak, " in output and float(total) > 0


def test_large_microbatches_have_separators(workplace: Workplace) -> None:
    workplace.add_run(train={"min_train_tokens": 10**5})
    output = plan("tiny", runs_dir=workplace.runs_dir)
    assert re.search(r"^192 GiB +\d+,\d{3},?\d* ", output, re.MULTILINE)
    assert all("," in row[2] for row in batch_rows(output))


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_a_gpu_without_bf16_trains_in_fp16(workplace: Workplace, gpu: str) -> None:
    machine = parse_machine(f"x=1x{gpu}@1")
    for name, train in (("default", {}), ("bf16", {"precision": "bf16"}),
                        ("residual", {"residual_dtype": "bf16"}), ("fp16", {"precision": "fp16"})):
        workplace.add_run(name, model=BIG, train={"min_train_tokens": 10**9,
                                                  "precision": None} | train)
        run = load_run(workplace.runs_dir, name)
        found = estimate(run, machine, tokens=None, sources=SpeedSources())
        assert found.reason == ("this GPU has no bf16" if "bf16" in train.values() else "")
        assert default_precision(run.train, machine.gpu) == train.get("precision", "fp16")
    assert default_precision(run.train.model_copy(update={"precision": None})) == "bf16"


def test_shares_of_the_time_have_no_exponent() -> None:
    machine = parse_machine("x=8xH100@1")
    speed = ExpectedSpeed(0.3, "public", "")
    shares = {_shares(Estimate(machine, 1, speed, validation=pair))
              for pair in ((0.996, 0.0996), (0.0994, 0.0004))}
    assert shares == {"100% / 10%", "9.9% / 0.0%"}


def test_the_help_lists_all_gpus() -> None:
    text = CliRunner().invoke(cli, ["plan", "--help"]).output
    assert all(gpu.name in " ".join(text.split()) for gpu in GPUS)
