"""Search for the largest microbatch that fits in memory and the fastest one."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from basics.cli import print_json
from basics.curve_fits import Line, fit_line
from basics.errors import FAILED, STOP_SIGNALS, UserError, print_error, print_line
from basics.files import write_atomically
from basics.json_files import read_json_object, set_number, to_json
from basics.out_of_memory import says_out_of_memory
from basics.text import gib
from processes.command_line import Options
from processes.launch import num_gpus, spans_nodes, start_torchrun
from reporting.speed import CARDS_GIB, usable_gib
from run_config import RENAMED_KEYS, Run, load_run
from tokens.batch_plan import nearest_divisors
from trainer.microbatch_trial import RESULT, TRIAL_VARIABLE, Trial, says_limit_reached

MAX_TRIALS = 8
GROWTH = 4  # factor from one trial to the next, while there is no memory line to extrapolate
TRUSTED_GROWTH = 4  # times the largest that fits; a prediction beyond it is reduced by SAFETY
MAX_GROWTH = 64  # times the largest that fits: never extrapolate further
SAFETY = 0.9  # of what a line through small microbatches predicts for a large one
FIRST_STEP_BACK = 0.03  # from a microbatch that was predicted to fit but did not
MIN_RISE = 0.01  # of the fixed part: a memory line that rises less is noise
CPU_MEMORY = ("mapped: address space beyond the libraries, which --memory-limit-gib limits\n"
              "resident: RAM in use, with pages of libraries that the trial is the first to use")


def search(script: str, options: Options, num_processes: int) -> None:
    """Find the largest microbatch of a run, and print it. One process; it starts the others.

    Args:
        script: ddp_train.py, which each trial runs under a torchrun of its own.

    Raises:
        UserError: not even a microbatch of 1 fits, or a trial failed for another reason.
    """
    run, on_gpu = check_search(options, num_processes), num_gpus() > 0
    say = print_error if options.json else print_line
    memory = "     allocated      reserved" if on_gpu else "      resident        mapped"
    say(f"microbatch {memory}     tokens/s")

    def train(microbatch_size: int) -> Trial:
        trial = try_microbatch([script, *sys.argv[1:]], microbatch_size, num_processes,
                               on_gpu=on_gpu)
        say(table_row(trial))
        return trial

    found = Found(find_max_microbatch(train), on_gpu=on_gpu)
    if not fits(found.trials):
        raise UserError(f"{run.run_dir}: not even a microbatch of 1 fits; make the model or its"
                        " context_length smaller, or use a larger card (see: lab plan)")
    say("\n".join(found.lines()))
    if options.save:
        say(save_result(run, found, num_processes))
    if options.json:
        print_json(found.document(run, num_processes))


def check_search(options: Options, num_processes: int) -> Run:
    """Return the run, if it can be searched. Raises: UserError."""
    run, on_gpu = load_run(options.runs_dir, options.run), num_gpus() > 0
    if spans_nodes():
        raise UserError("--find-max-microbatch runs on one machine: start it there without"
                        " torchrun, or with --nnodes 1")
    if not on_gpu and options.memory_limit_gib is None:
        raise UserError("--find-max-microbatch without a GPU: give --memory-limit-gib, the memory"
                        " that a process may use")
    if not on_gpu and not Path("/proc/self/status").exists():
        raise UserError("--find-max-microbatch without a GPU needs Linux")
    batch = run.train.global_batch_size
    if options.save and batch is not None and batch % num_processes:
        raise UserError(f"{run.train_path}: global_batch_size {batch} is not divisible by"
                        f" {num_processes} processes, so nothing could be saved; change it, or the"
                        " number of processes")
    return run


def try_microbatch(command: list[str], microbatch_size: int, num_processes: int, *,
                   on_gpu: bool) -> Trial:
    """Train a few steps under torchrun; return what they took.

    Args:
        command: ddp_train.py and its arguments, among them --find-max-microbatch.

    Raises:
        UserError: they failed for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[TRIAL_VARIABLE] = json.dumps(
            {"microbatch_size": microbatch_size, "folder": name})
        try:
            status = start_torchrun(command[0], command[1:], num_processes=num_processes,
                                    logs_dir=folder / "logs")
        finally:
            del os.environ[TRIAL_VARIABLE]
        if status - 128 in STOP_SIGNALS:
            sys.exit(status)
        if (folder / RESULT).exists():
            return Trial(**json.loads((folder / RESULT).read_text()))
        failures = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
        said = "\n".join(path.read_text(errors="replace") for path in folder.rglob("stderr.log"))
    # What an error says of a lost peer follows from the end of another process.
    errors = [found["error"] for found in failures
              if not re.search("peer|connection|remote", found["error"], re.IGNORECASE)]
    # On a CPU, a library that does not check for a failed allocation crashes.
    has_crashed = not on_gpu and not errors and (
        status > 128 or failures or says_limit_reached(said))
    if any(found["out_of_memory"] for found in failures) or says_out_of_memory(said) or has_crashed:
        return Trial(microbatch_size, fits=False)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "no message")
    reason = errors[0] if errors else f"{last.strip()[:160]} (exit status {status})"
    raise UserError(f"microbatch {microbatch_size} failed, not out of memory: {reason}", FAILED)


