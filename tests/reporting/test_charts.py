from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib import font_manager, pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
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


def loss_chart(found: list[dict]) -> np.ndarray:
    """Draw the loss chart without the hand-drawn style, which takes most of the time."""
    figure = Figure(figsize=(10, 5.6), dpi=60)
    canvas = FigureCanvasAgg(figure)
    charts._plot_losses(figure.subplots(), [r for r in found if "train_loss" in r],
                        [r for r in found if "validation_loss" in r])
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255  # (height, width, 3)


def share_of(color: tuple[float, float, float], pixels: np.ndarray) -> float:
    return float((np.abs(pixels - np.array(color)).max(axis=-1) < 0.1).mean())


@pytest.mark.parametrize("num_steps", [10, 200_000])
def test_three_charts_are_drawn_for_any_length(tmp_path: Path, num_steps: int) -> None:
    draw_charts(tmp_path, records(num_steps))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CHARTS)
    for name in CHARTS:
        assert imread(tmp_path / name).shape[:2] == (672, 1200)


def test_a_chart_that_cannot_be_drawn_leaves_no_file_and_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "loss-chart.png"
    path.write_text("old")

    def fail(figure: Figure) -> None:
        figure.subplots().set_title("$\\frac{$")  # fails when it is rendered

    with pytest.raises(ValueError, match="frac"):
        charts.draw_by_hand(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["loss-chart.png"]
    assert path.read_text() == "old"


def test_the_loss_chart_shows_training_and_validation() -> None:
    blue, red = (0.12, 0.47, 0.71), (0.84, 0.15, 0.16)
    without = loss_chart([r for r in records(2000) if "train_loss" in r])
    assert share_of(blue, without) > 0.001 and share_of(red, without) == 0
    assert share_of(red, loss_chart(records(2000))) > 0.001


def test_a_run_with_a_price_has_an_axis_in_dollars() -> None:
    priced = [record | {"usd": 0.02 * (record["global_step"] + 1)} for record in records(2000)]
    ink = [float((loss_chart(found)[:40] < 0.5).mean()) for found in (records(2000), priced)]
    assert ink[1] > 1.5 * ink[0]


@pytest.mark.parametrize("usd", [[1, 1, 1], [1, 1, 2], [1, 2, 2], [0, 0, 0], [3, 1, 2]])
def test_cost_that_does_not_rise_does_not_stop_a_chart(usd: list[float]) -> None:
    found = [record | {"usd": spent} for record, spent in zip(records(30), usd, strict=True)]
    assert loss_chart(found).any()


def test_the_two_directions_of_the_cost_axis_are_inverse() -> None:
    steps, usd = np.array([10.0, 20, 50]), np.array([1.0, 3, 4])
    points = np.array([-5.0, 10, 15, 20, 40, 50, 80])
    found = charts._interpolate(points, steps, usd)
    assert list(found[1:4]) == [1, 2, 3]
    inside = slice(1, 6)
    np.testing.assert_allclose(charts._interpolate(found, usd, steps)[inside], points[inside])
    assert found[0] < 1 and found[-1] > 4


@pytest.mark.parametrize("prices", [
    [1e-5 * step for step in range(1, 13)],  # a short run on a cheap machine
    [0.05 + 1e-4 * step for step in range(12)],  # most was spent before the first report
    [1e-3 * 4**step for step in range(12)],
    [8.0 * step for step in range(1, 13)],
])
def test_labels_in_dollars_differ_and_do_not_overlap(prices: list[float]) -> None:
    found = [record | {"usd": usd} for record, usd in zip(records(120), prices, strict=False)
             if "train_loss" in record]
    with pyplot.xkcd():
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        axes = figure.subplots()
        charts._plot_losses(axes, found, [])
        FigureCanvasAgg(figure).draw()
    (above,) = axes.child_axes
    labels = above.get_xticklabels()
    assert 3 <= len(labels) <= 6 and len({label.get_text() for label in labels}) == len(labels)
    for label, usd in zip(labels, above.get_xticks(), strict=True):
        assert float(label.get_text().replace(",", "")) == pytest.approx(usd)
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 + 5 < right.x0 for left, right in pairwise(boxes))


def test_legends_say_what_the_bands_and_marks_are() -> None:
    found = [record for record in records(400) if "train_loss" in record]
    found[30]["train_loss"] += 3
    axes = Figure().subplots()
    charts._plot_losses(axes, found, [])
    labels = axes.get_legend_handles_labels()[1]
    assert labels[:2] == ["training, mean between two points",
                          "smallest to largest step between them"]
    assert "spikes (mean far above those before): 1" in labels


def test_spikes_are_marked_while_the_loss_falls_fast_and_early_in_a_run() -> None:
    noise = np.random.default_rng(1).normal(scale=0.03, size=100)
    losses = 3 + 8 * np.exp(-np.arange(100) / 15) + noise
    found = [{"global_step": step, "train_loss": loss} for step, loss in enumerate(losses)]
    assert charts.find_spikes(found) == []
    peaks = {14: 1.5, 25: 1.2, 80: 0.6}
    for step, height in peaks.items():
        found[step]["train_loss"] += height
    assert [record["global_step"] for record in charts.find_spikes(found)] == list(peaks)


def test_the_chart_of_step_times_names_the_slowest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, drawn = records(300), Figure()
    for place, record in enumerate(found):
        record |= {"slowest_step": 10 * place + 3, "slowest_step_seconds": place % 7 / 10}
    found[9] |= {"slowest_step_seconds": 29.0}
    found[3] |= {"slowest_step": None, "slowest_step_seconds": None}
    monkeypatch.setattr(charts, "_draw", lambda path, ylabel, plot: path.name.startswith(
        "step-time") and plot(drawn.subplots()))
    draw_charts(tmp_path, found)
    _, labels = drawn.axes[0].get_legend_handles_labels()
    assert labels == ["slowest step between two points", "slowest of all: step 94 with 29 s"]
    assert max(drawn.axes[0].lines[0].get_ydata()) == 29


def test_missing_numbers_do_not_stop_a_chart(tmp_path: Path) -> None:
    found = records(300)
    found[3]["train_loss"] = found[4]["grad_norm"] = found[5]["grad_norm_max"] = None
    draw_charts(tmp_path, found)
    assert (tmp_path / "grad-norm-chart.png").exists()


def test_without_records_nothing_is_drawn(tmp_path: Path) -> None:
    draw_charts(tmp_path, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("installed", [[], ["xkcd"]])
def test_missing_fonts_cause_no_warning(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(font_manager, "get_font_names", lambda: installed)
    assert charts._fonts() == [*installed, "DejaVu Sans"]
    if not installed:
        with caplog.at_level(logging.WARNING):
            draw_charts(tmp_path, records(100))
        assert not caplog.records and not recwarn.list
