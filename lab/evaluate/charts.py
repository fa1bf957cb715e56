"""A chart of several checkpoints of a run: their loss, and their accuracies, over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lab.evaluate.intervals import Interval
from lab.evaluate.results import Result
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHART = "evaluations-chart.png"
Points = list[tuple[int, float, Interval | None]]  # tokens, figure, its interval


def draw_over_tokens(results: list[Result]) -> list[Path]:
    """Draw a chart in the directory of each run with several results. Raises: OSError."""
    runs: dict[Path, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.trained_tokens):
        if result.run_dir is not None:
            runs.setdefault(result.run_dir, []).append(result)
    return [draw_by_hand(run_dir / CHART, lambda figure, found=found: _plot(figure, found))
            for run_dir, found in runs.items()
            if len({result.trained_tokens for result in found}) > 1]


def _plot(figure: Figure, results: list[Result]) -> None:
    """Plot losses and accuracies side by side, or the one of them that was measured."""
    losses: Points = [(result.trained_tokens, found.loss, found.loss_interval)
                      for result in results if (found := result.evaluation)]
    panels = [*["loss (nats per token)"] * bool(losses), *["accuracy"] * bool(results[0].tasks)]
    figure.suptitle(results[0].name.replace("$", r"\$"))
    for axes, label in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if label == "accuracy":
            _plot_accuracies(axes, results)
        else:
            _plot_points(axes, losses, color="tab:red", label="held-out loss, 95% intervals")
        _label(axes, label)


def _plot_accuracies(axes: Axes, results: list[Result]) -> None:
    for place, name in enumerate(results[0].tasks):
        points = [(result.trained_tokens, *result.tasks[name].main_figure) for result in results]
        is_normalised = "normalised" in results[0].tasks[name].quiz.task.main_figure
        _plot_points(axes, points, color=f"C{place % 10}",
                     label=f"{name}, by length" if is_normalised else name)


def _plot_points(axes: Axes, points: Points, *, color: str, label: str) -> None:
    tokens = [x for x, _, _ in points]
    axes.plot(tokens, [y for _, y, _ in points], color=color, marker="o", markersize=5,
              label=label)
    for x, _, interval in points:
        if interval is not None:
            axes.plot([x, x], interval, color=color, linewidth=1.5, path_effects=[])


def _label(axes: Axes, ylabel: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("tokens of training")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False, fontsize="small")
