"""Charts of a comparison: loss curves, loss over the batch size, memory over the microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.compare.results import Result
from lab.compare.rows import LOSS_NAMES, Row, deciding_loss
from lab.curve_fits import fit_log_quadratic
from lab.runs import number
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_CURVES, LOSS_OVER_BATCH, MEMORY = (
    "loss-curves.png", "loss-over-batch.png", "memory-over-microbatch.png")
MAX_POINTS = 60  # of a training curve; the noise of more would hide the other curves
MAX_NAMES = 16  # in a legend
HIGH_START = 0.1  # of a curve
MARGIN = 0.08  # share of an axis between its ends and the points
FEW_VALIDATIONS = 15  # up to this number, each one is marked
PUBLISHED_COLOR, OTHER_COLOR = "tab:red", "tab:gray"
NEEDED_FOR_PARABOLA, NEEDED_FOR_LINE = 3, 2  # different x


@dataclass(frozen=True)
class Points:
    """Points that one curve is fitted through, or the points that belong to no curve.

    Attributes:
        names: the labels of the points; empty for published ones.
    """

    label: str
    color: str
    x: list[float]
    y: list[float]
    names: list[str]
    has_curve: bool


def loss_panels(rows: list[Row]) -> dict[str, list[Points]]:
    """Group rows whose losses form one curve over the batch size, by the loss that is shown.

    Published rows only have a test loss: if runs show another loss, they get their own panel.
    """
    runs = [row for row in rows if not row.is_published]
    kind = deciding_loss(runs)
    tested = rows if kind == "test_loss" else [row for row in rows if row.is_published]
    panels = {kind: loss_points(runs, kind), "test_loss": loss_points(tested, "test_loss")}
    return {kind: points for kind, points in panels.items() if points}


def loss_points(rows: list[Row], kind: str) -> list[Points]:
    """Group the rows that have this loss by all settings that change it, except the batch size."""
    return _grouped(((row.first.loss_group, row, row.figures.global_batch_size, row.loss(kind))
                     for row in rows),
                    needed=NEEDED_FOR_PARABOLA, published="published: FineWeb, 3.26G tokens")


def memory_points(rows: list[Row]) -> list[Points]:
    """Group runs whose memory forms one line over the microbatch: same model and precision.

    A published point is the memory of a GPU and the largest microbatch that fitted. A search for
    the largest microbatch is a line of its own.
    """
    searches = [
        Points(f"--find-max-microbatch of {result.name}", f"C{3 + number % 6}",
               *map(list, zip(*result.search, strict=True)), names=[""] * len(result.search),
               has_curve=len({size for size, _ in result.search}) >= NEEDED_FOR_LINE)
        for number, result in enumerate(
            result for row in rows for result in row.results if result.search)]
    return searches + _grouped(
        ((result.memory_group, row, result.figures.microbatch_size, result.memory_gib)
         for row in rows for result in row.results),
        needed=NEEDED_FOR_LINE, published="published: GPU memory and its largest microbatch")


def _grouped(found: Iterable[tuple[tuple[str, ...], Row, float | None, float | None]], *,
             needed: int, published: str) -> list[Points]:
    """Return a group for each curve with at least `needed` different x, and one for all others.

    Args:
        found: group, row, x and y of each point.
        published: label of the published points.
    """
    groups: dict[tuple[str, ...], dict[tuple[float, float], Row]] = {}
    for group, row, x, y in found:
        if group and x and y is not None:
            groups.setdefault(group, {}).setdefault((x, y), row)  # equal points count once
    curves, others = [], {}
    for points in groups.values():
        first = next(iter(points.values()))
        if len({x for x, _ in points}) < needed:
            others |= points
        elif first.is_published:
            curves.append(_points(points, published, PUBLISHED_COLOR))
        else:
            color = f"C{sum(curve.color != PUBLISHED_COLOR for curve in curves) % 3}"
            curves.append(_points(points, f"runs like {first.short_name}", color))
    label = f"too few similar runs for a curve ({needed} needed)"
    return curves + ([_points(others, label, OTHER_COLOR)] if others else [])


def _points(points: dict[tuple[float, float], Row], label: str, color: str) -> Points:
    return Points(label, color, x=[x for x, _ in points], y=[y for _, y in points],
                  names=["" if row.is_published else row.short_name for row in points.values()],
                  has_curve=color != OTHER_COLOR)


def draw_comparison(rows: list[Row], charts_dir: Path) -> tuple[list[Path], list[str]]:
    """Draw the charts that have data, and delete those of an earlier comparison.

    Returns:
        The paths of the charts, and for each missing chart a line with the reason.

    Raises:
        OSError: a file cannot be written.
    """
    charts_dir.mkdir(parents=True, exist_ok=True)
    curves, losses, memory = _curves(rows, "global_step"), loss_panels(rows), memory_points(rows)
    written, missing = [], []
    for name, has_points, plot, reason in (
        (LOSS_CURVES, list(curves), lambda figure: _plot_curves(figure, rows),
         "no run has a metrics.jsonl with losses"),
        (LOSS_OVER_BATCH, losses, lambda figure: _plot_losses(figure, losses),
         "no finished run has a loss and a batch size"),
        (MEMORY, memory, lambda figure: _plot_memory(figure, memory),
         "no run has recorded its peak memory"),
    ):
        (charts_dir / name).unlink(missing_ok=True)
        if has_points:
            written.append(draw_by_hand(charts_dir / name, plot))
        else:
            missing.append(f"not drawn: {name}: {reason}")
    return written, missing


def points_of(result: Result, key: str, x_key: str = "tokens") -> tuple[Any, Any]:
    """Return x and y of a loss, of the records that have both."""
    points = [(x, y) for record in result.records
              if (x := number(record.get(x_key))) is not None
              and (y := number(record.get(key))) is not None]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return (x + 1 if x_key == "global_step" else x), y  # people count from 1


def _curves(rows: list[Row], x_key: str) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield the place of the row, the key, x and y of each loss; the training loss smoothed."""
    for place, row in enumerate(rows):
        for result in row.results:
            for key in ("train_loss", "validation_loss"):
                x, y = points_of(result, key, x_key)
                if key == "train_loss" and len(x):  # averages of at most MAX_POINTS groups
                    groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS))
                    x = np.array([x[group[-1]] for group in groups])
                    y = np.array([y[group].mean() for group in groups])
                if len(x):
                    yield place, key, x, y


