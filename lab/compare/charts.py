"""Charts of a comparison: loss curves, loss over the batch size, memory over the microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.compare.rows import LOSS_NAMES, Comparison, Row, deciding_loss
from lab.compare.run_figures import Record, number
from lab.compare.run_results import Result
from lab.curve_fits import fit_log_quadratic
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_CURVES, LOSS_OVER_BATCH, MEMORY = (
    "loss-curves.png", "loss-over-batch.png", "memory-over-microbatch.png")
MAX_POINTS = 60  # of a training curve; the noise of more would hide the other curves
MAX_NAMES = 16  # in a legend
HIGH_START = 0.1  # share of a curve of which the loss axis shows only the lowest loss
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


def draw_comparison(comparison: Comparison, charts_dir: Path) -> tuple[list[Path], list[str]]:
    """Draw the charts that have data, and delete those of an earlier comparison.

    Returns:
        The paths of the charts, and for each missing chart a line with the reason.

    Raises:
        OSError: a file cannot be written.
    """
    charts_dir.mkdir(parents=True, exist_ok=True)
    losses, memory = loss_panels(comparison.rows), memory_points(comparison.rows)
    written, missing = [], []
    for name, plot, has_points, reason in (
        (LOSS_CURVES, lambda figure: _plot_curves(figure, comparison.rows),
         any(len(_curve(result, key, _step)[0]) for row in comparison.rows
             for result in row.results for key in ("train_loss", "validation_loss")),
         "no run has a metrics.jsonl with losses"),
        (LOSS_OVER_BATCH, lambda figure: _plot_losses(figure, losses), losses,
         "no finished run has a loss and a batch size"),
        (MEMORY, lambda figure: _plot_memory(figure, memory), memory,
         "no run has recorded its peak memory"),
    ):
        (charts_dir / name).unlink(missing_ok=True)
        if has_points:
            written.append(draw_by_hand(charts_dir / name, plot))
        else:
            missing.append(f"not drawn: {name}: {reason}")
    return written, missing


def _step(record: Record) -> float | None:
    return record["global_step"] + 1  # people count from 1


def _per(key: str, unit: float) -> Callable[[Record], float | None]:
    def read(record: Record) -> float | None:
        value = number(record.get(key))
        return None if value is None else value / unit
    return read


def _curve(result: Result, key: str, x_of: Callable[[Record], float | None]) -> tuple[Any, Any]:
    """Return x and y of a loss, of the records that have both."""
    points = [(x, y) for record in result.records
              if (x := x_of(record)) is not None and (y := number(record.get(key))) is not None]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


def _smooth(x: Any, y: Any) -> tuple[Any, Any]:
    """Average adjacent points so that at most MAX_POINTS are left."""
    groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS)) if len(x) else []
    return (np.array([x[group[-1]] for group in groups]),
            np.array([y[group].mean() for group in groups]))


def _plot_curves(figure: Figure, rows: list[Row]) -> None:
    """Plot the losses of all runs over steps, and over tokens, time and dollars if recorded."""
    drawn = [row for row in rows if any(result.records for result in row.results)]
    hours = max([number(record.get("seconds")) or 0.0 for row in drawn
                 for result in row.results for record in result.records], default=0.0) / 3600
    unit, seconds = ("hours", 3600) if hours > 1 else ("minutes", 60)
    panels = {"tokens": _per("tokens", 1), unit: _per("seconds", seconds), "US$": _per("usd", 1)}
    panels = {"global step": _step} | {
        label: x_of for label, x_of in panels.items() if _largest(drawn, x_of) > 0}
    shape, size = ((2, 2), (12, 9)) if len(panels) == 4 else ((1, len(panels)), (12, 5.6))
    figure.set_size_inches(*size)
    for axes, (label, x_of) in zip(figure.subplots(*shape, sharey=True, squeeze=False).flat,
                                   panels.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats per token)")
        _plot_panel(axes, drawn, x_of)
    figure.axes[0].set_ylim(*_loss_limits(drawn))
    figure.suptitle("training (thin, smoothed) and validation (bold)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > MAX_NAMES:
        labels[MAX_NAMES - 1] = f"and {len(labels) - MAX_NAMES + 1} more"
    figure.legend(handles[:MAX_NAMES], labels[:MAX_NAMES], loc="outside lower center",
                  ncols=min(4, len(labels)), frameon=False, fontsize="small")


def _plot_panel(axes: Axes, rows: list[Row], x_of: Callable[[Record], float | None]) -> None:
    """Plot all curves that have this x."""
    from matplotlib.ticker import EngFormatter

    for position, row in enumerate(rows):
        color = f"C{position % 10}"
        axes.plot([], [], color=color, linewidth=2.5, label=_without_formulas(row.short_name))
        for result in row.results:  # without path effects: they draw white borders
            x, y = _smooth(*_curve(result, "train_loss", x_of))
            axes.plot(x, y, color=color, linewidth=1, alpha=0.5, path_effects=[])
            validated, y = _curve(result, "validation_loss", x_of)
            axes.plot(validated, y, color=color, linewidth=2.5, markersize=4, path_effects=[],
                      marker="o" if len(y) <= FEW_VALIDATIONS else None)
    if _largest(rows, x_of) >= 1000:  # smaller x would have an m for a thousandth, read as M
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _largest(rows: list[Row], x_of: Callable[[Record], float | None]) -> float:
    """Return the largest x of all curves; 0 if there is none."""
    return max((x for row in rows for result in row.results
                for key in ("train_loss", "validation_loss")
                for x in _curve(result, key, x_of)[0]), default=0.0)


def _loss_limits(rows: list[Row]) -> tuple[float, float]:
    """Return limits of the loss axis, without the high losses at the beginning of training."""
    curves = [_smooth(*_curve(result, key, _step))[1] for row in rows for result in row.results
              for key in ("train_loss", "validation_loss")]
    later = [y[int(len(y) * HIGH_START):] for y in curves if len(y)]
    low, high = min(y.min() for y in curves if len(y)), max(y.max() for y in later)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _without_formulas(text: str) -> str:
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
              zorder=3, label=_without_formulas(group.label))
    for x, y, name in zip(group.x, group.y, group.names, strict=True):
        axes.annotate(_without_formulas(name), (x, y), textcoords="offset points", xytext=(7, 5),
                      fontsize="x-small", color="gray")
