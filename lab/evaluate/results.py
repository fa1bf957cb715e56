"""What was measured of models: records of evaluations.jsonl, tables, and charts over tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.evaluate.intervals import Figure
from lab.table import Column, Table
from reporting.charts import draw_by_hand

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Chart

CHART = "evaluations-chart.png"
DECIMALS = {"loss": 6, "accuracy": 4, "normalised_accuracy": 4, "perplexity": 3,
            "bits_per_byte": 6}  # of figures, in the order of a table


@dataclass(frozen=True)
class Measurement:
    """The figures of one model on held-out tokens, or on a task.

    Attributes:
        facts: what was measured, as its record says it.
        figures: by name; None where it cannot be computed.
    """

    facts: dict[str, Any]
    figures: dict[str, Figure | None]

    @property
    def main_key(self) -> str:
        """The name of the figure by which models are sorted, and that is drawn."""
        return next(key for key in ("normalised_accuracy", "accuracy", "loss")
                    if key in self.figures)

    def as_record(self) -> dict[str, Any]:
        """Return the facts and figures; bounds have six decimals, more depend on the microbatch."""
        record = dict(self.facts)
        for key, figure in self.figures.items():
            bounds = figure and figure.interval
            record[key] = figure and figure.value
            record[f"{key}_interval"] = bounds and [round(bound, 6) for bound in bounds]
        return record


@dataclass
class Result:
    """What was measured of one model, which has been freed.

    Attributes:
        checkpoint: its name; None if the target is a directory of weights or on the hub.
        run_dir: None unless the target is a run.
        trained_tokens: None without a checkpoint.
    """

    name: str
    checkpoint: str | None = None
    run_dir: Path | None = None
    trained_tokens: int | None = None
    loss: Measurement | None = None
    tasks: list[Measurement] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.checkpoint})" if self.checkpoint else self.name

    def as_document(self) -> dict[str, object]:
        """Return the result for scripts: the records of evaluations.jsonl, for any target."""
        return {"name": self.name, "checkpoint": self.checkpoint,
                "trained_tokens": self.trained_tokens,
                "loss": self.loss and self.loss.as_record(),
                "tasks": [found.as_record() for found in self.tasks]}


def tables(results: list[Result]) -> list[Table]:
    """Return the table of losses, lowest first, that of the tasks, or both.

    Losses of several datasets do not compare: then the fewest bits per byte come first. The tasks
    are in their order, of each the best model first.
    """
    losses = [(result.title, result.loss) for result in results if result.loss]
    by_bits = len({found.facts["dataset"] for _, found in losses}) > 1
    losses.sort(key=lambda row: _rank(row[1].figures["bits_per_byte" if by_bits else "loss"]))
    tasks: dict[str, list[tuple[str, Measurement]]] = {}
    for result in results:
        for found in result.tasks:
            tasks.setdefault(found.facts["benchmark"], []).append((result.title, found))
    scores = [row for rows in tasks.values() for row in sorted(
        rows, key=lambda row: _rank(row[1].figures[row[1].main_key], best=-1))]
    found = []
    if losses:
        found.append(_table(losses, {
            "tokens": "{num_tokens:,}", "start token": "{start_token:,}",
            "dataset": "{dataset} {split}"}))
    if scores:
        found.append(_table(scores, {"questions": "{questions:,}"}, {"task": "{benchmark}"}))
    return found


def _rank(figure: Figure | None, *, best: int = 1) -> tuple[bool, float]:
    """Return a key that sorts the lowest (or, with -1, the highest) first, and NaN last."""
    value = math.nan if figure is None else figure.value
    return math.isnan(value), best * value


def _table(rows: list[tuple[str, Measurement]], after: dict[str, str],
           before: dict[str, str] | None = None) -> Table:
    """Return a table of all figures, with facts before and after them: formats by heading."""
    before = before or {}
    keys = [key for key in DECIMALS if any(key in found.figures for _, found in rows)]
    heads = ["model", *before, *(f"{key.replace('_', ' ')} [95%]" for key in keys), *after]
    return Table(
        [Column(head, "left" if head == "model" else "right") for head in heads],
        [[title, *(text.format(**found.facts) for text in before.values()),
          *(figure.cell(DECIMALS[key]) if (figure := found.figures.get(key)) else "-"
            for key in keys),
          *(text.format(**found.facts) for text in after.values())] for title, found in rows])


def draw_over_tokens(results: list[Result]) -> list[Path]:
    """Draw a chart in the directory of each run with several results. Raises: OSError."""
    runs: dict[Path, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.trained_tokens or 0):
        if result.run_dir is not None:
            runs.setdefault(result.run_dir, []).append(result)
    return [draw_by_hand(run_dir / CHART, lambda figure, found=found: _plot(figure, found))
            for run_dir, found in runs.items()
            if len({result.trained_tokens for result in found}) > 1]


def _plot(figure: Chart, results: list[Result]) -> None:
    """Plot losses and accuracies side by side, or the one of them that was measured."""
    from matplotlib.ticker import EngFormatter

    losses = [result.loss for result in results if result.loss]
    curves = {"loss (nats per token)": [losses] if losses else [],
              "accuracy": list(zip(*(result.tasks for result in results), strict=True))}
    curves = {label: found for label, found in curves.items() if found}
    tokens = [result.trained_tokens or 0 for result in results]
    figure.suptitle(results[0].name.replace("$", r"\$"))
    all_axes = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (label, found) in zip(all_axes, curves.items(), strict=True):
        for place, points in enumerate(found):
            _plot_curve(axes, tokens, points, color="tab:red" if points is losses else f"C{place}")
        axes.set_xlabel("tokens of training")
        axes.set_ylabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(frameon=False, fontsize="small")


def _plot_curve(axes: Axes, tokens: list[int], points: Sequence[Measurement], *,
                color: str) -> None:
    """Plot the main figure of measurements, and its intervals as vertical lines."""
    key = points[0].main_key
    name = points[0].facts.get("benchmark", "held-out loss, 95% intervals")
    figures: list[Any] = [point.figures[key] for point in points]
    axes.plot(tokens, [figure.value for figure in figures], color=color, marker="o", markersize=5,
              label=f"{name}, by length" if key == "normalised_accuracy" else name)
    for x, figure in zip(tokens, figures, strict=True):
        if figure.interval is not None:
            axes.plot([x, x], figure.interval, color=color, linewidth=1.5, path_effects=[])
