"""The sources of the MFU that `lab plan` expects: own runs, shipped measurements, estimates."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from basics.errors import UserError
from lab.__main__ import cli
from lab.plan.speed_sources import (
    MEASURED_PATH,
    ExpectedSpeed,
    SpeedSources,
    Wanted,
    read_own,
    read_shipped,
)
from reporting.speed import find_gpu
from run_config import ModelConfig, load_run
from tests.support.workplace import PROJECT_DIR, Workplace

MODEL = load_run(PROJECT_DIR / "runs", "original").model
H100 = "NVIDIA H100 80GB HBM3"
SECONDS = {"startup": 20.0, "compile": 90.0, "training": 900.0, "waiting": 100.0, "validation": 5.0}
MACHINE = {"device": H100, "device_type": "cuda", "processes": 8, "precision": "bf16",
           "compiled": True, "torch": "2.11"}
WANTED = Wanted(MODEL, "bf16", activation_checkpointing=False)
ROW = {"device": "NVIDIA H200", "processes": 1, "precision": "bf16", "tokens_per_second": 500_000,
       "model": MODEL.model_dump(), "source": "a stand-in of 2026-11-22"}


def summary(**changes: Any) -> dict[str, Any]:
    """Return a summary of 1,000 steps at 3 M tokens a second on eight H100."""
    return {"run": "mine", "status": "finished", "global_step": 999, "tokens": 3_003_003_003,
            "seconds": SECONDS, "machine": MACHINE, "model": MODEL.model_dump(),
            "train": {"activation_checkpointing": False, "microbatch_size": 64}} | changes


def add_summary(runs_dir: Path, name: str, *, age: int = 0, **changes: Any) -> Path:
    path = runs_dir / name / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(summary(**changes)))
    os.utime(path, (1_700_000_000 - age,) * 2)
    return path


def expected(runs_dir: Path, device: str = H100) -> ExpectedSpeed:
    return SpeedSources.read(runs_dir).expected(WANTED, find_gpu(device))


def test_an_own_run_tells_the_speed_of_its_steps_after_the_first(tmp_path: Path) -> None:
    add_summary(tmp_path, "mine")
    found = read_own(tmp_path / "mine" / "summary.json")
    assert found.tokens_per_second == pytest.approx(3e6, rel=1e-5)  # without compile, validation
    speed = expected(tmp_path)
    assert speed.mfu == pytest.approx(3e6 * 854.44e6 / 8 / 989e12, rel=1e-4)
    assert speed.source == "run mine"
    assert speed.detail == (
        "3,000,000 tokens/s on 8x NVIDIA H100 80GB HBM3, 163,009,536 parameters")


@pytest.mark.parametrize("changes", [
    {"status": "failed"}, {"status": "running"}, {"global_step": 48},
    {"machine": MACHINE | {"compiled": False}}, {"machine": MACHINE | {"precision": "fp16"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 NVL"}},
    {"machine": MACHINE | {"device": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}},
    {"machine": MACHINE | {"device_type": "cpu"}}, {"machine": "NVIDIA H100 80GB HBM3"},
    {"train": {"activation_checkpointing": True}}, {"seconds": {"training": 0, "waiting": 0}},
    {"model": MODEL.model_dump() | {"n_layers": 48}}, {"tokens": 10**14}, {"model": {}},
], ids=str)
def test_a_run_that_cannot_be_compared_is_not_used(tmp_path: Path, changes: dict) -> None:
    add_summary(tmp_path, "mine", **changes)
    assert expected(tmp_path) == ExpectedSpeed.estimate(find_gpu(H100))


def test_an_estimate_without_a_public_figure_is_a_rough_one(tmp_path: Path) -> None:
    speed = expected(tmp_path)
    assert (speed.mfu, speed.source) == (0.39, "estimate") and "not measured" in speed.detail
    speed = expected(tmp_path, "NVIDIA B200")
    assert speed.mfu == pytest.approx(0.32) and speed.source == "rough estimate"
    assert speed.detail.startswith("80% of the MFU of the low figures")


@pytest.mark.parametrize("changes", [{"status": "stopped"}, {"global_step": 49}])
def test_a_stopped_and_a_short_run_are_used(tmp_path: Path, changes: dict) -> None:
    add_summary(tmp_path, "mine", **changes)
    assert expected(tmp_path).source == "run mine"


def test_the_nearest_in_size_and_then_the_newest_run_is_used(tmp_path: Path) -> None:
    small = MODEL.model_dump() | {"n_layers": 8}
    add_summary(tmp_path, "smaller", model=small, age=0)
    assert expected(tmp_path).source == "run smaller"
    for name, age in (("old", 300), ("new", 100), ("middle", 200)):
        add_summary(tmp_path, name, age=age)
    assert expected(tmp_path).source == "run new"


def test_damaged_summaries_are_passed_by(tmp_path: Path) -> None:
    for name, text in (("half", '{"status": "fini'), ("list", "[]"), ("bytes", "\xff")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text, encoding="latin-1")
    os.mkdir(tmp_path / "folder")
    os.mkfifo(tmp_path / "folder" / "summary.json")
    assert expected(tmp_path).source == "estimate"
    assert SpeedSources.read(tmp_path / "no such directory").own == ()


def test_a_shipped_measurement_comes_after_own_runs_and_before_the_estimate(
    tmp_path: Path
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([ROW]))
    gpu = find_gpu("H200")
    speed = SpeedSources.read(tmp_path, path).expected(WANTED, gpu)
    assert speed.source == "measured"
    assert speed.mfu == pytest.approx(500e3 * 854.44e6 / 989e12, rel=1e-4)
    assert speed.detail.startswith("500,000 tokens/s on 1x NVIDIA H200, 163,009,536 parameters")
    assert speed.detail.endswith("(a stand-in of 2026-11-22)")
    add_summary(tmp_path, "mine", machine=MACHINE | {"device": "NVIDIA H200"})
    assert SpeedSources.read(tmp_path, path).expected(WANTED, gpu).source == "run mine"
    other = Wanted(MODEL, "tf32", activation_checkpointing=False)
    assert SpeedSources.read(tmp_path, path).expected(other, gpu) == ExpectedSpeed.estimate(gpu)


@pytest.mark.parametrize("text", [None, "{}", json.dumps([ROW | {"mfu": 0.4}]),
                                  json.dumps([ROW | {"tokens_per_second": 0}])])
def test_damaged_measurements_are_a_user_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "measured.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="measured.json: cannot be read .* download it again"):
        read_shipped(path)


def test_the_shipped_measurements_are_valid_and_part_of_the_wheel() -> None:
    for found in read_shipped(MEASURED_PATH):
        gpu = find_gpu(found.device)
        assert gpu is not None and 0 < found.mfu(gpu) < 1 and found.source
    build = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert f"/{MEASURED_PATH.relative_to(PROJECT_DIR)}" in build["targets"]["wheel"]["include"]


def test_the_plan_of_a_run_uses_an_own_run_and_says_which(workplace: Workplace) -> None:
    workplace.add_run(model=MODEL.model_dump(), train={
        "min_train_tokens": 10**9, "validation_interval": None, "validation_batches": None,
        "checkpoint_interval": 100, "precision": "bf16"})
    add_summary(workplace.runs_dir, "fast", tokens=4_004_004_004)
    result = CliRunner().invoke(cli, ["plan", "tiny", "--runs-dir", str(workplace.runs_dir)],
                                catch_exceptions=False)
    costs = result.output.split("\nmachine ")[2]
    row = next(line for line in costs.splitlines() if line.startswith("8x H100"))
    seconds = 10**9 / 4e6
    assert row.endswith("run fast") and f"{854.44e6 * 4e6 / 8 / 989e12:.0%}" in row
    hours = f"{seconds / 3600:,.2f}"  # faster than all public figures: the lowest estimate too
    assert row.split()[3] == row.split()[4] == hours
    assert "\n  run fast: 4,000,000 tokens/s on 8x NVIDIA H100 80GB HBM3, 163," in costs
    assert "\n  estimate: from public figures" in costs  # of the other machines


def test_models_of_half_to_twice_the_flops_are_compared(tmp_path: Path) -> None:
    for layers, is_used in ((12, True), (7, True), (24, True), (36, False), (1, False)):
        model = ModelConfig.model_validate(MODEL.model_dump() | {"n_layers": layers})
        add_summary(tmp_path / str(layers), "mine", model=model.model_dump())
        assert (expected(tmp_path / str(layers)).source == "run mine") == is_used, layers
