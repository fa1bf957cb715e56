from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from reporting import charts
from reporting.charts import draw_charts
from reporting.layers_chart import LINES, MAX_LINES, MAX_POINTS, PANELS, measured_steps, plot_layers
from reporting.metrics_file import BY_LAYER, NUMBERS
from tests.support.workplace import draw_bare

SINGLE = [key for quantity in PANELS for prefix, suffix in LINES
          if (key := f"{prefix}{quantity}{suffix}") in NUMBERS and key != "grad_norm_max"]


def records(num_steps: int, *, depth: int = 12) -> list[dict]:
    return [{"global_step": 100 * i + 99}
            | {key: [1.0 + layer for layer in range(depth)] for key in BY_LAYER}
            | dict.fromkeys(SINGLE, 0.5) for i in range(num_steps)]


def plotted(found: list[dict]) -> dict[str, list[np.ndarray]]:
    """The lines of each panel, as (points, 2)."""
    figure = Figure()
    plot_layers(figure, measured_steps(found), Path("run"))
    return {quantity: [line.get_xydata() for line in axes.lines]
            for quantity, axes in zip(PANELS, figure.axes, strict=False)}


def test_every_quantity_of_the_metrics_is_plotted() -> None:
    lines = plotted(records(5))
    assert set(BY_LAYER) == {f"layer_{quantity}" for quantity in list(PANELS)[:5]}
    assert [len(lines[quantity]) for quantity in PANELS] == [14, 14, 13, 12, 12, 4, 4]
    assert lines["grad_norm"][3].tolist() == [[100 * i + 100, 4.0] for i in range(5)]


def test_a_chart_is_drawn_beside_the_others_and_only_with_diagnostics(tmp_path: Path) -> None:
    draw_charts(tmp_path, [{"global_step": 3, "train_loss": None}])
    assert not list(tmp_path.iterdir())
    draw_charts(tmp_path, records(3))
    assert [path.name for path in tmp_path.iterdir()] == ["layers-chart.png"]
    assert imread(tmp_path / "layers-chart.png").shape[:2] == (900, 1800)


def test_long_runs_are_averaged_and_of_deep_models_some_layers_are_drawn() -> None:
    lines = plotted(records(1000, depth=200))["attention_entropy"]
    assert len(lines) == MAX_LINES and all(len(line) == MAX_POINTS for line in lines)
    assert lines[0][0, 1] == 1.0 and lines[-1][0, 1] == 200.0  # the first and the last layer


@pytest.mark.parametrize("values", [[None] * 12, [0.0] * 12, [-1.0] * 12, [1e100] * 12],
                         ids=["null", "zero", "negative", "large"])
def test_numbers_that_cannot_be_drawn_do_not_stop_a_chart(
    tmp_path: Path, values: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "draw_by_hand", draw_bare)
    found = records(3)
    for record in found:
        record |= dict.fromkeys(BY_LAYER, values)
    found[1]["layer_grad_norm"] = values
    found[2] |= dict.fromkeys(SINGLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing
        draw_charts(tmp_path, found)
    assert (tmp_path / "layers-chart.png").exists()


def test_records_of_another_depth_or_without_some_keys_are_left_out() -> None:
    found = [*records(2, depth=3), *records(2), {"global_step": 9, "layer_grad_norm": [1.0]}]
    assert measured_steps(found) == [found[-1]]
    assert measured_steps(found[:-1]) == found[2:4]
    found[3]["layer_update_ratio"] = [1.0]
    assert measured_steps(found[:-1]) == [found[3]]
    assert plotted(found)["grad_norm"][0].tolist() == [[10.0, 1.0]]
    plotted(found[:-1])
