"""The chart of a run's diagnostics: a panel for each quantity, and in it a line for each layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = list[dict[str, Any]]

PANELS = {  # the quantity of a panel, and its title
    "grad_norm": "gradient norm",
    "update_ratio": "update / weights (norms)",
    "activation_norm": "residual stream (norm)",
    "max_attention_logit": "largest attention logit",
    "attention_entropy": "attention entropy (nats)",
    "logit": "logits",
    "token_loss": "loss of a token (nats)",
}
LOGARITHMIC = ("grad_norm", "update_ratio", "activation_norm")
LINES = {  # prefix and suffix of the quantity in a key: the line's name and colour
    ("embedding_", ""): ("embedding", "tab:red"),
    ("head_", ""): ("head", "tab:orange"),
    ("", "_max"): ("largest", "black"),
    ("", "_p99"): ("99%", "tab:purple"),
    ("", "_p50"): ("median", "tab:blue"),
    ("", "_p1"): ("1%", "tab:gray"),
}
SIZE = (15, 7.5)  # inches
PLAIN = {"path_effects": [], "sketch_params": None}  # crossing lines would be cut
MAX_POINTS = 60  # more records are averaged down to as many points
MAX_LINES = 16  # of a deeper model, so many layers are drawn


def measured_steps(records: Records) -> Records:
    """Return the records with diagnostics of a model as deep as that of the last one."""
    measured = [record for record in records if _depths(record)]
    return [record for record in measured if _depths(record) == _depths(measured[-1])]


def _depths(record: dict[str, Any]) -> dict[str, int]:
    return {key: len(record[key]) for quantity in PANELS if (key := f"layer_{quantity}") in record}


def plot_layers(figure: Figure, records: Records, run_dir: Path) -> None:
    """Plot all diagnostics of a run.

    Args:
        records: from `measured_steps`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure.set_size_inches(*SIZE)
    figure.suptitle(run_dir.resolve().name)
    *panels, last = figure.subplots(2, 4).flatten()
    depth = max(_depths(records[-1]).values())
    colors = ScalarMappable(Normalize(1, max(2, depth)), "viridis_r")
    for axes, quantity in zip(panels, PANELS, strict=True):
        _plot_quantity(axes, records, quantity, colors)
    last.set_axis_off()
    for name, color in LINES.values():
        last.plot([], [], color=color, label=name)
    last.legend(frameon=False, loc="center right")
    figure.colorbar(colors, ax=last, location="left", label="layer")


def _plot_quantity(axes: Axes, records: Records, quantity: str, colors: Any) -> None:
    """Draw one panel: thin lines for layers, the deepest on top, and lines for single numbers."""
    from matplotlib.ticker import EngFormatter

    layers = _rows(records, f"layer_{quantity}")
    depth = layers.shape[1]
    lines = [(layers[:, layer], colors.to_rgba(layer + 1), 1.2)
             for layer in np.linspace(0, depth - 1, min(depth, MAX_LINES)).astype(int)]
    lines += [(_rows(records, f"{prefix}{quantity}{suffix}"), color, 2.0)
              for (prefix, suffix), (_, color) in LINES.items()]
    x = _pooled(np.array([[record["global_step"] + 1.0] for record in records]))
    for y, color, width in lines:
        if y.size:
            axes.plot(x, y, color=color, linewidth=width, **PLAIN)
    if quantity in LOGARITHMIC:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_title(PANELS[quantity], fontsize="medium")
    axes.set_xlabel("global step")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _rows(records: Records, key: str) -> Any:
    """Return a key's values, (points, 1) or (points, layers); no column if no record has it."""
    found = [record.get(key) for record in records]
    if not any(value is not None for value in found):
        return np.empty((0, 0))
    rows = [value if isinstance(value, list) else [value] for value in found]
    return _pooled(np.array(rows, dtype=float))  # None becomes NaN


def _pooled(rows: Any) -> Any:
    """Average adjacent rows into at most MAX_POINTS, without numbers that are not finite."""
    groups = np.array_split(np.ma.masked_invalid(rows), min(len(rows), MAX_POINTS))
    return np.ma.array([group.mean(axis=0) for group in groups]).filled(np.nan)
