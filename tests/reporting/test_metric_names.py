from __future__ import annotations

import math

import pytest

from reporting.metric_names import NAMES, final_figures, metrics_of, shown_step
from reporting.metrics_file import BY_LAYER, NUMBERS, UPPER_BOUNDS


def test_every_key_of_a_record_has_a_name_of_its_own() -> None:
    assert {*NUMBERS, *BY_LAYER, *UPPER_BOUNDS} <= NAMES.keys()
    assert len(set(NAMES.values())) == len(NAMES)


def test_the_names_that_people_know() -> None:
    record = {"global_step": 4, "train_loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5,
              "tokens_per_second": 100, "mfu": 0.4, "validation_loss": 3.0, "tokens": 640,
              "host_load": 1.5}
    assert metrics_of(record) == {
        "train/loss": 2.5, "train/learning_rate": 1e-3, "train/grad_norm": 0.5,
        "train/tokens_per_second": 100.0, "train/mfu": 0.4, "validation/loss": 3.0,
        "progress/tokens": 640.0, "machine/host_load": 1.5}
    assert shown_step(record) == 5


def test_layers_count_from_1_and_gpus_from_0() -> None:
    assert metrics_of({"layer_grad_norm": [1.0, None, 3.0], "gpu_power_w": [250, 300],
                       "gpu_throttling": ["", "hw thermal slowdown"]}) == {
        "layers/1/grad_norm": 1.0, "layers/3/grad_norm": 3.0,
        "machine/gpu_0/power_w": 250.0, "machine/gpu_1/power_w": 300.0,
        "machine/gpu_0/is_throttled": 0.0, "machine/gpu_1/is_throttled": 1.0}


@pytest.mark.parametrize("value", [None, "2", True, math.nan, math.inf, {"a": 1}, [[1.0]], ["x"]])
def test_what_is_no_number_is_left_out(value: object) -> None:
    assert metrics_of({"global_step": 1, "train_loss": value, "usd": 1}) == {"progress/usd": 1.0}


def test_the_figures_of_the_end() -> None:
    figures = final_figures({
        "status": "finished", "global_step": 11, "num_steps": 12, "train_loss": 1.5,
        "validation_loss": None, "best": {"loss": 1.25}, "seconds": {"a": 1.0, "b": 2.0},
        "usd": {"a": 0.5, "total": 0.5}, "machine": {"device": "x"}})
    assert figures == {"final/steps": 12.0, "final/num_steps": 12.0, "final/train_loss": 1.5,
                       "final/best_loss": 1.25, "final/seconds": 3.0, "final/usd": 0.5}


@pytest.mark.parametrize("summary", [
    {}, {"status": "running", "seconds": {"a": 1.0}, "usd": None}, {"global_step": "11"},
    {"global_step": None, "train_loss": 1.0}])
def test_a_run_that_has_not_ended_has_no_final_figures(summary: dict) -> None:
    assert final_figures(summary) == {}
