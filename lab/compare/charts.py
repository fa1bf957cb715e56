"""Charts of a comparison: loss curves, loss over the batch size, memory over the microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lab.compare.results import Result
from lab.compare.rows import LOSS_NAMES, Row, deciding_loss
from lab.runs import number
from lab.stats import fit_log_quadratic
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"global step": ("global_step", 1), "tokens": ("tokens", 1), "hours": ("seconds", 3600),
        "US$": ("usd", 1)}  # by label: the key in a record, and how many of its units are one
MAX_POINTS = 60  # of a training curve; the noise of more would hide the other curves
MAX_NAMES = 16  # in a legend
HIGH_START = 0.1  # of a curve
MARGIN = 0.08  # share of an axis between its ends and the points
FEW_VALIDATIONS = 15  # up to this number, each one is marked
PUBLISHED_COLOR, OTHER_COLOR = "tab:red", "tab:gray"
NEEDED_FOR_PARABOLA, NEEDED_FOR_LINE = 3, 2  # different x


class Points(NamedTuple):
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


def loss_points(rows: list[Row], kind: str) -> list[Points]:
    """Group the rows that have this loss by all settings that change it, except the batch size."""
    return _grouped(((row.first.loss_group, row, row.figures["global_batch_size"], row.loss(kind))
                     for row in rows),
                    needed=NEEDED_FOR_PARABOLA, published="published: FineWeb, 3.26G tokens")


def memory_points(rows: list[Row]) -> list[Points]:
    """Group runs whose memory forms one line over the microbatch: same model and precision.

    A published point is the memory of a GPU and the largest microbatch that fitted. A search for
    the largest microbatch is a line of its own.
    """
    results = [(row, result) for row in rows for result in row.results]
    searches = [
        Points(f"--find-max-microbatch of {result.name}", f"C{3 + place % 6}",
               *map(list, zip(*result.search, strict=True)), names=[""] * len(result.search),
               has_curve=len({size for size, _ in result.search}) >= NEEDED_FOR_LINE)
        for place, result in enumerate(one for _, one in results if one.search)]
    return searches + _grouped(
        ((result.memory_group, row, result.figures["microbatch_size"], result.memory_gib)
         for row, result in results),
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
    runs = [row for row in rows if not row.is_published]
    kind = deciding_loss(runs)
    tested = rows if kind == "test_loss" else [row for row in rows if row.is_published]
    panels = {LOSS_NAMES[kind]: points for kind, points in {
        kind: loss_points(runs, kind), "test_loss": loss_points(tested, "test_loss")}.items()
        if points}  # published rows have a test loss only
    written, missing = [], []
    for name, plot, data, needed in (
        ("loss-curves.png", _plot_curves, _curves(rows), "losses in its metrics.jsonl"),
        ("loss-over-batch.png", _plot_losses, panels, "finished with a loss and a batch size"),
        ("memory-over-microbatch.png", _plot_memory, memory_points(rows),
         "recorded its peak memory"),
    ):
        path = charts_dir / name
        path.unlink(missing_ok=True)
        if data:
            written.append(draw_by_hand(path, partial(plot, data)))
        else:
            missing.append(f"not drawn: {name}: no run has {needed}")
    return written, missing


def _curves(rows: list[Row]) -> dict[str, list[tuple[Row, str, Any, Any]]]:
    """Return row, key, x and y of each loss by the label of the axis."""
    found = {}
    for label, (x_key, unit) in AXES.items():
        curves = [(row, key, x / unit, y) for row in rows for result in row.results
                  for key in ("train_loss", "validation_loss")
                  for x, y in [_points_of(result, key, x_key)] if len(x)]
        if curves:
            found[label] = curves
    return found


def _points_of(result: Result, key: str, x_key: str) -> tuple[Any, Any]:
    """Return x and y of a loss, of the records that have both."""
    points = [(x, y) for record in result.records
              if (x := number(record.get(x_key))) is not None
              and (y := number(record.get(key))) is not None]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    if key == "train_loss" and len(x):  # averages of at most MAX_POINTS groups
        groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS))
        x = np.array([x[group[-1]] for group in groups])
        y = np.array([y[group].mean() for group in groups])
    return (x + 1 if x_key == "global_step" else x), y  # people count from 1


def _plot_curves(panels: dict[str, list[tuple[Row, str, Any, Any]]], figure: Figure) -> None:
    """Plot the losses of all runs over steps, and over tokens, time and dollars if recorded."""
    from matplotlib.ticker import EngFormatter

    shape, size = ((2, 2), (12, 9)) if len(panels) == 4 else ((1, len(panels)), (12, 5.6))
    figure.set_size_inches(*size)
    names = {id(row): row.short_name for curves in panels.values() for row, *_ in curves}
    places = {each: place for place, each in enumerate(names)}  # long names may begin alike
    for axes, (label, curves) in zip(figure.subplots(*shape, sharey=True, squeeze=False).flat,
                                     panels.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats per token)")
        for row, key, x, y in curves:  # without path effects: they draw white borders
            style: dict[str, Any] = {"linewidth": 1, "alpha": 0.5} if key == "train_loss" else {
                "linewidth": 2.5, "markersize": 4,
                "marker": "o" if len(y) <= FEW_VALIDATIONS else None}
            axes.plot(x, y, color=f"C{places[id(row)] % 10}", path_effects=[], **style)
        if max(x.max() for _, _, x, _ in curves) >= 1000:  # smaller x would have an m, read as M
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.axes[0].set_ylim(*loss_limits(y for *_, y in next(iter(panels.values()))))
    figure.suptitle("training (thin, smoothed) and validation (bold)")
    for place, name in enumerate([*names.values()][:MAX_NAMES]):
        is_last = place == MAX_NAMES - 1 and len(names) > MAX_NAMES
        figure.axes[0].plot([], [], color=f"C{place % 10}", linewidth=2.5,
                            label=f"and {len(names) - place} more" if is_last
                            else without_formulas(name))
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), frameon=False,
                  fontsize="small")


def loss_limits(curves: Iterable[Any]) -> tuple[float, float]:
    """Return limits of a loss axis, without the high losses at the beginning of training."""
    known = [np.asarray(curve) for curve in curves if len(curve)]
    low = min(curve.min() for curve in known)
    high = max(curve[int(len(curve) * HIGH_START):].max() for curve in known)
    margin = MARGIN * (high - low) or 0.5
    return low - margin, high + margin


def without_formulas(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib parses text between two dollar signs as a formula


def _plot_losses(panels: dict[str, list[Points]], figure: Figure) -> None:
    figure.set_size_inches(8 + 2 * len(panels), 7)
    for axes, (kind, groups) in zip(figure.subplots(1, len(panels), squeeze=False).flat,
                                    panels.items(), strict=True):
        for group in groups:
            _plot_points(axes, group)
            if group.has_curve:
                plot_fit(axes, group.x, group.y, group.color)
        axes.set_xlabel("global batch (sequences)")
        axes.set_ylabel(f"{kind} (nats per token)")
        _add_legend(axes)


def plot_fit(axes: Axes, x: list[float], y: list[float], color: str) -> None:
    """Plot a quadratic in ln(x) through points above 0, and its minimum if it is among them."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    curve, lowest = fit_log_quadratic(x, y)
    drawn = np.geomspace(min(x) / 1.3, max(x) * 1.3, 200)
    axes.plot(drawn, curve(np.log(drawn)), color=color, zorder=1, label="quadratic in ln(x)")
    if lowest is None:
        axes.plot([], [], linestyle="none", label="no minimum of the fit between these values")
        return
    axes.plot(*lowest, color=color, marker="*", markersize=16, linestyle="none",
              markeredgecolor="black", zorder=4,
              label=f"minimum of the fit: {lowest[1]:.4f} at {lowest[0]:,.4g}")


def _plot_memory(groups: list[Points], figure: Figure) -> None:
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
