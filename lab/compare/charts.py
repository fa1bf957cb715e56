"""The charts of `lab compare`: the losses of runs over steps, tokens, time and dollars."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from lab.compare.published import draw_fits, unit_of, without_formulas
from lab.compare.rows import Row, has_several_tokenizers
from lab.runs import Result, bytes_per_token, number_of
from reporting.charts import draw_by_hand
from reporting.reference import Kind, ReferenceCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES: dict[str, dict[str, Any]] = {
    "train_loss": {"linewidth": 1, "alpha": 0.5},
    "validation_loss": {"linewidth": 2.5, "markersize": 4},
}
MINUTES_BELOW_SECONDS = 2 * 3600
MAX_POINTS = 60  # of a training curve; the noise of more would hide the other curves
MAX_NAMES = 16  # in a legend
HIGH_START = 0.1  # of a curve; losses there are above the axis
MARGIN = 0.08  # share of an axis between its ends and the points
FEW_VALIDATIONS = 15  # up to this number, each one is marked


def draw_comparison(
    rows: list[Row], charts_dir: Path, references: dict[str, ReferenceCurve] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw the charts that have data, and delete those of an earlier comparison.

    If the tokenizers of the runs differ, losses are in bits per byte. Returns their paths, and
    a line with the reason for each missing chart or curve. Raises: OSError.

    Args:
        references: what runs are compared with, by the name of the run, in its units.
    """
    charts_dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    missing: list[str] = []

    def draw(name: str, data: object, plot: Callable[[Figure], object], needed: str) -> None:
        path = charts_dir / name
        path.unlink(missing_ok=True)
        if data:
            written.append(draw_by_hand(path, plot))
        else:
            missing.append(f"not drawn: {name}: needs {needed}")

    recorded = [row for row in rows if _has_curve(row)]
    in_bits = has_several_tokenizers(recorded)
    if in_bits:
        missing += [
            f"not drawn in loss-curves.png: {row.name}: the tokenizers of these runs"
            " differ, and its bits per byte are not known"
            for row in recorded
            if not _has_bits(row)
        ]
        recorded = list(filter(_has_bits, recorded))
    curves = partial(_plot_curves, recorded, references or {}, in_bits=in_bits)
    draw("loss-curves.png", recorded, curves, "a run with records")
    missing += draw_fits(rows, draw)
    return written, missing


def _has_curve(row: Row) -> bool:
    records = [record for result in row.results for record in result.records]
    return any(number_of(record, key) is not None for record in records for key in CURVES)


def _has_bits(row: Row) -> bool:
    return all(bytes_per_token(result.records) for result in row.results)


def _points_of(result: Result, key: str, x_key: str) -> tuple[Any, Any]:
    """Return x and y of a run's curve as arrays of float64, (points,)."""
    points = []
    for record in result.records:
        point = number_of(record, x_key), number_of(record, key)
        if None not in point:
            points.append(point)
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    if key == "train_loss" and len(x):  # averages of at most MAX_POINTS groups
        groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS))
        x = np.array([x[group[-1]] for group in groups])
        y = np.array([y[group].mean() for group in groups])
    if x_key == "global_step":
        x = x + 1  # people count from 1
    return x, y


def _plot_curves(
    rows: list[Row], references: dict[str, ReferenceCurve], figure: Figure, *, in_bits: bool
) -> None:
    """Plot the losses of all runs, a panel for each axis that is recorded.

    A reference is shown over tokens, as the first run that is compared with it has its units.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes_of_x = _recorded_axes(rows)
    num_rows = 1 if len(axes_of_x) < 4 else 2
    num_columns = math.ceil(len(axes_of_x) / num_rows)
    figure.set_size_inches(6 * num_columns, 4.5 * num_rows)
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flatten()
    for unused in panels[len(axes_of_x) :]:
        unused.remove()

    compared = next((row.first for row in rows if row.first.name in references), None)
    for panel, (x_key, (label, unit)) in zip(panels, axes_of_x.items(), strict=False):
        panel.set(xlabel=label, ylabel=f"loss ({unit_of(in_bits)})")
        panel.tick_params(labelleft=True)  # on every panel, though they share the axis
        for place, row in enumerate(rows):
            for result in row.results:
                _plot_result(panel, result, x_key, unit, f"C{place}", in_bits=in_bits)
        if x_key == "tokens" and compared:
            per_token = math.log(2) * bytes_per_token(compared.records) if in_bits else 1.0
            _plot_reference(panel, references[compared.name], per_token)
        if x_key == "global_step":
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel.get_xlim()[1] >= 1000:  # smaller x would have an m, read as M
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))

    # The panels share the axis of losses. Its limits leave out the high start of each curve.
    losses = [line.get_ydata() for line in panels[0].lines]
    low = min(y.min() for y in losses)
    high = max(y[int(len(y) * HIGH_START) :].max() for y in losses)
    margin = MARGIN * (high - low) or 0.5
    panels[0].set_ylim(low - margin, high + margin)

    figure.suptitle("training (thin, smoothed) and validation (bold)")
    for place, row in enumerate(rows[:MAX_NAMES]):
        name = without_formulas(row.short_name)
        panels[0].plot([], [], color=f"C{place}", linewidth=2.5, label=name)
    for name in sorted({curve.name for curve in references.values()}):
        panels[0].plot([], [], color="black", linestyle="--", label=f"reference {name}")
    figure.legend(
        loc="outside lower center", ncols=min(4, len(rows)), frameon=False, fontsize="small"
    )


def _recorded_axes(rows: list[Row]) -> dict[str, tuple[str, int]]:
    """Return the keys of records that can be x; of each the label, and how many are one unit."""
    records = [record for row in rows for result in row.results for record in result.records]
    longest = max(number_of(record, "seconds") or 0.0 for record in records)
    is_short = longest < MINUTES_BELOW_SECONDS
    axes = {
        "global_step": ("global step", 1),
        "tokens": ("tokens", 1),
        "seconds": ("minutes", 60) if is_short else ("hours", 3600),
        "usd": ("US$", 1),
    }
    return {
        key: axis
        for key, axis in axes.items()
        if any(number_of(record, key) is not None for record in records)
    }


def _plot_result(
    panel: Axes, result: Result, x_key: str, unit: int, color: str, *, in_bits: bool
) -> None:
    """Plot the training and the validation losses of one run."""
    for key, style in CURVES.items():
        x, y = _points_of(result, key, x_key)
        if not len(x):
            continue
        if in_bits:
            y = y / math.log(2) / bytes_per_token(result.records)
        is_marked = key == "validation_loss" and len(y) <= FEW_VALIDATIONS
        panel.plot(x / unit, y, color=color, marker="o" if is_marked else None, **style)


def _plot_reference(axes: Axes, curve: ReferenceCurve, per_token: float) -> None:
    """Plot a reference's losses, divided by so many nats per unit, within the axis's tokens."""
    for kind in get_args(Kind):
        tokens, losses = curve.between(kind, *axes.get_xlim())
        if len(tokens):
            width = CURVES[f"{kind}_loss"]["linewidth"]
            axes.plot(tokens, losses / per_token, color="black", linestyle="--", linewidth=width)
