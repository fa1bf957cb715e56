"""A comparison as charts: loss curves, loss over the batch, memory over the microbatch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from basics.curve_fits import fit_line, fit_log_quadratic
from lab.compare.points import Points, loss_panels, memory_points
from lab.compare.rows import LOSS_NAMES, Comparison, Row
from lab.compare.run_figures import Record, number
from lab.compare.run_results import Result
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_CURVES, LOSS_OVER_BATCH, MEMORY = (
    "loss-curves.png", "loss-over-batch.png", "memory-over-microbatch.png")
MAX_POINTS = 60  # of a training curve: its noise would hide the others
MAX_NAMES = 16  # in a legend
SETTLED = 0.1  # of a run's records; how high it began is no matter of comparison
FEW_VALIDATIONS = 15  # up to here each is a point of its own


def draw_comparison(comparison: Comparison, charts_dir: Path) -> tuple[list[Path], list[str]]:
    """Draw the charts there is something for, and take away what an earlier comparison drew.

    Returns:
        Their paths, and why the others are missing.

    Raises:
        OSError: nothing can be written there.
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
         "no finished run has a loss and a batch"),
        (MEMORY, lambda figure: _plot_memory(figure, memory), memory,
         "no run has recorded the memory it took"),
    ):
        (charts_dir / name).unlink(missing_ok=True)
        if has_points:
            written.append(draw_by_hand(charts_dir / name, plot))
        else:
            missing.append(f"not drawn: {name}: {reason}")
    return written, missing


def _step(record: Record) -> float | None:
    step = number(record.get("global_step"))
    return None if step is None else step + 1  # people count from 1


def _per(key: str, unit: float) -> Callable[[Record], float | None]:
    def read(record: Record) -> float | None:
        value = number(record.get(key))
        return None if value is None else value / unit
    return read


def _curve(result: Result, key: str, x_of: Callable[[Record], float | None]) -> tuple[Any, Any]:
    """Give x and y of a loss, where both were recorded."""
    points = [(x, y) for record in result.records
              if (x := x_of(record)) is not None and (y := number(record.get(key))) is not None]
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return x, y


def _smooth(x: Any, y: Any) -> tuple[Any, Any]:
    """Average neighbours until no more than MAX_POINTS are left."""
    groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS)) if len(x) else []
    return (np.array([x[group[-1]] for group in groups]),
            np.array([y[group].mean() for group in groups]))


