"""The largest microbatch that fits in memory, the fastest, and what memory they take."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basics.curve_fits import Line, fit_line
from basics.errors import UserError
from basics.files import write_aside
from microbatch_search.trial import Trial, Trials
from processes.command_line import Options
from processes.launch import Process
from processes.startup_agreement import Agreement
from reporting.speed import CARDS_GIB, usable_gib
from run_config import RENAMED_KEYS, Run
from tokens.batch_plan import nearest_divisors
from trainer.step import Wrap

MAX_TRIES = 8
GROWTH = 4  # from one try to the next, as long as there is no line to go by
FAR = 4  # times the largest that fits: further, a line is not taken at its word
FURTHEST = 64  # times the largest that fits, on the word of a line through smaller ones
FIRST_STEP_BACK = 0.03  # from a microbatch that a line promised and that did not fit
HARDLY = 0.01  # of the fixed part: a line with such a rise is noise
CAUTION = 0.9  # of what a line through small microbatches promises for a large one


def find_max_microbatch(train: Callable[[int], Trial]) -> list[Trial]:
    """Try microbatches, each larger or between those tried, until the largest that fits is found.

    A line through the demands measured so far gives the next one to try.

    Args:
        train: trains a microbatch and tells what came of it; the same answer on every rank.

    Returns:
        The tries in their order, at most `MAX_TRIES`. The first is 1.
    """
    trials: list[Trial] = []
    guess: int | None = 1
    while guess is not None and len(trials) < MAX_TRIES:
        trials.append(train(guess))
        guess = next_guess(trials)
    return trials


def next_guess(trials: list[Trial]) -> int | None:
    """Give the microbatch to try next; None when the largest is known, or not even 1 fits."""
    fitting = sorted(fits(trials), key=lambda trial: trial.microbatch_size)
    if not fitting:
        return None
    low, high = fitting[-1].microbatch_size, smallest_failure(trials)
    if high == low + 1:
        return None
    promised = _largest_by_line(fitting)
    if high is None:
        return _upwards(low, promised)
    failures = next(i for i, trial in enumerate(reversed(trials)) if trial.fits)
    return min(max(_between(low, high, promised=promised, failures=failures), low + 1), high - 1)


def _upwards(low: int, promised: float) -> int:
    if promised > low * FAR:  # a line through small ones may mislead: look at a larger one first
        return int(min(promised * CAUTION, low * FURTHEST)) if promised < math.inf else low * GROWTH
    return max(int(promised), low + 1 + low // 100)


def _between(low: int, high: int, *, promised: float, failures: int) -> int:
    """Choose a microbatch between one that fits and one that does not.

    Args:
        promised: what the line says would just fit; it cannot know what the allocator wastes.
        failures: tries since the last one that fitted.
    """
    if promised < high:
        return max(int(promised), low + 1)
    if math.isclose(promised, high):  # just that one does not quite fit
        return high - 1
    if promised > 2 * high or (failures > 1 and high > low * FAR):
        return round(math.sqrt(low * high))
    step_back = 1 - CAUTION if high > low * FAR else FIRST_STEP_BACK * 4 ** max(0, failures - 1)
    cautious = int(high * (1 - step_back))
    return cautious if low < cautious else (low + high) // 2


def _largest_by_line(fitting: list[Trial]) -> float:
    """Read off a line through the two largest that fit where the memory is full; inf without."""
    if len(fitting) < 2:
        return math.inf
    largest = fitting[-2:]  # in small ones the optimizer's step sets the peak, not the microbatch
    line = fit_line([trial.microbatch_size for trial in largest],
                    [trial.demand_gib for trial in largest])
    return line.largest_x(fitting[-1].capacity_gib)


def fits(trials: list[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.fits]


def smallest_failure(trials: list[Trial]) -> int | None:
    return min((trial.microbatch_size for trial in trials if not trial.fits), default=None)


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    trials: list[Trial]

    @property
    def largest(self) -> Trial:
        return max(fits(self.trials), key=lambda trial: trial.microbatch_size)

    @property
    def fastest(self) -> Trial:
        return max(fits(self.trials), key=lambda trial: trial.tokens_per_second)

    @property
    def line(self) -> Line | None:
        """GiB over the microbatch; the smallest is left out where there are enough others."""
        trained = sorted(fits(self.trials), key=lambda trial: trial.microbatch_size)
        trained = trained[1:] if len(trained) > 2 else trained
        if len(trained) < 2:
            return None
        return fit_line([trial.microbatch_size for trial in trained],
                        [trial.demand_gib for trial in trained])

    def lines(self) -> list[str]:
        """Say what was found, for a person."""
        largest, fastest, failure = self.largest, self.fastest, smallest_failure(self.trials)
        said = f"largest microbatch: {largest.microbatch_size}"
        if failure is None:
            said += f" (larger ones were not tried after {MAX_TRIES} tries)"
        elif failure > largest.microbatch_size + 1:
            said += (f" ({failure} did not fit; between them nothing was tried after"
                     f" {MAX_TRIES} tries)")
        said = [said, f"fastest microbatch: {fastest.microbatch_size}"
                      f" ({fastest.tokens_per_second:,.0f} tokens/s)"]
        line = self.line
        if line is None or line.slope * largest.microbatch_size < HARDLY * line.intercept:
            said.append("memory hardly grows with these microbatches: no prediction for other"
                        " cards")
        else:
            cards = ", ".join(f"{card} GiB: {_predicted(line, card)}" for card in CARDS_GIB)
            said += [f"memory: {line.intercept:.2f} GiB + {line.slope:.3f} GiB a sequence",
                     f"largest by that line on a card of {cards}"]
        return said


def _predicted(line: Line, card_gib: float) -> str:
    largest = int(line.largest_x(usable_gib(card_gib)))
    return f"{largest}" if largest >= 1 else "none"


def table_head() -> str:
    return f"{'microbatch':>10} {'GiB allocated':>14} {'GiB reserved':>13} {'tokens/s':>12}"


def table_row(trial: Trial) -> str:
    if not trial.fits:
        return f"{trial.microbatch_size:>10} {'out of memory':>28}"
    return (f"{trial.microbatch_size:>10} {trial.allocated_gib:>14.2f}"
            f" {trial.reserved_gib:>13.2f} {trial.tokens_per_second:>12,.0f}")


def search(run: Run, process: Process, agreement: Agreement, *, options: Options,
           wrap: Wrap) -> None:
    """Find the largest microbatch of a run, and print it on rank 0. Every rank.

    Raises:
        AgreedError: on every rank, if not even a microbatch of 1 fits, or a try failed otherwise.
    """
    agreement.run("memory limit", lambda: _check_limit(process, options.memory_limit_gib))
    if options.save:
        agreement.run("batch", lambda: _check_batch(run, process.world_size))
    say = print if process.is_main else (lambda *_, **__: None)
    trials = Trials(run, process, agreement,
                    memory_limit_gib=options.memory_limit_gib, wrap=wrap)

    def train(microbatch_size: int) -> Trial:
        trial = trials.train(microbatch_size)
        say(table_row(trial), flush=True)
        return trial

    say(table_head(), flush=True)
    tried = find_max_microbatch(train)
    agreement.run("smallest", lambda: _check_one_fits(run, tried))
    found = Found(tried)
    for line in found.lines():
        say(line)
    if options.save:
        agreement.run("save", lambda: process.is_main and say(
            save_microbatch(run, found.largest.microbatch_size, world_size=process.world_size)))


def _check_limit(process: Process, memory_limit_gib: float | None) -> None:
    if process.device.type == "cpu" and memory_limit_gib is None:
        raise UserError("--find-max-microbatch without a GPU: give --memory-limit-gib, what a"
                        " process may take")
    if process.device.type == "cpu" and not Path("/proc/self/status").exists():
        raise UserError("--find-max-microbatch without a GPU needs Linux")


def _check_batch(run: Run, world_size: int) -> None:
    batch = run.train.global_batch_size
    if batch is not None and batch % world_size:
        raise UserError(f"{run.train_path}: global_batch_size {batch} is not divisible by"
                        f" {world_size} processes, so nothing could be saved; start another number"
                        " of them, or change it")


def _check_one_fits(run: Run, trials: list[Trial]) -> None:
    if not fits(trials):
        raise UserError(f"{run.run_dir}: not even a microbatch of 1 fits; make the model or its"
                        " context_length smaller, or take a larger card (see: lab plan)")


def save_microbatch(run: Run, largest: int, *, world_size: int) -> str:
    """Write the largest microbatch that keeps `global_batch_size` into `train.json`. Rank 0.

    Without `global_batch_size` the run's batch follows its microbatch. Gives what was written.
    """
    size, batch = largest, run.train.global_batch_size
    if batch is not None:
        size, _ = nearest_divisors(batch // world_size, largest)
    values: dict[str, Any] = json.loads(run.train_path.read_text(encoding="utf-8"))
    names = {new: old for old, new in RENAMED_KEYS.items() if old in values}
    values[names.get("microbatch_size", "microbatch_size")] = size
    write_aside(run.train_path, json.dumps(values, indent=4, ensure_ascii=False) + "\n")
    accumulation = run.train.gradient_accumulation_steps
    if batch is not None:
        accumulation = batch // world_size // size
    return (f"saved in {run.train_path}: microbatch_size {size}; x accumulation {accumulation}"
            f" x {world_size} = global batch {size * accumulation * world_size}"
            f" ({'kept' if batch else 'it follows the microbatch; global_batch_size fixes it'})")
