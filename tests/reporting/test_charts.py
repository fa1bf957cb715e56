from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.image import imread

from reporting import charts
from reporting.charts import draw_charts

CHARTS = ("loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png")


def records(num_steps: int) -> list[dict]:
    found = []
    for step in range(9, num_steps, 10):
        loss = 10 * (step + 1) ** -0.2
        found.append({"global_step": step, "train_loss": loss, "train_loss_min": loss - 0.1,
                      "train_loss_max": loss + 0.1, "grad_norm": 1.0, "grad_norm_max": 2.0,
                      "learning_rate": 1e-3})
        if step % 100 == 99:
            found.append({"global_step": step, "validation_loss": loss + 0.05})
    return found


def share_of(color: tuple[float, float, float], path: Path) -> float:
    pixels = imread(path)[..., :3]
    return float((np.abs(pixels - np.array(color)).max(axis=-1) < 0.1).mean())


@pytest.mark.parametrize("num_steps", [10, 500, 200_000])
def test_three_charts_are_drawn_whatever_the_length(tmp_path: Path, num_steps: int) -> None:
    draw_charts(tmp_path, records(num_steps))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CHARTS)
    for name in CHARTS:
        assert imread(tmp_path / name).shape[:2] == (672, 1200)


def test_the_loss_chart_shows_training_band_validation_and_best(tmp_path: Path) -> None:
    blue, red = (0.12, 0.47, 0.71), (0.84, 0.15, 0.16)
    draw_charts(tmp_path, [r for r in records(2000) if "train_loss" in r])
    assert share_of(blue, tmp_path / "loss-chart.png") > 0.001
    assert share_of(red, tmp_path / "loss-chart.png") == 0
    draw_charts(tmp_path, records(2000))
    assert share_of(red, tmp_path / "loss-chart.png") > 0.001


def test_a_run_with_a_price_has_an_axis_in_dollars(tmp_path: Path) -> None:
    priced = [record | {"usd": 0.02 * (record["global_step"] + 1)} for record in records(2000)]
    ink = []
    for found in (records(2000), priced):
        draw_charts(tmp_path, found)
        above_the_curves = imread(tmp_path / "loss-chart.png")[:110, :, :3]
        ink.append(float((above_the_curves < 0.5).mean()))
    assert ink[1] > 1.5 * ink[0]


@pytest.mark.parametrize("usd", [[1, 1, 1], [1, 1, 2], [1, 2, 2], [0, 0, 0], [3, 1, 2]])
def test_dollars_that_stand_still_do_not_stop_a_chart(tmp_path: Path, usd: list[float]) -> None:
    draw_charts(tmp_path, [record | {"usd": spent} for record, spent in zip(
        records(30), usd, strict=True)])
    assert (tmp_path / "loss-chart.png").exists()


def test_dollars_and_steps_are_each_others_inverse() -> None:
    steps, usd = np.array([10.0, 20, 50]), np.array([1.0, 3, 4])
    asked = np.array([-5.0, 10, 15, 20, 40, 50, 80])
    there = charts._interpolate(asked, steps, usd)
    assert list(there[1:4]) == [1, 2, 3]
    inside = slice(1, 6)
    np.testing.assert_allclose(charts._interpolate(there, usd, steps)[inside], asked[inside])
    assert there[0] < 1 and there[-1] > 4


def test_numbers_that_were_not_finite_do_not_stop_a_chart(tmp_path: Path) -> None:
    found = records(300)
    found[3]["train_loss"] = found[4]["grad_norm"] = found[5]["grad_norm_max"] = None
    draw_charts(tmp_path, found)
    assert (tmp_path / "grad-norm-chart.png").exists()


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    draw_charts(tmp_path, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("installed", [[], ["xkcd"]])
def test_missing_fonts_are_not_complained_about(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(font_manager, "get_font_names", lambda: installed)
    assert charts._fonts() == [*installed, "DejaVu Sans"]
    if not installed:
        with caplog.at_level(logging.WARNING):
            draw_charts(tmp_path, records(100))
        assert not caplog.records and not recwarn.list