def _plot_curves(figure: Figure, rows: list[Row]) -> None:
    """Show the losses of all runs over what they have cost, in four ways."""
    figure.set_size_inches(12, 9)
    hours = max([number(record.get("seconds")) or 0.0 for row in rows
                 for result in row.results for record in result.records], default=0.0) / 3600
    time = _per("seconds", 3600) if hours > 1 else _per("seconds", 60)
    drawn = [row for row in rows if any(result.records for result in row.results)]
    for axes, (label, x_of) in zip(figure.subplots(2, 2, sharey=True).flat, (
        ("global step", _step), ("tokens", _per("tokens", 1)),
        ("hours" if hours > 1 else "minutes", time), ("US$", _per("usd", 1)),
    ), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats a token)")
        if not _plot_panel(axes, drawn, x_of):
            axes.text(0.5, 0.5, f"no run has recorded {label}", ha="center", va="center",
                      transform=axes.transAxes, color="gray")
            axes.set_xticks([])
    figure.axes[0].set_ylim(*_loss_limits(drawn))
    figure.suptitle("training (thin, smoothed) and validation (bold)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > MAX_NAMES:
        labels[MAX_NAMES - 1] = f"and {len(labels) - MAX_NAMES + 1} more"
    figure.legend(handles[:MAX_NAMES], labels[:MAX_NAMES], loc="outside lower center",
                  ncols=min(4, len(labels)), frameon=False, fontsize="small")


def _plot_panel(axes: Axes, rows: list[Row], x_of: Callable[[Record], float | None]) -> bool:
    """Draw all curves that have this x; tell if there is one."""
    from matplotlib.ticker import EngFormatter

    largest = 0.0
    for place, row in enumerate(rows):
        color = f"C{place % 10}"
        axes.plot([], [], color=color, linewidth=2.5, label=_as_it_is(row.short_name))
        for result in row.results:
            x, y = _smooth(*_curve(result, "train_loss", x_of))
            axes.plot(x, y, color=color, linewidth=1, alpha=0.5, path_effects=[])  # not white
            validated, y = _curve(result, "validation_loss", x_of)
            axes.plot(validated, y, color=color, linewidth=2.5, markersize=4, path_effects=[],
                      marker="o" if len(y) <= FEW_VALIDATIONS else None)
            largest = max([largest, *x, *validated])
    if largest >= 1000:  # below, m for a thousandth would only be taken for M
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return largest > 0


def _loss_limits(rows: list[Row]) -> tuple[float, float]:
    """Give the range of losses in which the runs can be told apart."""
    curves = [_smooth(*_curve(result, key, _step))[1] for row in rows for result in row.results
              for key in ("train_loss", "validation_loss")]
    settled = [y[int(len(y) * SETTLED):] for y in curves if len(y)]
    low, high = min(y.min() for y in settled), max(y.max() for y in settled)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _as_it_is(text: str) -> str:
    return text.replace("$", r"\$")  # between two of them matplotlib looks for a formula


def _plot_losses(figure: Figure, panels: dict[str, list[Points]]) -> None:
    figure.set_size_inches(8 + 2 * len(panels), 7)
    for axes, (kind, groups) in zip(figure.subplots(1, len(panels), squeeze=False).flat,
                                    panels.items(), strict=True):
        for group in groups:
            _plot_points(axes, group)
            if group.has_curve:
                _plot_parabola(axes, group)
        _label_batches(axes, LOSS_NAMES[kind])


def _label_batches(axes: Axes, loss: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_xlabel("global batch (sequences)")
    axes.set_ylabel(f"{loss} (nats a token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    _add_legend(axes)


def _plot_parabola(axes: Axes, group: Points) -> None:
    """Draw the curve through a group's points; mark its minimum, if it lies among them."""
    curve = fit_log_quadratic(group.x, group.y)
    x = np.geomspace(min(group.x) / 1.3, max(group.x) * 1.3, 200)
    axes.plot(x, [curve.at(size) for size in x], color=group.color, zorder=1,
              label="quadratic in ln(batch)")
    try:
        lowest = curve.minimum()
    except OverflowError:  # as good as a line
        lowest = None
    if lowest is None or not min(group.x) <= lowest[0] <= max(group.x):
        axes.plot([], [], linestyle="none", label="no minimum among these batches")
        return
    axes.plot(*lowest, color=group.color, marker="*", markersize=16, linestyle="none",
              markeredgecolor="black", zorder=4,
              label=f"minimum: {lowest[1]:.3f} at a batch of {lowest[0]:,.0f}")


def _plot_memory(figure: Figure, groups: list[Points]) -> None:
    axes = figure.subplots()
    for group in groups:
        _plot_points(axes, group)
        if group.has_curve:
            line, ends = fit_line(group.x, group.y), [0, max(group.x) * 1.1]
            axes.plot(ends, [line.at(x) for x in ends], color=group.color, zorder=1,
                      label=f"{line.intercept:.2f} GiB + {line.slope:.3f} GiB a sequence")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("microbatch (sequences)")
    axes.set_ylabel("GiB of a GPU")
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    """Put the legend below: inside, it may hide a point."""
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13),
                ncols=1 if len(axes.figure.axes) > 1 else 2)


def _plot_points(axes: Axes, group: Points) -> None:
    axes.plot(group.x, group.y, color=group.color, marker="o", markersize=8, linestyle="none",
              zorder=3, label=_as_it_is(group.label))
    for x, y, name in zip(group.x, group.y, group.names, strict=True):
        axes.annotate(_as_it_is(name), (x, y), textcoords="offset points", xytext=(7, 5),
                      fontsize="x-small", color="gray")