def _plot_curves(figure: Figure, rows: list[Row]) -> None:
    """Plot the losses of all runs over steps, and over tokens, time and dollars if recorded."""
    rows = [row for row in rows if any(result.records for result in row.results)]
    panels = {label: curves for label, key in (
        ("global step", "global_step"), ("tokens", "tokens"), ("minutes", "seconds"),
        ("US$", "usd")) if (curves := list(_curves(rows, key)))}
    if any(x[-1] > 3600 for _, _, x, _ in panels.get("minutes", ())):
        panels = {"hours" if label == "minutes" else label: panels[label] for label in panels}
    units = {"minutes": 60, "hours": 3600}
    shape, size = ((2, 2), (12, 9)) if len(panels) == 4 else ((1, len(panels)), (12, 5.6))
    figure.set_size_inches(*size)
    for axes, (label, curves) in zip(figure.subplots(*shape, sharey=True, squeeze=False).flat,
                                     panels.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats per token)")
        _plot_panel(axes, [(place, key, x / units.get(label, 1), y)
                           for place, key, x, y in curves])
    figure.axes[0].set_ylim(*loss_limits(y for *_, y in panels["global step"]))
    figure.suptitle("training (thin, smoothed) and validation (bold)")
    for place, row in enumerate(rows[:MAX_NAMES]):
        is_last = place == MAX_NAMES - 1 and len(rows) > MAX_NAMES
        figure.axes[0].plot([], [], color=f"C{place % 10}", linewidth=2.5,
                            label=f"and {len(rows) - place} more" if is_last
                            else without_formulas(row.short_name))
    figure.legend(loc="outside lower center", ncols=min(4, len(rows)), frameon=False,
                  fontsize="small")


