"""The chart of a learning-rate range test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reporting import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADROOM = 0.1  # of the span from the lowest smoothed loss to the first one; divergence is cut off


def draw_range_test(path: Path, rates: np.ndarray, losses: Sequence[float], *,
                    smoothed: np.ndarray, suggestion: float) -> None:
    """Draw losses over learning rates, the suggestion marked. Rank 0.

    Raises:
        OSError: the chart cannot be written.
    """
    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(rates, losses, color="tab:blue", alpha=0.35, linewidth=1, label="loss of a step")
        axes.plot(rates, smoothed, color="tab:blue", label="smoothed")
        axes.axvline(suggestion, color="tab:red", linestyle="--",
                     label=f"suggestion: {suggestion:.2g}")
        low, high = min(losses), max(losses[0], float(smoothed[0]))
        margin = HEADROOM * (high - low)
        axes.set_ylim(low - margin, high + 5 * margin)
        axes.set_xscale("log")
        axes.set_title(f"{path.resolve().parent.name}: learning-rate test")
        axes.set_xlabel("learning_rate")
        axes.set_ylabel("loss (nats per token)")
        axes.legend(frameon=False)

    charts.draw_by_hand(path, plot)
