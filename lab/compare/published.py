"""The published results of the original system, and the charts of its notes with their fits.

The charts are the loss over the global batch, with a quadratic, and the memory over the microbatch,
with a line. They show runs of this project too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.polynomial import Polynomial

from basics.text import dollars
from lab.compare.rows import LOSS_NAMES, Row, bits_key, deciding_loss, has_several_tokenizers
from lab.runs import PUBLISHED, Result, slice_of
from reporting.reference import PUBLISHED_PATH
from reporting.summary import FINISHED
from run_config import ModelConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED_FIGURES = (
    *("global_batch_size", "microbatch_size", "tokens", "tokens_per_second"),
    *("seconds", "validation_seconds", "ift_score"),
)
NEEDED_FOR_PARABOLA, NEEDED_FOR_LINE = 3, 2  # different x
# Equal on a curve over batch sizes. Other keys change the loss too (see `SameLoss`), but are tuned
# with the batch (learning rates, betas, momentum) or add noise (seed, first token, number format).
LOSS_SETTINGS = (
    "dataset",
    "start_val_token",
    "validation",
    "min_train_tokens",
    "repeat_data",
    "init_from",
    "grow",
    "sampled_softmax",
    "optimizer",
    "weight_decay",
    "decay_norms_and_biases",
    "clipping_max_norm",
    "schedule",
    "schedule_learning_rate",
    "warmup_period_percent",
    "decay_period_percent",
    "final_learning_rate_fraction",
)
# Equal on a line over microbatches. Other keys change the speed too (`SPEED_KEYS`), but cost no
# memory (global batch, format of the all-reduce), or `kind_of_machine` has them (precision).
MEMORY_SETTINGS = (
    "gradient_accumulation_steps",
    "residual_dtype",
    "compile",
    "attention",
    "head_chunks",
    "activation_checkpointing",
    "deterministic",
    "optimizer",
)


def read_published() -> list[Result]:
    """Read the published results; dollars follow from their seconds and the machine's price."""
    published = json.loads(PUBLISHED_PATH.read_text(encoding="utf-8"))
    where = published["test_slice"]
    results = []
    for row in published["rows"]:
        num_gpus, _, device = row.get("machine", "").partition("x ")
        # The original's fit has one point per run: of two checkpoints the best.
        is_in_fit = row.get("dataset") == "FineWeb" and row.get("checkpoint") != "latest"
        figures = {key: row[key] for key in PUBLISHED_FIGURES if key in row}
        result = Result(
            name=row["name"],
            status=PUBLISHED,
            notes=row.get("notes", ""),
            model=row["model"],
            machine=device or None,
            num_gpus=int(num_gpus) if device else None,
            peak_memory_gib=row.get("gib_per_gpu"),
            tests={slice_of(where): where | {"loss": row["test_loss"]}}
            if "test_loss" in row
            else {},
            config={"dataset": row["dataset"], "min_train_tokens": row.get("tokens")}
            if is_in_fit
            else {},
            **figures,
        )
        results.append(result.priced(row["usd_per_hour"]) if "usd_per_hour" in row else result)
    return results


def published_bills() -> str:
    """Say what the machines of the published runs cost in all, which their seconds do not tell."""
    bills = json.loads(PUBLISHED_PATH.read_text(encoding="utf-8"))["bills"]
    usd = ", ".join(map(dollars, bills["runs_usd"]))
    return (
        f"* its four runs on rented machines were billed US${usd}, and all of the machines' time"
        f" US${dollars(bills['total_usd'])}"
    )


# What a curve is fitted through: rows by x and y, so that equal points count once.
Curve = dict[tuple[float, float], Row | None]
Points = dict[str, Curve]  # by label


def loss_points(rows: list[Row], key: str) -> Points:
    """Group the rows that have this loss by all settings that change it, except the batch size."""

    def group(result: Result) -> tuple:
        if result.status == PUBLISHED:
            return tuple(result.config.values())
        is_finished = result.status == FINISHED
        return _settings_of(result, LOSS_SETTINGS) if is_finished else ()

    found = (
        (group(row.first), row, row.values["global_batch_size"], row.loss(key)) for row in rows
    )
    return _grouped(found, NEEDED_FOR_PARABOLA)


def _settings_of(result: Result, keys: Sequence[str]) -> tuple[str, ...]:
    """Return a run's settings of the model and of these keys as text."""
    return tuple(result.settings.get(key, "null") for key in (*ModelConfig.model_fields, *keys))


def memory_points(rows: list[Row]) -> Points:
    """Group runs whose memory forms one line over the microbatch: same model and precision.

    A published point is the memory of a GPU and the largest microbatch that fitted. A search for
    the largest microbatch is a line of its own.
    """
    results = [(row, result) for row in rows for result in row.results]
    searches: Points = {
        f"--find-max-microbatch of {result.name}": dict.fromkeys(result.search)
        for _, result in results
        if len(dict(result.search)) >= NEEDED_FOR_LINE
    }

    def group(result: Result) -> tuple:
        if result.status == PUBLISHED:
            return (PUBLISHED,)
        return *result.kind_of_machine, *_settings_of(result, MEMORY_SETTINGS)

    found = (
        (group(result), row, result.microbatch_size, result.peak_memory_gib)
        for row, result in results
    )
    return searches | _grouped(found, NEEDED_FOR_LINE)


