"""Charts of a run's `metrics.jsonl`; as a process of its own it draws them beside training.

That process needs no torch, and shows the records of when it began.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from basics.failpoints import failpoint
from basics.files import replacing
from basics.json_files import found_object
from basics.text import dollars
from ops.schedule import learning_rate_at
from processes.background import serve
from reporting.metrics_file import (
    INITIAL_LOSS,
    NUM_LAYERS,
    is_step,
    read_metrics,
    set_key,
    set_keys,
)
from reporting.reference import Kind, ReferenceCurve, reference_of_run
from reporting.setting_changes import recorded_changes
from run_config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HAND_DRAWN_FONTS = ("xkcd", "xkcd Script", "Humor Sans", "Comic Neue")
SPIKE_REPORTS = 20  # before a report, with which it is compared
LEAST_SPIKE_REPORTS = 10  # at the beginning of a run
LATEST_REPORTS = 5  # of them; their median follows a loss that falls fast
SPIKE_DEVIATIONS, MIN_SPIKE = 7.0, 0.1  # how far above their median; at least so many nats
MAX_POINTS, MAX_LAYER_POINTS = 400, 60  # more records are averaged down to as many points
MAX_SECONDS = 900  # of a drawing; on a machine without spare cores it may take minutes

PANELS = {  # of the chart of layers: a quantity, and its title
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
REFERENCE_COLORS: dict[Kind, str] = {"train": "tab:cyan", "validation": "tab:orange"}
SET_COLORS = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
# The range of the loss chart is that of all but the first steps, if there are so many points.
FIRST_SHARE, LEAST_LATER, MARGIN = 0.03, 20, 1.02
LEGEND_CHARACTERS = 120  # in a row, of its labels
MAX_LINES = 16  # of a deeper model, so many layers are drawn

Records = list[dict[str, Any]]


def draw_charts(run_dir: Path, records: Records) -> None:
    """Draw the charts of a run into its directory: those for which there are records."""
    title = run_dir.resolve().name

    def draw(name: str, ylabel: str, plot: Callable[..., object], *shown: Records) -> None:
        def lay_out(figure: Figure) -> None:
            axes = figure.subplots()
            axes.set_title(title)
            _label_steps(axes)
            axes.set_ylabel(ylabel)
            plot(axes, *shown)
            _mark_events(axes, records)
            handles, labels = axes.get_legend_handles_labels()
            if handles:  # below the chart, where it covers no data
                columns = max(1, min(3, LEGEND_CHARACTERS // max(map(len, labels))))
                figure.legend(
                    handles,
                    labels,
                    loc="outside lower center",
                    ncols=columns,
                    frameon=False,
                    fontsize=9,
                )

        draw_by_hand(run_dir / name, lay_out)

    if steps := [record for record in records if record.get("train_loss") is not None]:
        config, num_steps = _plan_of(run_dir)
        initial = (record.get(INITIAL_LOSS) for record in records)
        draw(
            "loss-chart.png",
            "loss (nats per token)",
            partial(
                plot_losses,
                deciding_set=config.deciding_set if config else "",
                initial_loss=next((loss for loss in initial if loss is not None), None),
                reference=reference_of_run(run_dir),
            ),
            steps,
            [record for record in records if record.get("validation_loss") is not None],
        )
        limit = config.clipping_max_norm if config else None
        # With sampled softmax some reports have no loss.
        reports = [record for record in records if {"learning_rate", "train_loss"} & {*record}]
        plot_norms = partial(_plot_grad_norms, limit=limit)
        draw("grad-norm-chart.png", "gradient norm", plot_norms, reports)
        since = max((step for step, _ in recorded_changes(records)), default=0)
        plot = partial(_plot_learning_rates, config=config, num_steps=num_steps, since=since)
        draw("learning-rate-chart.png", "learning_rate (other rates in proportion)", plot, reports)
    if measured := [record for record in records if "layer_grad_norm" in record]:
        draw_by_hand(
            run_dir / "layers-chart.png", lambda figure: plot_layers(figure, measured, title)
        )


def _plan_of(run_dir: Path) -> tuple[TrainConfig | None, int]:
    """Return what a run trains with, and its number of steps; None and 0 if they cannot be read.

    By its summary: `train.json` may have been edited since the launch.
    """
    summary = found_object(run_dir / "summary.json")
    settings, fields = summary.get("train"), TrainConfig.model_fields
    if isinstance(settings, dict):  # it has all keys, also those that exclude each other
        settings = {
            key: value
            for key, value in settings.items()
            if key not in fields or value != fields[key].default
        }
    try:
        config = TrainConfig.model_validate(settings)
    except ValueError:
        return None, 0
    found = summary.get("num_steps")
    return config, found if isinstance(found, int) and is_step(found) else 0


def _mark_events(axes: Axes, records: Records) -> None:
    """Draw a vertical line where the model has grown, and where settings were changed."""
    for record in records:
        if num_layers := record.get(NUM_LAYERS):
            axes.axvline(
                record["global_step"],
                color="tab:purple",
                linewidth=1,
                linestyle="--",
                label=f"{num_layers:g} layers from step {record['global_step'] + 1:,} on",
            )
    for num_steps, changes in recorded_changes(records):
        axes.axvline(
            num_steps,
            color="gray",
            linewidth=1,
            linestyle=":",
            label=f"step {num_steps:,}: {', '.join(changes)} changed",
        )


def _label_steps(axes: Axes, num_ticks: int = 7) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("global step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def draw_by_hand(path: Path, plot: Callable[[Figure], object]) -> Path:
    """Write a figure in xkcd style, in one step. Raises: OSError."""
    # Not above: what imports this module need not draw, and importing matplotlib takes a second.
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
    from matplotlib.font_manager import get_font_names

    installed = set(get_font_names())  # naming others would be a warning
    fonts = [*filter(installed.__contains__, HAND_DRAWN_FONTS), "DejaVu Sans"]
    with plt.xkcd(), plt.rc_context({"font.family": fonts}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")  # plt.figure needs a display
        plot(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(which="minor", length=0)
            for data in (*axes.lines, *axes.collections):  # only axes and text look hand-drawn
                data.set_sketch_params(None)
                data.set_path_effects([])
        with replacing(path) as file:
            figure.savefig(file, format="png", dpi=120)
    return path


def plot_losses(
    axes: Axes,
    steps: Records,
    validations: Records,
    *,
    deciding_set: str = "",
    initial_loss: float | None = None,
    reference: ReferenceCurve | None = None,
) -> None:
    """Plot the training loss with its range, the validation loss and the best one; and dollars.

    The legend has the last perplexity and bits per byte of each validation set with a name. A
    reference is drawn below the run, with its noise of one standard deviation.
    """
    if reference:
        _plot_reference(axes, steps, reference)
    x, mean = _columns(steps, "train_loss")
    _, low = _columns(steps, "train_loss_min", pool=np.ma.min)
    _, high = _columns(steps, "train_loss_max", pool=np.ma.max)
    axes.plot(x, mean, color="tab:blue", label="training, mean between two points")
    axes.fill_between(
        x,
        low,
        high,
        color="tab:blue",
        alpha=0.25,
        linewidth=0,
        label="smallest to largest step between them",
    )
    if spikes := find_spikes(steps):
        axes.plot(
            [record["global_step"] + 1 for record in spikes],
            [record["train_loss"] for record in spikes],
            color="tab:orange",
            marker="v",
            linestyle="none",
            label=f"spikes (mean far above those before): {len(spikes)}",
        )
    if initial_loss is not None:
        axes.plot(
            0,
            initial_loss,
            color="tab:red",
            marker="s",
            markersize=5,
            linestyle="none",
            label=f"validation before training: {initial_loss:.4f}",
        )
    if validations:
        axes.plot(
            *_columns(validations, "validation_loss"),
            color="tab:red",
            marker="o",
            markersize=4,
            label=_label_of_set(validations, deciding_set),
        )
        names = dict.fromkeys(name for one in validations for _, name in set_keys(one).values())
        for place, name in enumerate(names):
            axes.plot(
                *_columns(validations, set_key("validation_loss", name)),
                color=SET_COLORS[place % len(SET_COLORS)],
                marker="o",
                markersize=4,
                label=_label_of_set(validations, name, is_other=True),
            )
        best = min(validations, key=lambda record: record["validation_loss"])
        axes.plot(
            best["global_step"] + 1,
            best["validation_loss"],
            color="black",
            marker="*",
            markersize=14,
            linestyle="none",
            label=f"best: {best['validation_loss']:.4f} at step {best['global_step'] + 1:,}",
        )
    _leave_out_first_steps(axes, x, high)
    _add_usd_axis(axes, steps)  # last: it takes over the limits


def _leave_out_first_steps(axes: Axes, x: Any, high: Any) -> None:
    """Set the upper limit to the largest of all that is drawn, but at the first steps.

    They fall from the loss of a guess: with them, all others would be a flat line. Nothing is
    changed where few points are left.
    """
    first = FIRST_SHARE * x[-1]
    if (x > first).sum() < LEAST_LATER:
        return
    lines = [line.get_xydata() for line in axes.lines]
    drawn = np.concatenate([np.column_stack((x, high)), *lines])
    later = drawn[(drawn[:, 0] > first) & np.isfinite(drawn[:, 1]), 1]
    if later.size:
        axes.set_ylim(top=MARGIN * later.max())


def find_spikes(steps: Records) -> Records:
    """Find reports whose mean loss is far above the ones before, measured in median deviations.

    The deviation is that of the changes from report to report, less their median: the fall of the
    loss at the beginning of training is no noise, and would hide a spike there.
    """
    losses = np.array([record["train_loss"] for record in steps])
    if len(losses) <= LEAST_SPIKE_REPORTS:
        return []
    # Row i has the losses before report LEAST_SPIKE_REPORTS + i: at the beginning fewer, after NaN.
    missing = np.full(SPIKE_REPORTS - LEAST_SPIKE_REPORTS, np.nan)
    before = sliding_window_view(np.concatenate((missing, losses[:-1])), SPIKE_REPORTS)
    latest = np.median(before[:, -LATEST_REPORTS:], axis=1)
    middle = np.minimum(np.nanmedian(before, axis=1), latest)
    changes = np.diff(before)
    from_median = np.abs(changes - np.nanmedian(changes, axis=1, keepdims=True))
    # 1.4826 makes it a standard deviation; that of a difference is sqrt(2) times as large.
    deviation = 1.4826 * np.nanmedian(from_median, axis=1) / np.sqrt(2)
    heights = losses[LEAST_SPIKE_REPORTS:] - middle
    found = np.flatnonzero(heights > np.maximum(MIN_SPIKE, SPIKE_DEVIATIONS * deviation))
    return [steps[LEAST_SPIKE_REPORTS + place] for place in found]


def _plot_reference(axes: Axes, steps: Records, reference: ReferenceCurve) -> None:
    """Plot the losses of a reference at the same numbers of tokens as those of the run."""
    counted = [record for record in steps if record.get("tokens")]
    if not counted:
        return
    first, last = counted[0], counted[-1]
    tokens_per_step = last["tokens"] / (last["global_step"] + 1)
    for kind, color in REFERENCE_COLORS.items():
        known, losses = reference.between(kind, first["tokens"], last["tokens"])
        if len(known) < 2 or known[0] == known[-1]:
            continue
        x = known / tokens_per_step
        label = f"{'training' if kind == 'train' else kind} of {reference.name}"
        axes.plot(x, losses, color=color, linestyle="--", linewidth=1.5, label=label)
        std = reference.std(kind)
        if std:
            axes.fill_between(x, losses - std, losses + std, color=color, alpha=0.2, linewidth=0)


def _label_of_set(validations: Records, name: str, *, is_other: bool = False) -> str:
    """Return the legend's text of a validation set; `is_other`: it does not decide the best."""
    if not name:
        return "validation"
    last = []
    for metric, text in (
        ("validation_perplexity", "perplexity {:.4g}"),
        ("validation_bits_per_byte", "{:.4f} bits per byte"),
    ):
        value = validations[-1].get(set_key(metric, name) if is_other else metric)
        if value is not None:
            last.append(text.format(value))
    return f"validation on {name}" + (f": at last {', '.join(last)}" if last else "")


