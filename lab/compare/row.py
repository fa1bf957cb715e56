"""One row of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lab.compare.run_figures import Figures
from lab.compare.run_results import FINISHED, PUBLISHED, Result

LOSS_NAMES = {"test_loss": "test loss", "validation_loss": "validation loss",
              "train_loss": "training loss"}  # in order of preference
BITS_PER_BYTE = {"test_loss": "test_bits_per_byte", "validation_loss": "validation_bits_per_byte"}
LONGEST_NAME = 40  # characters, in a chart


@dataclass(frozen=True)
class Row:
    """One run, one published row, or the mean of runs that differ only in their seed.

    Attributes:
        spread: sample standard deviation of each loss over the seeds, if there are several.
        settings: settings in which the runs differ, except values that most runs have.
    """

    results: tuple[Result, ...]
    figures: Figures
    spread: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    is_of_other_slice: bool = False
    is_within_spread: bool = False

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def is_published(self) -> bool:
        return self.first.status == PUBLISHED

    @property
    def name(self) -> str:
        names = ", ".join(result.name for result in self.results)
        marks = {FINISHED: "", PUBLISHED: "*"}
        return names + marks.get(self.first.status, f" ({self.first.status})")

    @property
    def short_name(self) -> str:
        return self.name if len(self.name) <= LONGEST_NAME else f"{self.name[:LONGEST_NAME]}..."

    @property
    def differs(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def loss(self, kind: str) -> float | None:
        """Return a loss if it can be compared with those of the other rows."""
        is_incomparable = kind == "test_loss" and self.is_of_other_slice
        return None if is_incomparable else getattr(self.figures, kind)

    def bytes_per_token(self, kind: str) -> float | None:
        """Return the mean bytes of text of the tokens that a loss was measured on, if known."""
        loss, bits = getattr(self.figures, kind), getattr(self.figures, BITS_PER_BYTE[kind])
        return loss / math.log(2) / bits if loss and bits else None
