"""Search for the largest microbatch that fits in memory and the fastest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from basics.cli import print_json
from basics.errors import UserError, print_error, print_line
from basics.files import write_atomically
from basics.json_files import read_json_object, set_number, to_json
from microbatch_search.result import (
    MAX_TRIALS,
    Found,
    fits,
    memory_line,
    smallest_failure,
    table_head,
    table_row,
)
from microbatch_search.trial import Trial, Trials
from processes.command_line import Options
from processes.launch import Process, device_name
from processes.startup_agreement import Agreement
from run_config import RENAMED_KEYS, Run
from tokens.batch_plan import nearest_divisors
from trainer.step import Wrap

GROWTH = 4  # factor from one trial to the next, while there is no memory line to extrapolate
TRUSTED_GROWTH = 4  # times the largest that fits: beyond it, a prediction is reduced by SAFETY
MAX_GROWTH = 64  # times the largest that fits: never extrapolate further
SAFETY = 0.9  # of what a line through small microbatches predicts for a large one
FIRST_STEP_BACK = 0.03  # from a microbatch that was predicted to fit but did not


def find_max_microbatch(train: Callable[[int], Trial]) -> list[Trial]:
    """Try larger microbatches, then ones in between, until the largest that fits is known.

    A line through the memory measured so far predicts the next one to try.

    Args:
        train: trains a microbatch and returns its trial; the same on every rank.

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
    fitting = fits(trials)
    if not fitting:
        return None
    low, high = fitting[-1].microbatch_size, smallest_failure(trials)
    if high == low + 1:
        return None
    predicted = _predict_largest(fitting)
    if high is None:
        return _guess_upwards(low, predicted)
    failures = next(i for i, trial in enumerate(reversed(trials)) if trial.fits)
    guess = _guess_between(low, high, predicted=predicted, failures=failures)
    return min(max(guess, low + 1), high - 1)


def _guess_upwards(low: int, predicted: float) -> int:
    if predicted == math.inf:
        return low * GROWTH
    if predicted > low * TRUSTED_GROWTH:  # a line through small microbatches may mislead
        return int(min(predicted * SAFETY, low * MAX_GROWTH))
    return max(int(predicted), low + 1 + low // 100)


def _guess_between(low: int, high: int, *, predicted: float, failures: int) -> int:
    """Choose a microbatch between one that fits and one that does not.

    Args:
        predicted: the largest according to the line, which does not know the allocator's waste.
        failures: trials since the last one that fitted.
    """
    if predicted < high:
        return max(int(predicted), low + 1)
    if math.isclose(predicted, high):  # `high` itself is just too large
        return high - 1
    if predicted > 2 * high or (failures > 1 and high > low * TRUSTED_GROWTH):
        return round(math.sqrt(low * high))
    step_back = 1 - SAFETY
    if high <= low * TRUSTED_GROWTH:
        step_back = FIRST_STEP_BACK * 4 ** max(0, failures - 1)
    guess = int(high * (1 - step_back))
    return guess if low < guess else (low + high) // 2


def _predict_largest(fitting: list[Trial]) -> float:
    """Extrapolate the two largest that fit to the capacity; inf with fewer than two.

    In smaller ones the optimizer's step sets the peak, not the microbatch.
    """
    if len(fitting) < 2:
        return math.inf
    return memory_line(fitting[-2:]).largest_x(fitting[-1].capacity_gib)


def search(run: Run, process: Process, agreement: Agreement, *, options: Options,
           wrap: Wrap) -> None:
    """Find the largest microbatch of a run, and print it on rank 0. Every rank.

    Raises:
        AgreedError: on every rank, if not even a microbatch of 1 fits, or a trial failed for
            another reason than memory.
    """
    agreement.run("memory limit", lambda: _check_limit(process, options.memory_limit_gib))
    if options.save:
        agreement.run("batch", lambda: _check_batch(run, process.world_size))
    print_on_main = _printer(process, as_json=options.json)
    trials = Trials(run, process, agreement,
                    memory_limit_gib=options.memory_limit_gib, wrap=wrap)

    tried: list[Trial] = []
    on_gpu = process.device.type == "cuda"

    def train(microbatch_size: int) -> Trial:
        trial = trials.train(microbatch_size)
        print_on_main(table_row(trial))
        tried.append(trial)
        return trial

    print_on_main(table_head(on_gpu=on_gpu))
    find_max_microbatch(train)
    agreement.run("smallest", lambda: _check_one_fits(run, tried))
    found = Found(tried, on_gpu=on_gpu)
    print_on_main("\n".join(found.lines()))
    if options.save:
        agreement.run("save", lambda: process.is_main and print_on_main(
            save_result(run, found, process)))
    if options.json and process.is_main:
        print_json(found.document(run, process.world_size))


def _printer(process: Process, *, as_json: bool) -> Callable[[str], None]:
    """Return how the search prints lines: on rank 0, and beside a document on standard error."""
    if not process.is_main:
        return lambda _: None
    return print_error if as_json else print_line


def _check_limit(process: Process, memory_limit_gib: float | None) -> None:
    if process.device.type == "cpu" and memory_limit_gib is None:
        raise UserError("--find-max-microbatch without a GPU: give --memory-limit-gib, the memory"
                        " that a process may use")
    if process.device.type == "cpu" and not Path("/proc/self/status").exists():
        raise UserError("--find-max-microbatch without a GPU needs Linux")


def _check_batch(run: Run, world_size: int) -> None:
    batch = run.train.global_batch_size
    if batch is not None and batch % world_size:
        raise UserError(f"{run.train_path}: global_batch_size {batch} is not divisible by"
                        f" {world_size} processes, so nothing could be saved; change it, or the"
                        " number of processes")


def _check_one_fits(run: Run, trials: list[Trial]) -> None:
    if not fits(trials):
        raise UserError(f"{run.run_dir}: not even a microbatch of 1 fits; make the model or its"
                        " context_length smaller, or use a larger card (see: lab plan)")


def save_result(run: Run, found: Found, process: Process) -> str:
    """Write the largest microbatch that keeps `global_batch_size` into `train.json`. Rank 0.

    Without `global_batch_size`, the global batch changes with the microbatch. The speed goes into
    `microbatch-search.json`, for `lab plan`.

    Returns:
        A line that says what was written.
    """
    size, world_size = found.largest.microbatch_size, process.world_size
    batch = run.train.global_batch_size
    accumulation = run.train.gradient_accumulation_steps
    if batch is not None:
        size, _ = nearest_divisors(batch // world_size, size)
        accumulation = batch // world_size // size
    keys, fitting = read_json_object(run.train_path), fits(found.trials)
    old_names = {new: old for old, new in RENAMED_KEYS.items() if old in keys}
    set_number(run.train_path, old_names.get("microbatch_size", "microbatch_size"), size)
    write_atomically(run.search_path, to_json({
        "tokens_per_second": np.interp(size, [trial.microbatch_size for trial in fitting],
                                       [trial.tokens_per_second for trial in fitting]),
        "machine": {"device": device_name(process), "processes": world_size},
        "model": run.model.model_dump(),
        "train": run.train.model_dump() | {"microbatch_size": size}}, indent=2) + "\n")
    return (f"saved in {run.train_path}: microbatch_size {size}; x accumulation {accumulation}"
            f" x {world_size} = global batch {size * accumulation * world_size}"
            f" ({'kept' if batch else 'it follows the microbatch; global_batch_size fixes it'})")