def _add_usd_axis(axes: Axes, steps: Records) -> None:
    """Name what the run had cost at evenly spaced steps, if its price is known.

    Even dollars would be close to each other where a few steps cost much, as compilation does.
    """
    priced = [record for record in steps if record.get("usd")]
    if len(priced) < 2:
        return
    x = np.array([record["global_step"] + 1 for record in priced], dtype=float)
    ticks = np.linspace(x[0], x[-1], 5)
    usd = np.interp(ticks, x, [record["usd"] for record in priced])
    limits = axes.get_xlim()
    above = axes.twiny()
    for both in (axes, above):
        both.set_xlim(limits)
    above.set_xticks(ticks, [dollars(value) for value in usd])
    above.set_xlabel("US$")


def _plot_learning_rates(
    axes: Axes, steps: Records, *, config: TrainConfig | None, num_steps: int, since: int
) -> None:
    """Plot the recorded rates, and those of the schedule from the step `since` to the end."""
    if config and num_steps > since:
        planned = np.unique(np.linspace(since, num_steps - 1, MAX_POINTS).astype(int))
        axes.plot(
            planned + 1,
            [learning_rate_at(config, int(step), num_steps=num_steps) for step in planned],
            color="gray",
            linestyle="--",
            linewidth=1,
            label="planned",
        )
    axes.plot(*_columns(steps, "learning_rate"), color="tab:green", label="so far")


