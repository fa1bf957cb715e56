"""Figures with their 95% intervals, and what is made of them: records, a table, charts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lab.runs import Record
from lab.stats import t_95
from lab.table import Column, Table
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Chart

Z_95 = 1.959964  # of the normal distribution
CHART = "evaluations-chart.png"
DECIMALS = {"loss": 6, "accuracy": 4, "normalised_accuracy": 4, "perplexity": 3,
            "bits_per_byte": 6}  # of figures, in the order of a table


class Figure(NamedTuple):
    """A result and its 95% interval, None if there is none: how far off it may be by sampling."""

    value: float
    interval: tuple[float, float] | None

    def through(self, function: Callable[[float], float]) -> Figure:
        """Return a rising function of the figure and of both bounds."""
        low, high = map(function, self.interval or (0.0, 0.0))
        return Figure(function(self.value), self.interval and (low, high))


def share(is_right: np.ndarray) -> Figure:
    """Return the share of questions that are right, (N,) bool, with Wilson's interval.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference".
    """
    found, num_questions, z2 = float(is_right.mean()), len(is_right), Z_95**2
    scale = 1 + z2 / num_questions
    middle = (found + z2 / (2 * num_questions)) / scale
    half = Z_95 / scale * math.sqrt(found * (1 - found) / num_questions
                                    + z2 / (4 * num_questions**2))
    return Figure(found, (max(0.0, middle - half), min(1.0, middle + half)))


def ratio(x: np.ndarray, y: np.ndarray) -> Figure:
    """Return sum(x) / sum(y) with its interval; x and y, (N,), such as losses and tokens of blocks.

    The interval is None with fewer than two pairs, or if an x is not finite. With equal y it is
    mean +- t x standard error of x / y, with Student's t for N - 1 degrees of freedom.

    Source: Cochran 1977, "Sampling Techniques", section 6.4 (the variance of a ratio).
    """
    n, total = len(x), float(y.sum())
    found = float(x.sum()) / total
    if n < 2 or not math.isfinite(found):
        return Figure(found, None)
    deviations = x - found * y
    half = t_95(n - 1) * math.sqrt(n / (n - 1) * float((deviations**2).sum())) / total
    return Figure(found, (found - half, found + half))


def exp(exponent: float) -> float:
    """Return e to a power, at most 1e304: the perplexity of a very large loss."""
    return math.exp(min(exponent, 700.0))


def record_of(facts: dict[str, Any], figures: dict[str, Figure | None]) -> Record:
    """Return facts and figures, None where one cannot be computed, as evaluations.jsonl has them.

    Bounds have six decimals: more depend on the microbatch.
    """
    record = dict(facts)
    for key, figure in figures.items():
        bounds = figure and figure.interval
        record[key] = figure and figure.value
        record[f"{key}_interval"] = bounds and [round(bound, 6) for bound in bounds]
    return record


class Result(NamedTuple):
    """What was measured of one model, which has been freed: its loss, or its scores on tasks.

    Attributes:
        checkpoint: its name; None if the target is a directory of weights or on the hub.
        run_dir: None unless the target is a run.
        trained_tokens: None without a checkpoint.
        records: of the loss, or one for each task, with the key `benchmark`.
    """

    name: str
    checkpoint: str | None
    run_dir: Path | None
    trained_tokens: int | None
    records: list[Record]


def table(results: list[Result]) -> Table:
    """Return the table of losses, the lowest first, or of tasks in their order, the best first.

    Losses of several datasets do not compare: then the fewest bits per byte come first.
    """
    rows = [(f"{result.name} ({result.checkpoint})" if result.checkpoint else result.name, record)
            for result in results for record in result.records]
    tasks = list(dict.fromkeys(record.get("benchmark") for _, record in rows))
    by_bits = len({record.get("dataset") for _, record in rows}) > 1

    def rank(row: tuple[str, Record]) -> tuple[int, bool, float]:
        """Sort NaN last."""
        _, record = row
        value = record["bits_per_byte" if by_bits else _main_key(record)]
        value = math.nan if value is None else value
        return (tasks.index(record.get("benchmark")), math.isnan(value),
                value if "loss" in record else -value)

    before, after = {}, {"tokens": "{num_tokens:,}", "start token": "{start_token:,}",
                         "dataset": "{dataset} {split}"}
    if tasks != [None]:
        before, after = {"task": "{benchmark}"}, {"questions": "{questions:,}"}
    keys = [key for key in DECIMALS if any(key in record for _, record in rows)]
    heads = ["model", *before, *(f"{key.replace('_', ' ')} [95%]" for key in keys), *after]
    return Table(
        [Column(head, "left" if head == "model" else "right") for head in heads],
        [[title, *(text.format(**record) for text in before.values()),
          *(_cell(record, key) for key in keys),
          *(text.format(**record) for text in after.values())]
         for title, record in sorted(rows, key=rank)])


def _cell(record: Record, key: str) -> str:
    """Return a table's cell: the figure, then its interval in brackets."""
    if record.get(key) is None:
        return "-"
    value, decimals = f"{record[key]:.{DECIMALS[key]}f}", min(DECIMALS[key], 4)
    if record[f"{key}_interval"] is None:
        return value
    low, high = (f"{bound:.{decimals}f}" for bound in record[f"{key}_interval"])
    return f"{value} [{low}, {high}]"


def _main_key(record: Record) -> str:
    """Return the name of the figure by which models are sorted, and that is drawn."""
    return next(key for key in ("normalised_accuracy", "accuracy", "loss") if key in record)


def draw_over_tokens(results: list[Result]) -> list[Path]:
    """Draw a chart in the directory of each run with several results. Raises: OSError."""
    runs: dict[Path, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.trained_tokens or 0):
        if result.run_dir is not None:
            runs.setdefault(result.run_dir, []).append(result)
    return [draw_by_hand(run_dir / CHART, lambda figure, found=found: _plot(figure, found))
            for run_dir, found in runs.items()
            if len({result.trained_tokens for result in found}) > 1]


def _plot(chart: Chart, results: list[Result]) -> None:
    """Plot the main figure of each record, and its intervals as vertical lines."""
    from matplotlib.ticker import EngFormatter

    axes = chart.subplots()
    tokens = [result.trained_tokens or 0 for result in results]
    for place, records in enumerate(zip(*(result.records for result in results), strict=True)):
        key = _main_key(records[0])
        name = records[0].get("benchmark", "held-out loss, 95% intervals")
        color = "tab:red" if key == "loss" else f"C{place}"
        axes.plot(tokens, [record[key] for record in records], color=color, marker="o",
                  markersize=5, label=name + ", by length" * (key == "normalised_accuracy"))
        for x, record in zip(tokens, records, strict=True):
            if (bounds := record[f"{key}_interval"]) is not None:
                axes.plot([x, x], bounds, color=color, linewidth=1.5, path_effects=[])
        axes.set_ylabel("loss (nats per token)" if key == "loss" else "accuracy")
    chart.suptitle(results[0].name.replace("$", r"\$"))
    axes.set_xlabel("tokens of training")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False, fontsize="small")
