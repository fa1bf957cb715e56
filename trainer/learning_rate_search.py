"""A learning-rate range test: train with a rate that grows at each step, and suggest one.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3. Here the
rate grows by a factor, not by a difference, so that one test covers six powers of ten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from basics.errors import NON_FINITE, UserError, cannot_be_written, print_line
from processes.command_line import Options
from processes.launch import Process, process_group
from processes.startup_agreement import AgreedError, Agreement
from processes.watchdog import Watchdog
from reporting import charts
from reporting.clock import PhaseClock
from run_config import Run, TrainConfig
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, prefetch
from trainer.optimization import Group, peak_learning_rate
from trainer.startup import build_state, prepare_run
from trainer.step import TrainingStep, Wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = np.geomspace(1e-6, 1, 300)  # `learning_rate` of each step
SMOOTHING_STEPS = 8  # standard deviation of the bell curve that averages neighbouring losses
# The suggestion, as a fraction of the rate with the lowest smoothed loss. The demo's model, trained
# with AdamW for 733 steps on one process, ended at validation losses of 2.55 with a tenth of that
# rate and 2.41 with half; the best of seven rates had 2.39. The steepest descent is lower still.
FRACTION = 0.5
DIVERGED = 4  # times the lowest smoothed loss: the test ends
CHART_NAME = "learning-rate-test-chart.png"
HEADROOM = 0.1  # of the span from the lowest smoothed loss to the first one; divergence is cut off

Sharding = Callable[..., Iterator[int]]  # as `microbatch_indices` of ddp_train.py


@dataclass(frozen=True)
class RangeTest:
    """The losses of a test: nats per token, averaged over all processes, one for each step."""

    losses: tuple[float, ...] = ()

    @property
    def rates(self) -> np.ndarray:
        return RATES[: len(self.losses)]

    @property
    def smoothed(self) -> np.ndarray:
        """The losses, each averaged with those before and after it."""
        distances = np.arange(-3 * SMOOTHING_STEPS, 3 * SMOOTHING_STEPS + 1)
        bell = np.exp(-0.5 * (distances / SMOOTHING_STEPS) ** 2)
        reach = len(bell) // 2  # np.convolve's mode "same" fails for fewer losses than weights
        weights = np.convolve(np.ones(len(self.losses)), bell)[reach:-reach]
        return np.convolve(self.losses, bell)[reach:-reach] / weights

    @property
    def has_diverged(self) -> bool:
        """Whether the last smoothed loss is far above the lowest."""
        smoothed = self.smoothed
        return bool(smoothed[-1] > DIVERGED * smoothed.min())

    def suggestion(self) -> float | None:
        """Return half the rate of the lowest smoothed loss; None if the loss never fell."""
        smoothed = self.smoothed
        best = int(smoothed.argmin())
        scatter = float(np.std(self.losses[: best + 1] - smoothed[: best + 1]))
        if not smoothed[0] - smoothed[best] > scatter:
            return None
        return FRACTION * float(self.rates[best])


def find_learning_rate(options: Options, process: Process, agreement: Agreement, wrap: Wrap,
                       indices_of: Sharding) -> None:
    """Test the rates of a run, draw a chart into its directory, print a suggestion. Every rank.

    The run's model is trained from its initial weights, and is not saved.

    Args:
        wrap: makes the training loss average its gradients over the processes.
        indices_of: gives the microbatches of one process.

    Raises:
        UserError: there are too few steps, or the loss never fell.
    """
    watchdog = Watchdog(process, agreement.connect("watchdog"), phase=lambda: "learning-rate test")
    watchdog.before_exit = partial(_before_exit, process)
    with watchdog.start():
        prepared = prepare_run(replace(options, fresh=True), process, PhaseClock(), agreement)
        run = prepared.run
        agreement.run("steps", lambda: _check_length(run, prepared.plan))
        agreement.require_same("run", prepared.agreed_values())
        prepared = agreement.run("device", lambda: prepared.for_device(process.device))
        if process.is_main:
            print_line(_begin_line(run))
        state = agreement.run("state", lambda: build_state(prepared, process))
        watchdog.expect_steps(run.train.hang_timeout_seconds, heartbeat_path=None)
        with process_group(process, agreement.connect("group"), run.train):
            step = TrainingStep(state, _without_validation(prepared.train), process, wrap=wrap)
            indices = indices_of(prepared.plan, process.rank, first_step=0)
            microbatches = prefetch(prepared.data.train, indices, device=process.device)
            test = run_range_test(step, watchdog.watching(microbatches), prepared.plan, watchdog)
    _check_result(run, test)
    if process.is_main:
        for line in result_lines(run, test):
            print_line(line)
        _draw(run, test)


def _check_length(run: Run, plan: BatchPlan) -> None:
    if plan.num_steps < len(RATES):
        raise UserError(f"{run.train_path}: --find-learning-rate takes {len(RATES)} steps, and the"
                        f" run has {plan.num_steps}; raise min_train_tokens, use a larger dataset"
                        " or lower the global batch")


def _without_validation(train: TrainConfig) -> TrainConfig:
    """Return the config with which no validation is compiled."""
    return train.model_copy(update={"validation_interval": None})


def _begin_line(run: Run) -> str:
    return (f"learning-rate test of {run.name}: up to {len(RATES)} steps from the initial weights,"
            f" learning_rate from {RATES[0]:g} to {RATES[-1]:g}; nothing is saved")


def _before_exit(process: Process, status: str, reason: str) -> None:
    if process.is_main and status == "stopped":  # a failure is reported by the watchdog
        print_line(f"learning-rate test stopped: {reason}")


def run_range_test(step: TrainingStep, microbatches: Generator[Microbatch], plan: BatchPlan,
                   watchdog: Watchdog) -> RangeTest:
    """Train with growing rates until the loss diverges or is not finite. Every rank."""
    test, is_main = RangeTest(), step.process.is_main
    bar = tqdm(RATES, unit="step", disable=None if is_main else True, leave=False)
    for rate in bar:
        loss, _ = step.take(microbatches, num_microbatches=plan.gradient_accumulation_steps,
                            learning_rate=float(rate), momentum=step.train.momentum)
        mean = _mean_over_processes(loss)
        if not math.isfinite(mean):
            break
        test = RangeTest((*test.losses, mean))
        if test.has_diverged:
            break
        if len(test.losses) == 1:
            watchdog.start_hang_detection(step.train.hang_timeout_seconds)
    bar.close()
    microbatches.close()
    return test


def _mean_over_processes(loss: Tensor) -> float:
    """Average a loss; the same to the last bit on every rank, so that all stop together."""
    losses = torch.zeros(dist.get_world_size(), device=loss.device)
    losses[dist.get_rank()] = loss
    dist.all_reduce(losses)  # sums with zeros are exact in any order
    return losses.mean().item()


def _check_result(run: Run, test: RangeTest) -> None:
    """Raise the same error on every rank if there is nothing to suggest."""
    if not test.losses:
        raise AgreedError(f"{run.run_dir}: the loss of the first step is not finite, so there is no"
                          " rate to suggest; set precision to bf16 or fp32", NON_FINITE)
    if test.suggestion() is None:
        raise AgreedError(f"{run.run_dir}: the loss fell at no learning rate by more than it varies"
                          " between steps, so there is none to suggest; raise the global batch")


def result_lines(run: Run, test: RangeTest) -> list[str]:
    """Describe the result and the keys of `train.json` to set."""
    rate, smoothed = test.suggestion(), test.smoothed
    best = int(smoothed.argmin())
    end = "" if len(test.losses) == len(RATES) else f"; it diverged after {len(test.losses)} steps"
    lines = [f"lowest smoothed loss {smoothed[best]:.4f} at learning_rate"
             f" {test.rates[best]:.2g}{end}",
             f"suggestion, half of that rate; set in {run.train_path}:"]
    rates = suggested_rates(run.train, rate)
    lines += [f"    {json.dumps(key)}: {value:.2g}" for key, value in rates.items()]
    if len(rates) > 1:
        lines.append("all groups of parameters were tested together: their rates keep their ratio")
    return lines


def suggested_rates(train: TrainConfig, learning_rate: float) -> dict[str, float]:
    """Return the keys to set: `learning_rate`, and those of the groups with their own rates."""
    rates = {"learning_rate": learning_rate}
    for group in get_args(Group):
        key, peak = f"{group}_learning_rate", peak_learning_rate(group, train)
        if getattr(train, key) is not None:
            rates[key] = learning_rate * peak / train.learning_rate
    return rates


def _draw(run: Run, test: RangeTest) -> None:
    """Draw losses over learning rates, the suggestion marked. Raises: UserError. Rank 0."""
    path, smoothed = run.run_dir / CHART_NAME, test.smoothed

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(test.rates, test.losses, color="tab:blue", alpha=0.35, linewidth=1,
                  label="loss of a step")
        axes.plot(test.rates, smoothed, color="tab:blue", label="smoothed")
        axes.axvline(test.suggestion(), color="tab:red", linestyle="--",
                     label=f"suggestion: {test.suggestion():.2g}")
        low, high = min(test.losses), max(test.losses[0], float(smoothed[0]))
        margin = HEADROOM * (high - low)
        axes.set_ylim(low - margin, high + 5 * margin)
        axes.set_xscale("log")
        axes.set_title(f"{path.resolve().parent.name}: learning-rate test")
        axes.set_xlabel("learning_rate")
        axes.set_ylabel("loss (nats per token)")
        axes.legend(frameon=False)

    try:
        charts.draw_by_hand(path, plot)
    except OSError as error:
        raise cannot_be_written(path, error) from None
    print_line(f"chart: {path}")
