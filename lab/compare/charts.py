"""Charts of a comparison: loss curves, and the fits of the original's notes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.polynomial import Polynomial

from lab.compare.results import Record, Result, training_flops
from lab.compare.rows import LOSS_NAMES, Row, bits_key, deciding_loss, has_several_tokenizers
from lab.runs import bytes_per_token, number_of
from reporting.charts import draw_by_hand
from reporting.reference import Kind, ReferenceCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOPS = "training_flops"  # no record has them
CURVES: dict[str, dict[str, float]] = {
    "train_loss": {"linewidth": 1, "alpha": 0.5},
    "validation_loss": {"linewidth": 2.5, "markersize": 4},
}
MINUTES_BELOW_SECONDS = 2 * 3600
MAX_POINTS = 60  # of a training curve; the noise of more would hide the other curves
MAX_NAMES = 16  # in a legend
HIGH_START = 0.1  # of a curve; losses there are above the axis
MARGIN = 0.08  # share of an axis between its ends and the points
FEW_VALIDATIONS = 15  # up to this number, each one is marked
NEEDED_FOR_PARABOLA, NEEDED_FOR_LINE = 3, 2  # different x

# What a curve is fitted through: rows by x and y, so that equal points count once.
Curve = dict[tuple[float, float], Row | None]
Points = dict[str, Curve]  # by label


def loss_points(rows: list[Row], key: str) -> Points:
    """Group the rows that have this loss by all settings that change it, except the batch size."""
    found = (
        (row.first.loss_group, row, row.values["global_batch_size"], row.loss(key)) for row in rows
    )
    return _grouped(found, NEEDED_FOR_PARABOLA)


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
    found = (
        (result.memory_group, row, result.figures["microbatch_size"], result.memory_gib)
        for row, result in results
    )
    return searches | _grouped(found, NEEDED_FOR_LINE)


def _grouped(
    found: Iterable[tuple[tuple[str, ...], Row, float | None, float | None]], needed: int
) -> Points:
    """Group points, each with its group, row, x and y; `needed` different x are a curve."""
    groups: dict[tuple[str, ...], Curve] = {}
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


def draw_comparison(
    rows: list[Row], charts_dir: Path, references: dict[str, ReferenceCurve] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw the charts that have data, and delete those of an earlier comparison.

    If the tokenizers of the runs differ, losses are in bits per byte. Returns their paths, and
    a line with the reason for each missing chart or curve. Raises: OSError.

    Args:
        references: what runs are compared with, by the name of the run, in its units.
    """
    charts_dir.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    missing: list[str] = []

    def draw(name: str, data: object, plot: Callable[[Figure], object], needed: str) -> None:
        path = charts_dir / name
        path.unlink(missing_ok=True)
        if data:
            written.append(draw_by_hand(path, plot))
        else:
            missing.append(f"not drawn: {name}: needs {needed}")

    recorded = [row for row in rows if _has_curve(row)]
    in_bits = has_several_tokenizers(recorded)
    if in_bits:
        missing += [
            f"not drawn in loss-curves.png: {row.name}: the tokenizers of these runs"
            " differ, and its bits per byte are not known"
            for row in recorded
            if not _has_bits(row)
        ]
        recorded = list(filter(_has_bits, recorded))
    curves = partial(_plot_curves, recorded, references or {}, in_bits=in_bits)
    draw("loss-curves.png", recorded, curves, "a run with records")

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
    labels = ("global batch (sequences)", f"{LOSS_NAMES[kind]} ({_unit(in_bits)})")
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
    return written, missing


def _has_curve(row: Row) -> bool:
    records = [record for result in row.results for record in result.records]
    return any(number_of(record, key) is not None for record in records for key in CURVES)


def _has_bits(row: Row) -> bool:
    return all(bytes_per_token(result.records) for result in row.results)


def _unit(in_bits: bool) -> str:
    return "bits per byte" if in_bits else "nats per token"


def _points_of(result: Result, key: str, x_key: str) -> tuple[Any, Any]:
    """Return x and y of a run's curve as arrays of float64, (points,)."""
    points = []
    for record in result.records:
        point = _x_of(result, record, x_key), number_of(record, key)
        if None not in point:
            points.append(point)
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    if key == "train_loss" and len(x):  # averages of at most MAX_POINTS groups
        groups = np.array_split(np.arange(len(x)), min(len(x), MAX_POINTS))
        x = np.array([x[group[-1]] for group in groups])
        y = np.array([y[group].mean() for group in groups])
    if x_key == "global_step":
        x = x + 1  # people count from 1
    return x, y


