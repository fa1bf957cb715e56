"""The figures of a run that tables and the page of `lab watch` show: their headings and units.

Each key is a field or a property of `Result`, a part of its bill, a metric of `metrics.jsonl`, or a
ratio of `frame_of`. CSV, JSON and `lab.runs.frame` have all of them. Needs no torch.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from basics.text import dollars, short_count
from lab.table import Column
from reporting.summary import duration

Place = Literal["list", "compare", "page"]


def precise(value: float) -> str:
    return f"{value:.4f}" if value < 1000 else f"{value:.4g}"


whole = "{:,.0f}".format
# By unit, how it is formatted; lab/watch/static/charts.js has the same units.
FORMATS: dict[str, Callable[[float], str]] = {
    "count": whole,
    "tokens": short_count,
    "nats per token": precise,
    "bits per byte": precise,
    "perplexity": precise,
    "points": "{:.2f}".format,
    "seconds": duration,
    "tokens/s": whole,
    "PFLOP": "{:,.3g}".format,
    "fraction": "{:.1%}".format,
    "GiB": "{:.1f}".format,
    "US$": dollars,
    "US$ per Mtoken": precise,
}


@dataclass(frozen=True)
class RunFigure:
    """One figure of a run."""

    key: str
    heading: str
    unit: str
    places: tuple[Place, ...] = ("compare",)
    better: Literal["lower", "higher"] | None = None
    importance: int = 0  # in a narrow terminal the lowest are hidden first; of one number, the left

    def text(self, value: float) -> str:
        return FORMATS[self.unit](value)

    @property
    def column(self) -> Column:
        """The column of a table; losses may have marks after the number, so they stand left."""
        head = "\n".join(textwrap.wrap(self.heading, HEAD_WIDTH, break_long_words=False))
        return Column(head, "left" if self.unit == "nats per token" else "right", key=self.key)


HEAD_WIDTH = 9  # characters of a line of a heading
ALWAYS = 10  # this importance: it is never hidden
EVERYWHERE: tuple[Place, ...] = ("list", "compare", "page")
IN_TABLES: tuple[Place, ...] = ("list", "compare")

FIGURES = [
    RunFigure("global_batch_size", "global batch", "count", importance=9),
    RunFigure("microbatch_size", "micro-batch", "count", importance=2),
    RunFigure("tokens", "tokens", "tokens", importance=6),
    RunFigure("steps", "steps", "count", importance=2),
    RunFigure("train_loss", "train loss", "nats per token", EVERYWHERE, "lower", importance=5),
    RunFigure("validation_loss", "val. loss", "nats per token", EVERYWHERE, "lower", importance=9),
    RunFigure("test_loss", "test loss", "nats per token", better="lower", importance=9),
    RunFigure(
        "validation_bits_per_byte",
        "val. bits per byte",
        "bits per byte",
        better="lower",
        importance=5,
    ),
    RunFigure(
        "test_bits_per_byte", "test bits per byte", "bits per byte", better="lower", importance=5
    ),
    RunFigure("ift_score", "IFT", "points", better="higher", importance=10),
    RunFigure("seconds", "time", "seconds", EVERYWHERE, "lower", importance=7),
    RunFigure("seconds_without_validation", "time, no val.", "seconds", importance=6),
    RunFigure("seconds_left", "time left", "seconds", ("page",)),
    RunFigure("tokens_per_second", "tokens/s", "tokens/s", ("compare", "page"), "higher", 4),
    RunFigure("training_pflop", "training PFLOP", "PFLOP", importance=6),
    RunFigure("mfu", "MFU", "fraction", ("page",), "higher"),
    RunFigure("memory_gib", "memory", "GiB", ("page",), "lower"),
    RunFigure("num_gpus", "GPUs", "count", importance=3),
    RunFigure("usd_per_hour", "US$ an hour", "US$", importance=3),
    RunFigure("usd", "US$", "US$", EVERYWHERE, "lower", importance=8),
    RunFigure("usd_without_validation", "US$, no val.", "US$", importance=4),
    RunFigure("usd_per_megatoken", "US$ per Mtoken", "US$ per Mtoken", importance=5),
    RunFigure(
        "usd_per_megatoken_without_validation",
        "US$ per Mtoken, no val.",
        "US$ per Mtoken",
        importance=4,
    ),
    RunFigure("download_seconds", "download", "seconds", IN_TABLES, importance=1),
    RunFigure("machine_seconds", "machine up", "seconds", IN_TABLES, importance=1),
    RunFigure("machine_usd", "US$ of machine", "US$", IN_TABLES, importance=8),
]


def shown_in(place: Place) -> list[RunFigure]:
    return [figure for figure in FIGURES if place in figure.places]


def hidden_first(figures: list[RunFigure]) -> list[str]:
    """Return the keys in the order in which a narrow terminal hides them; some always stay."""
    by_importance = sorted(figures, key=lambda one: one.importance)
    return [one.key for one in by_importance if one.importance < ALWAYS]
