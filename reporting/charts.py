"""Charts of a run's `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from basics.files import replacing
from reporting.layers_chart import measured_steps, plot_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HAND_DRAWN_FONTS = ("xkcd", "xkcd Script", "Humor Sans", "Comic Neue")
SPIKE_REPORTS = 20  # reports before one, with which it is compared
LEAST_SPIKE_REPORTS = 10  # at the beginning of a run, with at least so many
LATEST_REPORTS = 5  # of them; their median follows a loss that falls fast
SPIKE_DEVIATIONS, MIN_SPIKE = 7.0, 0.1  # how far above their median; at least so many nats
USD_TICKS = 5
MAX_POINTS = 400  # more records are averaged down to as many points

Records = list[dict[str, Any]]


def draw_charts(run_dir: Path, records: Records) -> None:
    """Draw a run's charts into its directory.

    Args:
        records: the lines of `metrics.jsonl`.
    """
    steps = [record for record in records if record.get("train_loss") is not None]
    validations = [record for record in records if record.get("validation_loss") is not None]
    if measured := measured_steps(records):
        draw_by_hand(run_dir / "layers-chart.png",
                     lambda figure: plot_layers(figure, measured, run_dir))
    if not steps:
        return
    _draw(run_dir / "loss-chart.png", "loss (nats per token)",
          lambda axes: _plot_losses(axes, steps, validations))
    _draw(run_dir / "grad-norm-chart.png", "gradient norm",
          lambda axes: _plot_grad_norms(axes, steps))
    _draw(run_dir / "learning-rate-chart.png", "learning rate",
          lambda axes: axes.plot(*_columns(steps, "learning_rate"), color="tab:green"))
    if timed := [record for record in steps if None not in (
            record.get("slowest_step"), record.get("slowest_step_seconds"))]:
        _draw(run_dir / "step-time-chart.png", "seconds",
              lambda axes: _plot_step_times(axes, timed))


def _draw(path: Path, ylabel: str, plot: Callable[[Axes], object]) -> None:
    def lay_out(figure: Figure) -> None:
        from matplotlib.ticker import EngFormatter

        axes = figure.subplots()
        plot(axes)
        axes.set_title(path.resolve().parent.name)
        axes.set_xlabel("global step")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)

    draw_by_hand(path, lay_out)


def draw_by_hand(path: Path, plot: Callable[[Figure], object]) -> Path:
    """Write a figure in xkcd style, in one step. Raises: OSError if it cannot be written."""
    # What imports this module need not draw, and importing matplotlib takes a second.
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    with plt.xkcd(), plt.rc_context({"font.family": _fonts()}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")  # plt.figure needs a display
        plot(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=120)
    return path


def _plot_losses(axes: Axes, steps: Records, validations: Records) -> None:
    x, mean = _columns(steps, "train_loss")
    _, low = _columns(steps, "train_loss_min", pool=np.min)
    _, high = _columns(steps, "train_loss_max", pool=np.max)
    axes.plot(x, mean, color="tab:blue", label="training, mean between two points")
    axes.fill_between(x, low, high, color="tab:blue", alpha=0.25, linewidth=0,
                      label="smallest to largest step between them")
    spikes = find_spikes(steps)
    if spikes:
        axes.plot([record["global_step"] + 1 for record in spikes],
                  [record["train_loss"] for record in spikes], color="tab:orange", marker="v",
                  linestyle="none",
                  label=f"spikes (mean far above those before): {len(spikes)}")
    _add_usd_axis(axes, steps)
    if validations:
        x, mean = _columns(validations, "validation_loss")
        axes.plot(x, mean, color="tab:red", marker="o", markersize=4, label="validation")
        best = min(validations, key=lambda record: record["validation_loss"])
        axes.plot(best["global_step"] + 1, best["validation_loss"], color="black", marker="*",
                  markersize=14, linestyle="none",
                  label=f"best: {best['validation_loss']:.4f} at step {best['global_step'] + 1}")


def find_spikes(steps: Records) -> Records:
    """Find reports whose mean loss is far above the ones before, measured in median deviations.

    The deviation is that of the changes from report to report, less their median: the fall of the
    loss at the beginning of training is no noise, and would hide a spike there.
    """
    losses = np.array([record["train_loss"] for record in steps])
    spikes = []
    for place in range(LEAST_SPIKE_REPORTS, len(losses)):
        before = losses[max(0, place - SPIKE_REPORTS) : place]
        middle = min(np.median(before), np.median(before[-LATEST_REPORTS:]))
        changes = np.diff(before)
        # 1.4826 makes it a standard deviation; that of a difference is sqrt(2) times as large.
        deviation = 1.4826 * np.median(np.abs(changes - np.median(changes))) / np.sqrt(2)
        if losses[place] - middle > max(MIN_SPIKE, SPIKE_DEVIATIONS * deviation):
            spikes.append(steps[place])
    return spikes


def _add_usd_axis(axes: Axes, steps: Records) -> None:
    """Add an axis with the cost of the run at each step, if its price is known."""
    priced: Records = []
    for record in steps:
        if record.get("usd") and (not priced or all(
                record[key] > priced[-1][key] for key in ("usd", "global_step"))):
            priced.append(record)
    if len(priced) < 2:
        return
    x = np.array([record["global_step"] + 1 for record in priced], dtype=float)
    usd = np.array([record["usd"] for record in priced])
    above = axes.secondary_xaxis("top", functions=(
        lambda step: _interpolate(step, x, usd), lambda spent: _interpolate(spent, usd, x)))
    above.set_xlabel("US$")
    above.set_xticks(*_usd_ticks(x, usd))


def _usd_ticks(x: Any, usd: Any) -> tuple[list[float], list[str]]:
    """Return dollars at evenly spaced steps, and labels with as many digits as they need to differ.

    Even dollars would be close to each other where a few steps cost much, as compilation does.
    """
    spent = np.interp(np.linspace(x[0], x[-1], USD_TICKS), x, usd)
    digits = max(0, int(np.ceil(-np.log10(np.diff(spent).min()))) + 1)
    labels = [f"{value:,.{digits}f}" for value in spent]
    return [float(label.replace(",", "")) for label in labels], labels


def _interpolate(values: Any, x: Any, y: Any) -> Any:
    """Interpolate; beyond the points, follow the line through the first and the last."""
    slope = (y[-1] - y[0]) / (x[-1] - x[0])
    beyond = np.where(values < x[0], y[0] + (values - x[0]) * slope,
                      y[-1] + (values - x[-1]) * slope)
    return np.where((values < x[0]) | (values > x[-1]), beyond, np.interp(values, x, y))


def _plot_grad_norms(axes: Axes, steps: Records) -> None:
    skipped = sum(record.get("skipped_steps", 0) for record in steps)
    if skipped:
        axes.plot([], [], linestyle="none", label=f"skipped steps (gradient not finite): {skipped}")
    x, mean = _columns(steps, "grad_norm")
    _, high = _columns(steps, "grad_norm_max", pool=np.max)
    axes.plot(x, mean, color="tab:blue", label="mean between two points")
    axes.fill_between(x, mean, high, color="tab:blue", alpha=0.25, linewidth=0,
                      label="up to the largest step between them")


def _plot_step_times(axes: Axes, timed: Records) -> None:
    """Plot the slowest step of each report, and name the slowest one of all."""
    axes.plot(*_columns(timed, "slowest_step_seconds", pool=np.max), color="tab:purple",
              label="slowest step between two points")
    worst = max(timed, key=lambda record: record["slowest_step_seconds"])
    axes.plot([], [], linestyle="none", label=f"slowest of all: step {worst['slowest_step'] + 1:,}"
                                              f" with {worst['slowest_step_seconds']:.3g} s")
    axes.set_ylim(bottom=0)


def _columns(records: Records, key: str, pool: Callable[..., Any] = np.mean) -> tuple[Any, Any]:
    """Return x and y of one key, pooled into at most MAX_POINTS groups of adjacent records."""
    groups = np.array_split(np.arange(len(records)), min(len(records), MAX_POINTS))
    x = [records[group[-1]]["global_step"] + 1 for group in groups]  # charts count from 1
    y = [pool([records[i][key] for i in group if records[i][key] is not None] or [np.nan])
         for group in groups]
    return np.array(x), np.array(y, dtype=float)


def _fonts() -> list[str]:
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())
    hand_drawn = [name for name in HAND_DRAWN_FONTS if name in installed]
    return [*hand_drawn, "DejaVu Sans"]  # comes with matplotlib: no warning about missing fonts