def _plot_grad_norms(axes: Axes, steps: Records, *, limit: float | None) -> None:
    if skipped := sum(record.get("skipped_steps") or 0 for record in steps):
        axes.plot([], [], linestyle="none", label=f"skipped steps (gradient not finite): {skipped}")
    x, mean = _columns(steps, "grad_norm")
    _, high = _columns(steps, "grad_norm_max", pool=np.ma.max)
    axes.plot(x, mean, color="tab:blue", label="mean between two points")
    axes.fill_between(
        x,
        mean,
        high,
        color="tab:blue",
        alpha=0.25,
        linewidth=0,
        label="up to the largest step between them",
    )
    if limit is not None:
        axes.axhline(
            limit, color="tab:red", linewidth=1, linestyle="--", label=f"clipped to {limit:g}"
        )


def _columns(
    records: Records, key: str, pool: Callable[..., Any] = np.ma.mean, most: int = MAX_POINTS
) -> tuple[Any, Any]:
    """Return x and y of one key, (points,) and (points,) or (points, layers).

    Adjacent records are pooled into at most so many points, without numbers that are not finite.
    """
    values = np.array([record.get(key) for record in records], dtype=float)  # None becomes NaN
    groups = np.array_split(np.arange(len(records)), min(len(records), most))
    x = [records[group[-1]]["global_step"] + 1 for group in groups]  # charts count from 1
    y = [
        np.ma.filled(pool(np.ma.masked_invalid(values[group]), axis=0), np.nan) for group in groups
    ]
    return np.array(x), np.array(y)


