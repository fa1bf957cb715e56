"""The result of a search for the largest microbatch, as text and as a document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from basics.curve_fits import Line, fit_line
from basics.text import gib
from microbatch_search.trial import Trial
from reporting.speed import CARDS_GIB, usable_gib
from run_config import Run

MAX_TRIALS = 8
MIN_RISE = 0.01  # of the fixed part: a memory line that rises less is noise
CPU_MEMORY = ("mapped: address space beyond the libraries, which --memory-limit-gib limits\n"
              "resident: RAM in use, with pages of libraries that the trial is the first to use")


def memory_line(trials: list[Trial]) -> Line:
    """Fit the demand in GiB over the microbatch size."""
    return fit_line([trial.microbatch_size for trial in trials],
                    [trial.demand_gib for trial in trials])


def fits(trials: list[Trial]) -> list[Trial]:
    """Return the trials that fitted, the smallest microbatch first."""
    return sorted((trial for trial in trials if trial.fits), key=lambda one: one.microbatch_size)


def smallest_failure(trials: list[Trial]) -> int | None:
    """Return the smallest microbatch that did not fit, None if all did."""
    return min((trial.microbatch_size for trial in trials if not trial.fits), default=None)


@dataclass(frozen=True)
class Found:
    """The result of a search in which at least one microbatch fitted.

    Attributes:
        on_gpu: if not, memory is mapped memory, which says nothing of a card.
    """

    trials: list[Trial]
    on_gpu: bool = True

    @property
    def largest(self) -> Trial:
        """The trial of the largest microbatch that fitted."""
        return fits(self.trials)[-1]

    @property
    def fastest(self) -> Trial:
        """The trial with the most tokens per second."""
        return max(fits(self.trials), key=lambda trial: trial.tokens_per_second)

    @property
    def line(self) -> Line | None:
        """GiB over the microbatch, without the smallest if there are enough others."""
        fitting = fits(self.trials)
        fitting = fitting[1:] if len(fitting) > 2 else fitting
        return memory_line(fitting) if len(fitting) > 1 else None

    def document(self, run: Run, world_size: int) -> dict[str, Any]:
        """Return the result as a JSON document; None for what is not known."""
        line = self.line
        return {
            "schema": "find-max-microbatch/1", "run": run.name, "world_size": world_size,
            "largest": self.largest.microbatch_size, "fastest": self.fastest.microbatch_size,
            "smallest_that_did_not_fit": smallest_failure(self.trials),
            "memory_gib": line and {"fixed": line.intercept, "a_sequence": line.slope},
            "trials": [asdict(trial) for trial in self.trials],
        }

    def lines(self) -> list[str]:
        """Format the result for printing."""
        fastest = self.fastest
        return [self._largest_line(), f"fastest microbatch: {fastest.microbatch_size:,}"
                f" ({fastest.tokens_per_second:,.0f} tokens/s)", *self._memory_lines()]

    def _largest_line(self) -> str:
        largest, failure = self.largest.microbatch_size, smallest_failure(self.trials)
        line = f"largest microbatch: {largest:,}"
        if failure is None:
            return f"{line} (larger ones were not tried: limit of {MAX_TRIALS} trials)"
        if failure == largest + 1:
            return line
        between = f"{largest + 1:,} was"
        if failure > largest + 2:
            between = f"{largest + 1:,} to {failure - 1:,} were"
        return (f"{line} ({failure:,} did not fit; {between} not tried: limit of {MAX_TRIALS}"
                " trials)")

    def _memory_lines(self) -> list[str]:
        line = self.line
        if line is None or line.slope * self.largest.microbatch_size < MIN_RISE * line.intercept:
            said = "memory hardly grows with these microbatches"
            return [f"{said}: no prediction for other cards"] if self.on_gpu else [said, CPU_MEMORY]
        said = f"{gib(line.intercept * 2**30)} + {gib(line.slope * 2**30)} a sequence"
        if not self.on_gpu:
            return [f"mapped memory: {said}", CPU_MEMORY]
        cards = ", ".join(f"{card} GiB: {_largest_on_card(line, card)}" for card in CARDS_GIB)
        return [f"memory: {said}", f"largest by that line on a card of {cards}"]


def _largest_on_card(line: Line, card_gib: float) -> str:
    largest = int(line.largest_x(usable_gib(card_gib)))
    return f"{largest:,}" if largest >= 1 else "none"


def table_head(*, on_gpu: bool) -> str:
    """Return the header of the table of trials."""
    kinds = ("allocated", "reserved") if on_gpu else ("resident", "mapped")
    return f"{'microbatch':>10} {kinds[0]:>14} {kinds[1]:>13} {'tokens/s':>12}"


def table_row(trial: Trial) -> str:
    """Format a trial as a line of the table; each is printed when it is measured."""
    if not trial.fits:
        return f"{trial.microbatch_size:>10,} {'out of memory':>28}"
    return (f"{trial.microbatch_size:>10,} {gib(trial.allocated_gib * 2**30):>14}"
            f" {gib(trial.reserved_gib * 2**30):>13} {trial.tokens_per_second:>12,.0f}")
