import errno
import json
import math
import os

import pytest

from basics.errors import UserError
from basics.json_files import to_json
from reporting import metrics_file
from reporting.metrics_file import (
    METRICS,
    metrics_of,
    read_metrics,
    remove_metrics_from,
    shown_step,
    spent_before,
)
from reporting.summary import final_figures


def test_nan_never_enters_json():
    values = {"a": float("nan"), "b": {"c": float("inf"), "d": 1.5}, "e": 3}
    assert json.loads(to_json(values)) == {"a": None, "b": {"c": None, "d": 1.5}, "e": 3}


def test_what_earlier_launches_spent_is_the_most_that_was_written(tmp_path):
    path = tmp_path / "summary.json"
    records = [{"global_step": 1, "energy_kwh": 0.75, "seconds": 60.0}, {"global_step": 2},
               {"global_step": 3, "energy_kwh": 1e300}]
    for summary, wanted in (
            ("", (60.0, 0.0, 0.75)), ('{"energy_kwh": null}', (60.0, 0.0, 0.75)),
            ('{"energy_kwh": -1}', (60.0, 0.0, 0.75)), ('{"energy_kwh": 1.25}', (60.0, 0.0, 1.25)),
            ('{"seconds": {"a": 50.0, "b": 40.0}, "usd": {"total": 3.5}}', (90.0, 3.5, 0.75))):
        path.write_text(summary)
        assert spent_before(records, path) == wanted


def test_repeated_steps_and_a_partial_line_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"global_step": 4}\n{"global_step": 9}\n{"global_step": 14}\n{"global_st')
    assert len(read_metrics(path)) == 3
    remove_metrics_from(path, 10)
    assert path.read_text() == '{"global_step": 4}\n{"global_step": 9}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(("number", "status"), [(errno.EIO, 1), (errno.EACCES, 2)])
def test_records_that_cannot_be_read_are_an_error_and_stay(tmp_path, monkeypatch, number, status):
    path, text = tmp_path / "metrics.jsonl", '{"global_step": 4, "seconds": 9.0}\n'
    assert read_metrics(path) == [] and spent_before([], path) == (0.0, 0.0, 0.0)
    path.write_text(text)

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(metrics_file, "read_regular_file", fail)
    for read in (lambda: read_metrics(path), lambda: remove_metrics_from(path, 3),
                 lambda: spent_before([], path)):
        with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read \(.*\); "
                           + ("start again" if status == 1 else "make it readable")) as caught:
            read()
        assert caught.value.status == status
    assert path.read_text() == text


WRITTEN = [
    {"layer_grad_norm": [1.0, None, -2], "logit_max": None}, {"layer_grad_norm": [1.0] * 1024},
    {"mfu": 0.41, "host_ram_gib": 21.5, "host_load": 0, "disk_free_gib": 1e6, "energy_kwh": 0.0},
    {"gpu_memory_gib": [20.1, None], "gpu_use_percent": [97, 0], "gpu_temperature_c": [61, -3],
     "gpu_power_w": [650.2, None], "gpu_throttling": ["", "sw power cap, hw slowdown"]},
]
NOT_WRITTEN = [
    {"layer_grad_norm": []}, {"layer_grad_norm": [1.0] * 1025}, {"layer_grad_norm": 1.0},
    {"layer_grad_norm": None}, {"layer_grad_norm": [[1.0]]}, {"layer_grad_norm": ["1"]},
    {"layer_update_ratio": [True]}, {"layer_activation_norm": [1e101]},
    {"layer_max_attention_logit": {"0": 1.0}}, {"layer_attention_entropy": [math.nan]},
    {"logit_p50": "1"}, {"token_loss_max": [1.0]}, {"head_grad_norm": math.inf},
    {"mfu": -0.1}, {"mfu": None}, {"energy_kwh": "1"}, {"energy_kwh": -1}, {"energy_kwh": 1e13},
    {"host_load": [1.0]}, {"host_ram_gib": math.nan}, {"disk_free_gib": True},
    {"gpu_memory_gib": []}, {"gpu_power_w": [1.0] * 257}, {"gpu_temperature_c": 61},
    {"gpu_use_percent": ["97"]}, {"gpu_throttling": "sw power cap"}, {"gpu_throttling": [None]},
    {"gpu_throttling": []}, {"gpu_throttling": [""] * 257}, {"gpu_throttling": ["x" * 201]},
    {"gpu_throttling": ["\x1b[2J"]},
]


def test_what_a_run_writes_is_read_and_other_values_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for values, is_read in [*((values, True) for values in WRITTEN),
                            *((values, False) for values in NOT_WRITTEN)]:
        record = {"global_step": 1, "train_loss": 3.5, "another_key": "x"} | values
        path.write_text(json.dumps(record) + "\n")
        assert read_metrics(path) == [record] * is_read, values


def test_the_names_that_trackers_show():
    names = [metric.name for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    record = {"global_step": 4, "train_loss": 2.5, "learning_rate": 1e-3, "grad_norm": None,
              "tokens_per_second": 100, "validation_loss": 3.0, "tokens": 640, "another": 1.0,
              "layer_grad_norm": [1.0, None, 3.0], "gpu_power_w": [250, 300],
              "gpu_throttling": ["", "hw thermal slowdown"]}
    assert metrics_of(record) == {
        "train/loss": 2.5, "train/learning_rate": 1e-3, "train/tokens_per_second": 100.0,
        "validation/loss": 3.0, "progress/tokens": 640.0,
        "layers/1/grad_norm": 1.0, "layers/3/grad_norm": 3.0,
        "machine/gpu_0/power_w": 250.0, "machine/gpu_1/power_w": 300.0,
        "machine/gpu_0/is_throttled": 0.0, "machine/gpu_1/is_throttled": 1.0}
    assert shown_step(record) == 5


def test_what_trackers_show_at_the_end():
    assert final_figures({
        "status": "finished", "global_step": 11, "num_steps": 12, "train_loss": 1.5,
        "validation_loss": None, "best": {"loss": 1.25}, "seconds": {"a": 1.0, "b": 2.0},
        "usd": {"a": 0.5, "total": 0.5}, "machine": {"device": "x"}}) == {
        "final/steps": 12.0, "final/num_steps": 12.0, "final/train_loss": 1.5,
        "final/best_loss": 1.25, "final/seconds": 3.0, "final/usd": 0.5}
    for summary in ({}, {"status": "running", "seconds": {"a": 1.0}, "usd": None},
                    {"global_step": "11"}, {"global_step": None, "train_loss": 1.0}):
        assert final_figures(summary) == {}  # the run has not ended