def find_max_microbatch(train: Callable[[int], Trial]) -> list[Trial]:
    """Try larger microbatches, then ones in between, until the largest that fits is known.

    A line through the memory measured so far predicts the next one to try.

    Returns:
        The trials in order, at most `MAX_TRIALS`. The first has a microbatch of 1.
    """
    trials: list[Trial] = []
    guess: int | None = 1
    while guess is not None and len(trials) < MAX_TRIALS:
        trials.append(train(guess))
        guess = next_guess(trials)
    return trials


def next_guess(trials: list[Trial]) -> int | None:
    """Return the microbatch to try next; None if the largest is known, or not even 1 fits."""
    fitting, failure = fits(trials), smallest_failure(trials)
    if not fitting:
        return None
    low = fitting[-1].microbatch_size
    if failure == low + 1:
        return None
    # In smaller ones than the two largest the optimizer's step sets the peak, not the microbatch.
    predicted = math.inf if len(fitting) < 2 else memory_line(fitting[-2:]).largest_x(
        fitting[-1].capacity_gib)
    if failure is not None:
        return _guess_between(trials, low, failure, predicted)
    if predicted == math.inf:
        return low * GROWTH
    if predicted > low * TRUSTED_GROWTH:  # a line through small microbatches may mislead
        return int(min(predicted * SAFETY, low * MAX_GROWTH))
    return max(int(predicted), low + 1 + low // 100)


def _guess_between(trials: list[Trial], low: int, high: int, predicted: float) -> int:
    """Choose a microbatch between one that fits and one that does not.

    Args:
        predicted: the largest according to the line, which does not know the allocator's waste.
    """
    failures = next(i for i, trial in enumerate(reversed(trials)) if trial.fits)  # in a row
    if predicted < high:
        return min(max(int(predicted), low + 1), high - 1)
    if math.isclose(predicted, high):  # `high` itself is just too large
        return high - 1
    if predicted > 2 * high or (failures > 1 and high > low * TRUSTED_GROWTH):
        return min(max(round(math.sqrt(low * high)), low + 1), high - 1)
    step_back = 1 - SAFETY
    if high <= low * TRUSTED_GROWTH:
        step_back = FIRST_STEP_BACK * 4 ** max(0, failures - 1)
    guess = int(high * (1 - step_back))
    return guess if low < guess else (low + high) // 2


def memory_line(trials: list[Trial]) -> Line:
    """Fit the demand in GiB over the microbatch size."""
    return fit_line([trial.microbatch_size for trial in trials],
                    [trial.demand_gib for trial in trials])


def fits(trials: list[Trial]) -> list[Trial]:
    """Return the trials that fitted, the smallest microbatch first."""
    return sorted((trial for trial in trials if trial.fits), key=lambda one: one.microbatch_size)


def smallest_failure(trials: list[Trial]) -> int | None:
    return min((trial.microbatch_size for trial in trials if not trial.fits), default=None)


@dataclass(frozen=True)
class Found:
    """The result of a search; without a GPU its memory says nothing of a card."""

    trials: list[Trial]
    on_gpu: bool = True

    @property
    def largest(self) -> int:
        return fits(self.trials)[-1].microbatch_size

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
            "largest": self.largest, "fastest": self.fastest.microbatch_size,
            "smallest_that_did_not_fit": smallest_failure(self.trials),
            "memory_gib": line and {"fixed": line.intercept, "a_sequence": line.slope},
            "trials": [asdict(trial) for trial in self.trials],
        }

    def lines(self) -> list[str]:
        """Format the result for printing."""
        largest, failure, fastest = self.largest, smallest_failure(self.trials), self.fastest
        said = f"largest microbatch: {largest:,}"
        if failure is None:
            said += f" (larger ones were not tried: limit of {MAX_TRIALS} trials)"
        elif failure > largest + 1:
            between = (f"{largest + 1:,} was" if failure == largest + 2
                       else f"{largest + 1:,} to {failure - 1:,} were")
            said += (f" ({failure:,} did not fit; {between} not tried: limit of {MAX_TRIALS}"
                     " trials)")
        return [said, f"fastest microbatch: {fastest.microbatch_size:,}"
                f" ({fastest.tokens_per_second:,.0f} tokens/s)", *self._memory_lines()]

    def _memory_lines(self) -> list[str]:
        line = self.line
        if line is None or line.slope * self.largest < MIN_RISE * line.intercept:
            said = "memory hardly grows with these microbatches"
            return [f"{said}: no prediction for other cards"] if self.on_gpu else [said, CPU_MEMORY]
        said = f"{gib(line.intercept * 2**30)} + {gib(line.slope * 2**30)} a sequence"
        if not self.on_gpu:
            return [f"mapped memory: {said}", CPU_MEMORY]
        largest = {card: int(line.largest_x(usable_gib(card))) for card in CARDS_GIB}
        cards = ", ".join(f"{card} GiB: {f'{size:,}' if size >= 1 else 'none'}"
                          for card, size in largest.items())
        return [f"memory: {said}", f"largest by that line on a card of {cards}"]


