"""The sources of the MFU that `lab plan` expects: own runs, shipped measurements, estimates."""

import json
import os
import tomllib

import pytest

from basics.errors import UserError
from lab.plan.estimate import Machine, estimate
from lab.plan.setting import Setting
from lab.plan.speed_sources import (
    MEASURED,
    MEASURED_PATH,
    OWN,
    expected_speed,
    read_measured,
    read_own,
)
from reporting.clock import PhaseClock
from reporting.speed import find_gpu
from reporting.summary import RunEnd, summarise
from run_config import load_run
from tests.support.lab_cli import run_lab, succeeded
from tests.support.workplace import PROJECT_DIR
from tokens.batch_plan import BatchPlan

H100 = "NVIDIA H100 80GB HBM3"
LAUNCH = {"steps": 999, "tokens": 3_000_000_000, "seconds": 1000.0}  # 3 M tokens a second
MACHINE = {"device": H100, "device_type": "cuda", "processes": 8, "precision": "bf16",
           "compiled": True, "attention": "flash", "torch": "2.11"}
MODEL = load_run(PROJECT_DIR / "runs", "original").model.model_copy(update={"drop_rate": 0.0})
TRAIN = load_run(PROJECT_DIR / "runs", "gpt2-small-1gpu").train
WANTED = Setting(MODEL, TRAIN, "bf16", num_processes=1)
ROW = {"device": "NVIDIA H200", "processes": 1, "precision": "bf16", "tokens_per_second": 500_000,
       "model": MODEL.model_dump(), "source": "a stand-in of 2026-11-22"}
LONG = {"min_train_tokens": 10**9, "validation_interval": None, "validation_batches": None,
        "checkpoint_interval": 100, "precision": "bf16"}


def changed(model, train, precision="bf16"):
    return Setting(MODEL.model_copy(update=model), TRAIN.model_copy(update=train), precision, 1)


def add_summary(runs_dir, name, *, age=0, **changes):
    """Write a summary of 1,000 steps at 3 M tokens a second on eight H100."""
    path = runs_dir / name / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "run": "mine", "status": "finished", "global_step": 999, "tokens": 3_003_003_003,
        "seconds": {"training": 5e6, "waiting": 1.0}, "this_launch": LAUNCH,
        "machine": MACHINE, "model": MODEL.model_dump(),
        "train": {"activation_checkpointing": False, "microbatch_size": 64}} | changes))
    os.utime(path, (1_700_000_000 - age,) * 2)
    return path


def expected(runs_dir, device=H100, wanted=WANTED):
    return expected_speed(wanted, find_gpu(device), read_measured(runs_dir))


def test_an_own_run_tells_the_speed_of_its_steps_after_the_first(tmp_path):
    add_summary(tmp_path, "mine")
    speed = expected(tmp_path)  # without compilation, and without earlier launches
    assert speed.mfu == pytest.approx(3e6 * 854.44e6 / 8 / 989e12, rel=1e-4)
    assert speed.source == "own run"
    assert speed.detail == (
        "3,000,000 tokens/s on 8x NVIDIA H100 80GB HBM3, 163,009,536 parameters (run mine)")