def plot_layers(figure: Figure, records: Records, title: str) -> None:
    """Plot records with diagnostics: a panel for each quantity, a line for each layer."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure.set_size_inches(15, 7.5)
    figure.suptitle(title)
    *panels, last = figure.subplots(2, 4).flatten()
    depth = max(len(record["layer_grad_norm"]) for record in records)
    records = [_with_depth(record, depth) for record in records]
    colors = ScalarMappable(Normalize(1, max(2, depth)), "viridis_r")
    for axes, quantity in zip(panels, PANELS, strict=True):
        _plot_quantity(axes, records, quantity, colors)
    last.set_axis_off()
    for name, color in LINES.values():
        last.plot([], [], color=color, label=name)
    last.legend(frameon=False, loc="center right")
    figure.colorbar(colors, ax=last, location="left", label="layer")


def _with_depth(record: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return a record with as many values by layer: of one before a growth, None above its own."""
    return {
        key: [*value, *[None] * (depth - len(value))] if key.startswith("layer_") else value
        for key, value in record.items()
    }


def _plot_quantity(axes: Axes, records: Records, quantity: str, colors: Any) -> None:
    """Draw a panel: thin lines for layers, the deepest on top; thick ones for single numbers."""
    x, layers = _columns(records, f"layer_{quantity}", most=MAX_LAYER_POINTS)
    depth = layers.shape[1] if layers.ndim > 1 else 0
    lines = [
        (layers[:, layer], colors.to_rgba(layer + 1), 1.2)
        for layer in np.linspace(0, depth - 1, min(depth, MAX_LINES)).astype(int)
    ]
    lines += [
        (_columns(records, f"{prefix}{quantity}{suffix}", most=MAX_LAYER_POINTS)[1], color, 2.0)
        for (prefix, suffix), (_, color) in LINES.items()
    ]
    for y, color, width in lines:
        if np.isfinite(y).any():
            axes.plot(x, y, color=color, linewidth=width)
    if quantity in LOGARITHMIC:
        axes.set_yscale("log", nonpositive="mask")
    axes.set_title(PANELS[quantity], fontsize="medium")
    _label_steps(axes, num_ticks=3)


def draw_run(run_dir: Path, _: Callable[[str], None]) -> None:
    """Draw the charts of a run, as a process."""
    signal.alarm(MAX_SECONDS)
    logging.disable(logging.WARNING)
    failpoint("draw")
    draw_charts(run_dir, read_metrics(run_dir / "metrics.jsonl"))


if __name__ == "__main__":
    serve(draw_run)