def _grouped(found: Iterable[tuple[tuple, Row, float | None, float | None]], needed: int) -> Points:
    """Group points, each with its group, row, x and y; `needed` different x are a curve."""
    groups: dict[tuple, Curve] = {}
    for group, row, x, y in found:
        if group and x and y is not None:
            groups.setdefault(group, {}).setdefault((x, y), row)
    curves: Points = {}
    for points in groups.values():
        if len({x for x, _ in points}) >= needed:
            first = next(iter(points.values()))
            label = "published" if first.is_published else f"runs like {first.short_name}"
            curves[label] = points
    return curves


def draw_fits(rows: list[Row], draw: Callable[..., None]) -> list[str]:
    """Draw both charts with `draw(name, data, plot, needed)`; return lines on what they lack."""
    missing = []
    kind = deciding_loss([row for row in rows if not row.is_published] or rows)
    if not loss_points(rows, kind):
        kind = "test_loss"  # that of the published rows
    in_bits = has_several_tokenizers(row for row in rows if row.loss(kind) is not None)
    if in_bits:
        missing.append(
            "loss-over-batch.png: in bits per byte, as the tokenizers differ; without"
            " the runs and published results of which these are not known"
        )
    losses = loss_points(rows, bits_key(kind) if in_bits else kind)
    labels = ("global batch (sequences)", f"{LOSS_NAMES[kind]} ({unit_of(in_bits)})")
    draw(
        "loss-over-batch.png",
        losses,
        partial(plot_points, losses, plot_fit, labels),
        f"{NEEDED_FOR_PARABOLA} finished runs that differ in their batch",
    )

    memory = memory_points(rows)
    labels = ("microbatch (sequences)", "memory per GPU (GiB)")
    draw(
        "memory-over-microbatch.png",
        memory,
        partial(plot_points, memory, plot_line, labels),
        f"{NEEDED_FOR_LINE} runs that differ in their microbatch, or a saved search",
    )
    return missing


def unit_of(in_bits: bool) -> str:
    return "bits per byte" if in_bits else "nats per token"


def without_formulas(text: str) -> str:
    """Escape dollar signs: matplotlib parses text between two of them as a formula."""
    return text.replace("$", r"\$")


def plot_points(
    groups: Points, fit: Callable[..., object], labels: tuple[str, str], figure: Figure
) -> None:
    """Plot each group with the names of its runs and its curve; the legend hides no point."""
    figure.set_size_inches(10, 7)
    axes = figure.subplots()
    for place, (label, points) in enumerate(groups.items()):
        x, y = map(list, zip(*points, strict=True))
        color = f"C{place}"
        axes.plot(
            x,
            y,
            color=color,
            marker="o",
            markersize=8,
            linestyle="none",
            zorder=3,
            label=without_formulas(label),
        )
        for point, row in points.items():
            if row and not row.is_published:
                axes.annotate(
                    without_formulas(row.short_name),
                    point,
                    fontsize="x-small",
                    textcoords="offset points",
                    xytext=(7, 5),
                    color="gray",
                )
        fit(axes, x, y, color)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.legend(
        frameon=False, fontsize="small", loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.13)
    )


def fit_log_quadratic(
    x: Sequence[float], y: Sequence[float]
) -> tuple[Polynomial, tuple[float, float] | None]:
    """Fit a quadratic in ln(x), which has at least three different values above 0.

    Returns it as a function of ln(x), and x and y of its minimum, None if outside of `x`.
    """
    curve = Polynomial(np.polynomial.polynomial.polyfit(np.log(x), y, 2))
    _, linear, quadratic = map(float, curve.coef)
    lowest = -linear / (2 * quadratic) if quadratic > 0 else math.inf
    if not math.log(min(x)) <= lowest <= math.log(max(x)):
        return curve, None
    return curve, (math.exp(lowest), float(curve(lowest)))


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
    axes.plot(
        *lowest,
        color=color,
        marker="*",
        markersize=16,
        linestyle="none",
        markeredgecolor="black",
        zorder=4,
        label=f"minimum of the fit: {lowest[1]:.4f} at {lowest[0]:,.4g}",
    )


def plot_line(axes: Axes, x: list[float], y: list[float], color: str) -> None:
    """Plot a line through points, from 0 on."""
    slope, fixed = np.polyfit(x, y, 1)
    ends = np.array([0, max(x) * 1.1])
    axes.plot(
        ends,
        fixed + slope * ends,
        color=color,
        zorder=1,
        label=f"{fixed:.2f} GiB + {slope:.3f} GiB per sequence",
    )
    axes.set_xlim(left=0, auto=True)
    axes.set_ylim(bottom=0, auto=True)