def _x_of(result: Result, record: Record, x_key: str) -> float | None:
    if x_key != FLOPS:
        return number_of(record, x_key)
    step, tokens = number_of(record, "global_step"), number_of(record, "tokens")
    if step is None or tokens is None or not result.flops_per_token:
        return None
    return training_flops(result.flops_per_token, tokens, step + 1)


def _plot_curves(
    rows: list[Row], references: dict[str, ReferenceCurve], figure: Figure, *, in_bits: bool
) -> None:
    """Plot the losses of all runs, a panel for each axis that is recorded.

    One over the training FLOPs is there if FLOPs per token differ: with growth, or several models.
    A reference is shown over tokens, as the first run that is compared with it has its units.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    results = [result for row in rows for result in row.results]
    records = [record for result in results for record in result.records]
    longest = max(number_of(record, "seconds") or 0.0 for record in records)
    is_short = longest < MINUTES_BELOW_SECONDS
    every_axis = [
        ("global step", "global_step", 1),
        ("tokens", "tokens", 1),
        ("minutes", "seconds", 60) if is_short else ("hours", "seconds", 3600),
        ("US$", "usd", 1),
    ]  # label, key in a record, and how many of its units are one
    recorded = [
        axis
        for axis in every_axis
        if any(number_of(record, axis[1]) is not None for record in records)
    ]
    differ = len({per_token for one in results for _, per_token in one.flops_per_token}) > 1
    if differ and any(number_of(record, "tokens") is not None for record in records):
        recorded.append(("training FLOPs", FLOPS, 1))
    num_rows = 1 if len(recorded) < 4 else 2
    num_columns = -(-len(recorded) // num_rows)
    figure.set_size_inches(6 * num_columns, 4.5 * num_rows)
    panels = figure.subplots(num_rows, num_columns, sharey=True, squeeze=False).flatten()
    for unused in panels[len(recorded) :]:
        unused.remove()
    for axes, (label, x_key, unit) in zip(panels[: len(recorded)], recorded, strict=True):
        axes.set(xlabel=label, ylabel=f"loss ({_unit(in_bits)})")
        axes.tick_params(labelleft=True)  # on every panel, though they share the axis
        for place, row in enumerate(rows):
            for result, key in itertools.product(row.results, CURVES):
                x, y = _points_of(result, key, x_key)
                if not len(x):
                    continue
                if in_bits:
                    y = y / math.log(2) / bytes_per_token(result.records)
                is_marked = key == "validation_loss" and len(y) <= FEW_VALIDATIONS
                marker = "o" if is_marked else None
                axes.plot(x / unit, y, color=f"C{place}", marker=marker, **CURVES[key])
        compared = next((row.first for row in rows if row.first.name in references), None)
        if x_key == "tokens" and compared:
            per_token = math.log(2) * bytes_per_token(compared.records) if in_bits else 1.0
            _plot_reference(axes, references[compared.name], per_token)
        if x_key == "global_step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.get_xlim()[1] >= 1000:  # smaller x would have an m, read as M
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    losses = [line.get_ydata() for line in panels[0].lines]
    after_start = [y[int(len(y) * HIGH_START) :] for y in losses]
    low = min(y.min() for y in losses)
    high = max(y.max() for y in after_start)
    margin = MARGIN * (high - low) or 0.5
    panels[0].set_ylim(low - margin, high + margin)
    figure.suptitle("training (thin, smoothed) and validation (bold)")
    for place, row in enumerate(rows[:MAX_NAMES]):
        name = without_formulas(row.short_name)
        panels[0].plot([], [], color=f"C{place}", linewidth=2.5, label=name)
    for name in sorted({curve.name for curve in references.values()}):
        panels[0].plot([], [], color="black", linestyle="--", label=f"reference {name}")
    figure.legend(
        loc="outside lower center", ncols=min(4, len(rows)), frameon=False, fontsize="small"
    )


def _plot_reference(axes: Axes, curve: ReferenceCurve, per_token: float) -> None:
    """Plot a reference's losses, divided by so many nats per unit, within the axis's tokens."""
    for kind in get_args(Kind):
        tokens, losses = curve.between(kind, *axes.get_xlim())
        if len(tokens):
            width = CURVES[f"{kind}_loss"]["linewidth"]
            axes.plot(tokens, losses / per_token, color="black", linestyle="--", linewidth=width)


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