@pytest.mark.parametrize("changes", [
    {"status": "failed"}, {"this_launch": None}, {"this_launch": LAUNCH | {"steps": 48}},
    {"machine": MACHINE | {"compiled": False}}, {"machine": MACHINE | {"precision": "tf32"}},
    {"machine": MACHINE | {"attention": "math"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 NVL"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}},
    {"machine": MACHINE | {"device_type": "cpu"}}, {"machine": "NVIDIA H100 80GB HBM3"},
    {"train": {"activation_checkpointing": True}},
    {"model": MODEL.model_dump() | {"n_layers": 36}},  # more than twice the FLOPs
    {"model": MODEL.model_dump() | {"drop_rate": 0.1}},
    {"this_launch": LAUNCH | {"tokens": 10**14}}, {"this_launch": LAUNCH | {"tokens": 10**7}},
], ids=str)
def test_a_run_that_cannot_be_compared_is_not_used(tmp_path, changes):
    add_summary(tmp_path, "mine", **changes)
    assert expected(tmp_path).source == "public"


@pytest.mark.parametrize("changes", [
    {"status": "stopped"}, {"this_launch": {"steps": 49, "tokens": 3_000_000, "seconds": 1.0}},
    {"machine": MACHINE | {"precision": "fp16"}}, {"machine": MACHINE | {"attention": "cudnn"}},
    {"model": MODEL.model_dump() | {"n_layers": 24}},
], ids=str)
def test_a_stopped_a_short_and_a_similar_run_are_used(tmp_path, changes):
    add_summary(tmp_path, "mine", **changes)
    assert expected(tmp_path).source == "own run"


@pytest.mark.parametrize("changes", [
    {"this_launch": LAUNCH | {"tokens": 10**400}}, {"this_launch": LAUNCH | {"seconds": 0}},
    {"this_launch": LAUNCH | {"seconds": 5e-324}}, {"this_launch": LAUNCH | {"tokens": "3000"}},
    {"machine": MACHINE | {"processes": 10**9}}, {"machine": MACHINE | {"device": "NVIDIA\nH100"}},
    {"model": {}},
], ids=lambda changes: str(changes)[:80])
def test_absurd_values_in_a_summary_are_passed_by(tmp_path, changes):
    assert read_own(add_summary(tmp_path, "mine", **changes)) is None


def test_damaged_summaries_and_folders_that_are_no_runs_are_passed_by(tmp_path):
    for name, text in (("half", '{"status": "fini'), ("list", "[]"), ("bytes", "\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text, encoding="latin-1")
    os.mkdir(tmp_path / "folder")
    os.mkfifo(tmp_path / "folder" / "summary.json")
    add_summary(tmp_path, "two\nlines")
    assert read_measured(tmp_path)[OWN] == read_measured(tmp_path / "no such place")[OWN] == []


def test_the_nearest_in_size_and_then_the_newest_run_is_used(tmp_path):
    add_summary(tmp_path, "smaller", model=MODEL.model_dump() | {"n_layers": 8}, age=0)
    assert expected(tmp_path).detail.endswith("(run smaller)")
    for name, age in (("old", 300), ("new", 100), ("middle", 200)):
        add_summary(tmp_path, name, age=age)
    assert expected(tmp_path).detail.endswith("(run new)")


def test_a_shipped_measurement_comes_after_own_runs_and_before_the_estimate(tmp_path):
    path, gpu = tmp_path / "measured.json", find_gpu("H200")
    path.write_text(json.dumps([ROW]))
    speed = expected_speed(WANTED, gpu, read_measured(tmp_path, path))
    assert (speed.mfu, speed.source) == (pytest.approx(500e3 * 854.44e6 / 989e12, rel=1e-4),
                                         "measured")
    assert speed.detail.endswith("163,009,536 parameters (a stand-in of 2026-11-22)")
    add_summary(tmp_path, "mine", machine=MACHINE | {"device": "NVIDIA H200"})
    measured = read_measured(tmp_path, path)
    assert expected_speed(WANTED, gpu, measured).source == "own run"
    assert expected_speed(changed({}, {}, "tf32"), gpu, measured).source == "rough"


@pytest.mark.parametrize("text", [None, "{}", json.dumps([ROW | {"mfu": 0.4}]),
                                  json.dumps([ROW | {"tokens_per_second": 0}])])
def test_damaged_measurements_are_a_user_error(tmp_path, text):
    path = tmp_path / "measured.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="measured.json: cannot be read .* download it again"):
        read_measured(tmp_path, path)


def test_the_shipped_measurements_are_valid_and_part_of_the_wheel(tmp_path):
    for found in read_measured(tmp_path)[MEASURED]:
        gpu = find_gpu(found.device)
        assert gpu is not None and 0 < found.mfu(gpu) < 1 and found.source
    build = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert f"/{MEASURED_PATH.relative_to(PROJECT_DIR)}" in build["targets"]["wheel"]["include"]


def test_an_estimate_without_a_public_figure_is_a_rough_one(tmp_path):
    speed = expected(tmp_path)
    assert (speed.mfu, speed.source) == (0.39, "public") and "not measured" in speed.detail
    speed = expected(tmp_path, "AMD Instinct MI300X")
    assert speed.mfu == pytest.approx(0.32) and speed.source == "rough"
    assert speed.detail == ("no public figure for one MI300X; assumed 32%, 80% of an"
                            " assumed best of 40%")
    assert "80% of the best of 41% (from H100)" in expected(tmp_path, "H100 PCIe").detail
    assert expected(tmp_path, "A100-SXM4-40GB").detail.startswith("51% (from A100-80) in public")


@pytest.mark.parametrize(("model", "train", "precision", "reason"), [
    ({}, {}, "fp32", "fp32"), ({}, {}, "tf32", "tf32"), ({"drop_rate": 0.1}, {}, "bf16", "dropout"),
    ({"n_layers": 36}, {}, "bf16", "another model size"),
    ({"vocab_size": 99, "n_layers": 1, "emb_dim": 96}, {}, "fp32",
     "fp32, another model size, a model below a million parameters (the speed is a guess)"),
    ({}, {"compile": False}, "bf16", "not compiled"),
    ({}, {"attention": "math"}, "bf16", "math attention"),
    ({}, {"activation_checkpointing": True}, "bf16",
     "recomputation, which adds a third of the work"),
])
def test_a_public_figure_counts_only_for_such_a_run(tmp_path, model, train, precision, reason):
    wanted = changed(model, train, precision)
    found = expected(tmp_path, wanted=wanted)
    assert found.source == "rough" and found.detail.endswith(f"no public figure for: {reason}")
    assert found.mfu == 0.39 * (0.75 if "activation_checkpointing" in train else 1)
    if train:  # a run with the same option has the speed
        add_summary(tmp_path, "mine", train={"activation_checkpointing": False} | train,
                    machine=MACHINE | {"attention": "flash", "compiled": True} | {
                        {"compile": "compiled"}.get(key, key): value
                        for key, value in train.items()})
        assert expected(tmp_path, wanted=wanted).source == "own run"
def test_the_plan_of_a_run_uses_an_own_run_and_says_which(workplace):
    workplace.add_run(model=MODEL.model_dump(), train=LONG)
    add_summary(workplace.runs_dir, "fast", this_launch=LAUNCH | {"seconds": 750.0})
    result = succeeded(run_lab("plan", "tiny", "--runs-dir", str(workplace.runs_dir)))
    costs = result.output.split("\nmachine ")[2]
    row = next(line for line in costs.splitlines() if line.startswith("8x H100"))
    assert row.endswith("own run") and f"{854.44e6 * 4e6 / 8 / 989e12:.0%}" in row
    hours = f"{10**9 / 4e6 / 3600:,.2f}"  # faster than all public figures: the lowest estimate too
    assert row.split()[3] == row.split()[4] == hours
    assert "\n  H100, own run: 4,000,000 tokens/s on 8x NVIDIA H100 80GB HBM3, 163," in costs
    assert "(run fast)\n" in costs
    assert "\n  A100-80, public: 51% in public runs on several GPUs; not measured with" in costs


def test_a_slow_own_run_is_not_faster_than_the_highest_estimate(workplace):
    workplace.add_run(model=MODEL.model_dump(), train=LONG)
    add_summary(workplace.runs_dir, "slow", this_launch=LAUNCH | {"seconds": 15_000.0})
    found = estimate(load_run(workplace.runs_dir, "tiny"), Machine.parse("x=8xH100@10"),
                     tokens=None, measured=read_measured(workplace.runs_dir))
    assert found.speed.source == "own run" and found.speed.mfu < 0.053
    assert found.hours.low < found.hours.expected <= found.hours.high


def test_the_summary_of_a_resumed_run_tells_the_speed_of_its_last_launch(workplace):
    workplace.add_run(model=MODEL.model_dump())
    run = load_run(workplace.runs_dir, "tiny")
    clock = PhaseClock()
    clock.resume({"training": 5000.0, "waiting": 1.0}, {})
    clock._spent |= {"training": 8.0, "waiting": 2.0}
    end = RunEnd(first_step=900, global_step=999, stop_reason=None, lacks_validation=False,
                 facts={"machine": MACHINE})
    run.summary_path.write_text(json.dumps(summarise(
        run, BatchPlan(8, 1, 8, 1024, 2000), clock, end)))
    assert read_own(run.summary_path).tokens_per_second == pytest.approx(99 * 65536 / 10)
