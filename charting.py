"""A run's `metrics.jsonl` to its charts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import EngFormatter

HAND_DRAWN_FONTS = ("xkcd", "xkcd Script", "Humor Sans", "Comic Neue")
MAX_POINTS = 400  # a long run's records are averaged down to what a picture can show

Records = list[dict[str, Any]]


def draw_charts(run_dir: Path, records: Records) -> None:
    """Draw a run's three charts into its directory. Rank 0.

    Args:
        records: the lines of `metrics.jsonl`.
    """
    steps = [record for record in records if record.get("train_loss") is not None]
    validations = [record for record in records if record.get("validation_loss") is not None]
    if not steps:
        return
    _draw(run_dir / "loss-chart.png", "loss (nats a token)",
          lambda axes: _plot_losses(axes, steps, validations))
    _draw(run_dir / "grad-norm-chart.png", "gradient norm",
          lambda axes: _plot_band(axes, steps, mean="grad_norm", high="grad_norm_max"))
    _draw(run_dir / "learning-rate-chart.png", "learning rate",
          lambda axes: axes.plot(*_columns(steps, "learning_rate"), color="tab:green"))


def _draw(path: Path, ylabel: str, plot: Callable[[Axes], object]) -> None:
    with plt.xkcd(), plt.rc_context({"font.family": _fonts()}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")  # pyplot's want a display
        axes = figure.subplots()
        plot(axes)
        axes.set_title(path.resolve().parent.name)
        axes.set_xlabel("global step")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        partial = path.with_name(f".{path.name}")
        figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)


def _plot_losses(axes: Axes, steps: Records, validations: Records) -> None:
    _plot_band(axes, steps, mean="train_loss", low="train_loss_min", high="train_loss_max",
               label="training")
    if validations:
        x, y = _columns(validations, "validation_loss")
        axes.plot(x, y, color="tab:red", marker="o", markersize=4, label="validation")
        best = min(validations, key=lambda record: record["validation_loss"])
        axes.plot(best["global_step"], best["validation_loss"], color="black", marker="*",
                  markersize=14, linestyle="none",
                  label=f"best: {best['validation_loss']:.4f} at step {best['global_step']:,}")


def _plot_band(axes: Axes, steps: Records, *, mean: str, high: str, low: str | None = None,
               label: str | None = None) -> None:
    x, y = _columns(steps, mean)
    _, above = _columns(steps, high, pool=np.max)
    below = _columns(steps, low, pool=np.min)[1] if low else y
    axes.fill_between(x, below, above, color="tab:blue", alpha=0.25, linewidth=0,
                      label="smallest to largest" if low else "largest")
    axes.plot(x, y, color="tab:blue", label=label or "mean")


def _columns(records: Records, key: str, pool: Callable[..., Any] = np.mean) -> tuple[Any, Any]:
    """Give x and y of one key, pooled down to MAX_POINTS groups of neighbours."""
    groups = np.array_split(np.arange(len(records)), min(len(records), MAX_POINTS))
    x = [records[group[-1]]["global_step"] for group in groups]
    y = [pool([records[i][key] for i in group if records[i][key] is not None] or [np.nan])
         for group in groups]
    return np.array(x), np.array(y, dtype=float)


def _fonts() -> list[str]:
    installed = set(get_font_names())
    hand_drawn = [name for name in HAND_DRAWN_FONTS if name in installed]
    return [*hand_drawn, "DejaVu Sans"]  # the last one comes with matplotlib: never a warning