def table_row(trial: Trial) -> str:
    if not trial.fits:
        return f"{trial.microbatch_size:>10,} {'out of memory':>28}"
    return (f"{trial.microbatch_size:>10,} {gib(trial.allocated_gib * 2**30):>14}"
            f" {gib(trial.reserved_gib * 2**30):>13} {trial.tokens_per_second:>12,.0f}")


def save_result(run: Run, found: Found, num_processes: int) -> str:
    """Write the largest microbatch that keeps `global_batch_size` into `train.json`.

    Without `global_batch_size`, the global batch changes with the microbatch. The trials go into
    `microbatch-search.json`, for `lab plan` and `lab compare`.

    Returns:
        A line that says what was written.
    """
    size, batch = found.largest, run.train.global_batch_size
    accumulation = run.train.gradient_accumulation_steps
    if batch is not None:
        size, _ = nearest_divisors(batch // num_processes, size)
        accumulation = batch // num_processes // size
    keys, fitting = read_json_object(run.train_path), fits(found.trials)
    old_names = {new: old for old, new in RENAMED_KEYS.items() if old in keys}
    set_number(run.train_path, old_names.get("microbatch_size", "microbatch_size"), size)
    write_atomically(run.search_path, to_json({
        "tokens_per_second": np.interp(size, [trial.microbatch_size for trial in fitting],
                                       [trial.tokens_per_second for trial in fitting]),
        "machine": {"device": fitting[-1].device, "processes": num_processes},
        "model": run.model.model_dump(),
        "train": run.train.model_dump() | {"microbatch_size": size},
        "trials": [asdict(trial) for trial in found.trials]}, indent=2) + "\n")
    return (f"saved in {run.train_path}: microbatch_size {size}; x accumulation {accumulation}"
            f" x {num_processes} = global batch {size * accumulation * num_processes}"
            f" ({'kept' if batch else 'it follows the microbatch; global_batch_size fixes it'})")
