"""What the charts of a sweep show, read from the figures' objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab.compare.run_results import FINISHED
from lab.sweep import charts
from lab.sweep.plan import BASELINE, PlannedRun, Variant
from lab.sweep.ranges import Range
from lab.sweep.results import Entry, Outcome

BASE = Variant(name=BASELINE, changes={})


def outcome(variant: Variant, *losses: float) -> Outcome:
    """Return a finished run with these validation losses."""
    records = [{"tokens": 1000 * (place + 1), "validation_loss": loss}
               for place, loss in enumerate(losses)]
    result = SimpleNamespace(records=records, config={},
                             figures=SimpleNamespace(validation_loss=losses[-1]))
    return Outcome(PlannedRun(variant, 42, Path("run"), None), result, FINISHED)


def entry(value: float, *losses: float, baseline: float = 7.0) -> Entry:
    variant = Variant(name=f"drop_rate-{value}", changes={"drop_rate": value})
    return Entry(variant, [outcome(variant, *losses)], [outcome(BASE, baseline)])


@pytest.mark.parametrize("losses", [
    (6.264, 6.30, 6.35, 6.40),  # the lowest loss comes first
    (7.0, 6.9, 6.264),
    (6.264,),
])
def test_the_loss_axis_contains_the_lowest_and_the_final_losses(losses: tuple[float, ...]) -> None:
    base = Entry(BASE, [outcome(BASE, 9.0, 8.0, 6.5, 6.45)], [outcome(BASE, 6.45)])
    figure = Figure()
    charts._plot_losses(figure, [base, entry(0.1, *losses)])
    low, high = figure.axes[0].get_ylim()
    height = high - low
    assert low + 0.05 * height < min(losses)
    assert high - 0.05 * height > max(losses[-1], 6.5)
    assert low > 6 and high < 8  # the high losses at the beginning do not press the others together


@pytest.mark.parametrize("losses", [(6.9,), (6.9, 7.2), (6.9, 7.2, 6.5, 7.0)])
def test_no_difference_lies_on_the_frame(losses: tuple[float, ...]) -> None:
    figure = Figure(layout="constrained")
    charts._plot_differences(figure, [entry(place / 10, loss) for place, loss in
                                      enumerate(losses)])
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    frame = axes.get_window_extent()
    points = [axes.transData.transform(line.get_xydata()[0]) for line in axes.lines
              if line.get_marker() == "o"]
    assert len(points) == len(losses)
    marker = 2 * 8 / 72 * figure.dpi  # twice its diameter
    for x, y in points:
        assert frame.x0 + marker < x < frame.x1 - marker
        assert frame.y0 + marker < y < frame.y1 - marker
    assert points[0][1] == max(y for _, y in points)  # the first one at the top


def test_the_minimum_is_said_to_be_that_of_the_fit() -> None:
    entries = [(value, entry(value, loss)) for value, loss in ((1, 7.0), (2, 6.5), (4, 7.0))]
    figure = Figure()
    charts._plot_range(figure, Range("drop_rate", entries))
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "minimum of the fit: 6.5000 at 2" in labels
