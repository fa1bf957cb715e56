"""Charts of a sweep: losses over tokens, differences with intervals, loss over a value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lab.compare.charts import loss_limits, points_of, without_formulas
from lab.sweep.plan import Sweep
from lab.sweep.ranges import Range, ranges_of
from lab.sweep.results import Entry
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES, DIFFERENCES = "losses.png", "differences.png"
LONGEST_LABEL = 40  # characters
HIGH_START = 0.5  # share of a curve of which the loss axis shows only the lowest loss
MARGIN = 0.08  # share of an axis between its ends and the points
VERDICT_COLORS = {"better": "tab:green", "worse": "tab:red"}


def draw_sweep(sweep: Sweep, entries: list[Entry]) -> list[Path]:
    """Draw the charts that have data; return their paths. Raises: OSError."""
    charts = []
    if any(len(points_of(found.result, "validation_loss")[0]) for entry in entries
           for found in entry.outcomes):
        charts.append(draw_by_hand(sweep.sweep_dir / LOSSES,
                                   lambda figure: _plot_losses(figure, entries)))
    if compared := [entry for entry in entries
                    if entry.difference and not entry.validates_on_other_tokens]:
        charts.append(draw_by_hand(sweep.sweep_dir / DIFFERENCES,
                                   lambda figure: _plot_differences(figure, compared)))
    charts += [draw_by_hand(sweep.sweep_dir / f"range-{found.key}.png",
                            lambda figure, found=found: _plot_range(figure, found))
               for found in ranges_of(sweep, entries) if len(found.means) > 1]
    return charts


def _name(entry: Entry) -> str:
    text = "all together" if entry.variant.is_stack else entry.variant.label
    text = text if len(text) <= LONGEST_LABEL else f"{text[:LONGEST_LABEL]}..."
    return without_formulas(text)


def _plot_losses(figure: Figure, entries: list[Entry]) -> None:
    """Plot each seed's validation losses, in one colour for each variant."""
    from matplotlib.ticker import EngFormatter

    axes, curves = figure.subplots(), []
    for position, entry in enumerate(entries):
        color = "black" if entry.variant.is_baseline else f"C{position % 10}"
        own = [points_of(found.result, "validation_loss") for found in entry.outcomes]
        if any(len(x) for x, _ in own):
            axes.plot([], [], color=color, label=_name(entry))
        for x, y in own:
            axes.plot(x, y, color=color, linewidth=1.5, marker="o", markersize=3, path_effects=[])
            curves.append(y)
    axes.set_ylim(*loss_limits(curves, HIGH_START))
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylabel("validation loss (nats per token)")
    figure.legend(loc="outside lower center", ncols=min(3, len(entries)), frameon=False,
                  fontsize="small")


def _plot_differences(figure: Figure, entries: list[Entry]) -> None:
    """Plot the difference of each variant to the baseline, and its 95% interval if known."""
    figure.set_size_inches(10, 2 + 0.5 * len(entries))
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=1)
    for position, entry in enumerate(entries):
        color, found = VERDICT_COLORS.get(entry.verdict, "tab:gray"), entry.difference
        if found.interval is not None:
            axes.plot(found.interval, [position] * 2, color=color, linewidth=2.5, path_effects=[])
        axes.plot(found.mean, position, color=color, marker="o", markersize=8)
    axes.set_yticks(range(len(entries)), [_name(entry) for entry in entries])
    axes.set_ylim(len(entries) - 0.5, -0.5)  # the first one at the top
    axes.margins(x=MARGIN)
    figure.supxlabel("loss minus baseline's (nats per token), 95% interval; left is better",
                     fontsize="medium")


def _plot_range(figure: Figure, found: Range) -> None:
    """Plot the loss over one key, the fitted curve and its minimum."""
    axes = figure.subplots()
    for value, entry in found.entries:
        axes.plot([value] * len(entry.losses), entry.losses, color="tab:gray", marker="o",
                  markersize=4, linestyle="none", path_effects=[])
    x, y = zip(*found.means, strict=True)
    axes.plot(x, y, color="tab:blue", marker="o", markersize=9, linestyle="none",
              label="mean over seeds")
    for value, entry in found.entries:
        if entry.variant.is_baseline and entry.loss is not None:
            axes.plot(value, entry.loss, color="black", marker="s", markersize=9, linestyle="none",
                      label="baseline")
    _plot_fit(axes, found)
    axes.set_xlabel(found.key)
    axes.set_ylabel("final validation loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")


def _plot_fit(axes: Axes, found: Range) -> None:
    """Plot the fitted curve, if there is one, over a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    values = [value for value, _ in found.means]
    if values[0] > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if found.fit is None:
        return
    (curve, minimum), x = found.fit, np.geomspace(values[0], values[-1], 200)
    axes.plot(x, curve(np.log(x)), color="tab:blue", zorder=1,
              label=f"quadratic in log2({found.key})")
    if minimum is not None:
        axes.plot(*minimum, color="tab:orange", marker="*", markersize=16, linestyle="none",
                  markeredgecolor="black",
                  label=f"minimum of the fit: {minimum[1]:.4f} at {minimum[0]:.4g}")