def _plot_panel(axes: Axes, curves: list[tuple[int, str, Any, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    for place, key, x, y in curves:  # without path effects: they draw white borders
        style: dict[str, Any] = {"linewidth": 1, "alpha": 0.5} if key == "train_loss" else {
            "linewidth": 2.5, "markersize": 4,
            "marker": "o" if len(y) <= FEW_VALIDATIONS else None}
        axes.plot(x, y, color=f"C{place % 10}", path_effects=[], **style)
    if max(x.max() for _, _, x, _ in curves) >= 1000:  # smaller x would have an m, read as M
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def loss_limits(curves: Iterable[Any], start: float = HIGH_START) -> tuple[float, float]:
    """Return limits of a loss axis, without the high losses at the beginning of training.

    Args:
        start: the share of each curve of which only the lowest loss is shown.
    """
    known = [np.asarray(curve) for curve in curves if len(curve)]
    low = min(curve.min() for curve in known)
    high = max(curve[int(len(curve) * start):].max() for curve in known)
    margin = MARGIN * (high - low) or 0.5
    return low - margin, high + margin


def without_formulas(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib parses text between two dollar signs as a formula


def _plot_losses(figure: Figure, panels: dict[str, list[Points]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure.set_size_inches(8 + 2 * len(panels), 7)
    for axes, (kind, groups) in zip(figure.subplots(1, len(panels), squeeze=False).flat,
                                    panels.items(), strict=True):
        for group in groups:
            _plot_points(axes, group)
            if group.has_curve:
                _plot_parabola(axes, group)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("global batch (sequences)")
        axes.set_ylabel(f"{LOSS_NAMES[kind]} (nats per token)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        _add_legend(axes)


def _plot_parabola(axes: Axes, group: Points) -> None:
    """Plot the curve fitted to a group; mark its minimum if that is in the range of the points."""
    curve, lowest = fit_log_quadratic(group.x, group.y)
    x = np.geomspace(min(group.x) / 1.3, max(group.x) * 1.3, 200)
    axes.plot(x, curve(np.log(x)), color=group.color, zorder=1,
              label="quadratic in ln(batch)")
    if lowest is None:
        axes.plot([], [], linestyle="none",
                  label="no minimum of the fit in the range of these batch sizes")
        return
    axes.plot(*lowest, color=group.color, marker="*", markersize=16, linestyle="none",
              markeredgecolor="black", zorder=4,
              label=f"minimum of the fit: {lowest[1]:.3f} at a batch of {lowest[0]:,.0f}")


def _plot_memory(figure: Figure, groups: list[Points]) -> None:
    axes = figure.subplots()
    for group in groups:
        _plot_points(axes, group)
        if group.has_curve:
            slope, fixed = np.polyfit(group.x, group.y, 1)
            ends = np.array([0, max(group.x) * 1.1])
            axes.plot(ends, fixed + slope * ends, color=group.color, zorder=1,
                      label=f"{fixed:.2f} GiB + {slope:.3f} GiB per sequence")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("microbatch (sequences)")
    axes.set_ylabel("memory per GPU (GiB)")
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    """Place the legend below the chart; inside, it could hide a point."""
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13),
                ncols=1 if len(axes.figure.axes) > 1 else 2)


def _plot_points(axes: Axes, group: Points) -> None:
    axes.plot(group.x, group.y, color=group.color, marker="o", markersize=8, linestyle="none",
              zorder=3, label=without_formulas(group.label))
    for x, y, name in zip(group.x, group.y, group.names, strict=True):
        axes.annotate(without_formulas(name), (x, y), textcoords="offset points", xytext=(7, 5),
                      fontsize="x-small", color="gray")
