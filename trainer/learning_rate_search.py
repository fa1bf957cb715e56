"""A learning-rate range test: train with a rate that grows at each step, and suggest one.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3. Here the
rate grows by a factor, not by a difference, so that one test covers six powers of ten.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from basics.errors import print_line, writing_to
from processes.command_line import Options
from processes.distributed import Process
from processes.startup_agreement import AgreedError, Agreement
from processes.watchdog import Watchdog
from reporting import charts
from reporting.clock import PhaseClock
from reporting.machine_time import record_search
from run_config import GROUPS, Run, TrainConfig
from tokens.batches import RunData
from trainer.startup import decide_for_device, prepare_run

RATES = np.geomspace(1e-6, 1, 300)  # `learning_rate` of each step
BELL = np.exp(-0.5 * (np.arange(-24, 25) / 8) ** 2)  # weights of neighbouring losses
# The suggestion, as a fraction of the rate with the lowest smoothed loss. The demo's model, trained
# with AdamW for 733 steps on one process, ended at validation losses of 2.55 with a tenth of that
# rate and 2.41 with half; the best of seven rates had 2.39. The steepest descent is lower still.
FRACTION = 0.5
DIVERGED = 4  # times the lowest smoothed loss: the test ends
CHART_NAME = "learning-rate-test-chart.png"


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Average each loss with those before and after it, weighted by a bell curve."""
    reach = len(BELL) // 2  # np.convolve's mode "same" fails for fewer losses than weights
    weights = np.convolve(np.ones(len(losses)), BELL)[reach:-reach]
    return np.convolve(losses, BELL)[reach:-reach] / weights


def suggest(losses: Sequence[float]) -> float | None:
    """Return half the rate of the lowest smoothed loss; None if the loss never fell."""
    smoothed = smooth(losses)
    best = int(smoothed.argmin())
    scatter = float(np.std(losses[: best + 1] - smoothed[: best + 1]))
    return FRACTION * float(RATES[best]) if smoothed[0] - smoothed[best] > scatter else None


def prepare_range_test(
    options: Options, watchdog: Watchdog, agreement: Agreement
) -> tuple[Run, RunData]:
    """Return a run, decided for the device and without validation, and its data. Every rank.

    Raises: UserError: it cannot be trained, or has too few steps.
    """
    process = watchdog.process
    if process.is_main:  # a failure is reported by the watchdog
        watchdog.before_exit = lambda status, reason: (
            print_line(f"learning-rate test stopped: {reason}") if status == "stopped" else None
        )
    prepared = prepare_run(replace(options, fresh=True), process, PhaseClock(), agreement)
    run, data = prepared.run, prepared.data
    num_steps = data.plan.num_steps
    if num_steps < len(RATES):
        raise AgreedError(
            f"{run.train_path}: --find-learning-rate takes {len(RATES)} steps,"
            f" and the run has {num_steps}; raise min_train_tokens, use a larger"
            " dataset or lower the global batch"
        )
    if process.is_main:
        print_line(
            f"learning-rate test of {run.name}: up to {len(RATES)} steps from the initial"
            f" weights, learning_rate from {RATES[0]:g} to {RATES[-1]:g}; nothing is saved"
        )
    run, _ = agreement.run("device", lambda: decide_for_device(run, data.plan, process.device))
    watchdog.expect_steps(run.config.hang_timeout_seconds)
    # Rates are for the whole model, so its first layers are not trained alone.
    config = run.config.model_copy(update={"validation_interval": None, "grow": None})
    return replace(run, config=config), data


def run_range_test(take_step: Callable[[float], Tensor], watchdog: Watchdog) -> list[float]:
    """Train with growing rates until the loss diverges or is not finite. Every rank.

    `take_step` takes one step with a rate, and returns this process's mean loss, (). Returns
    the losses in nats per token, averaged over all processes, one for each step.
    """
    found: list[float] = []
    bar = tqdm(RATES, unit="step", disable=None if watchdog.process.is_main else True, leave=False)
    for rate in bar:
        loss = take_step(float(rate))
        dist.all_reduce(loss)  # all ranks have the same sum, so all stop together
        mean = loss.item() / dist.get_world_size()
        if not math.isfinite(mean):
            break
        found.append(mean)
        smoothed = smooth(found)
        if smoothed[-1] > DIVERGED * smoothed.min():
            break
        if len(found) == 1:
            watchdog.start_hang_detection()
    bar.close()
    return found


def report_range_test(run: Run, losses: list[float], process: Process) -> None:
    """Print a suggestion, and draw the chart into the run's directory. Every rank; rank 0 does it.

    Raises: AgreedError: there is nothing to suggest; UserError: the chart cannot be written.
    """
    suggestion = suggest(losses) if losses else None
    if suggestion is None:
        raise AgreedError(
            f"{run.run_dir}: in {len(losses)} steps with a finite loss it fell at no"
            " learning rate by more than it varies between steps, so there is none to"
            " suggest; raise the global batch, or set precision to bf16 or fp32"
        )
    if not process.is_main:
        return
    end = "" if len(losses) == len(RATES) else f"; it diverged after {len(losses)} steps"
    print_line(
        f"lowest smoothed loss {smooth(losses).min():.4f} at learning_rate"
        f" {suggestion / FRACTION:.2g}{end}"
    )
    print_line(f"suggestion, half of that rate; set in {run.train_path}:")
    for key, value in suggested_rates(run.config, suggestion).items():
        print_line(f'    "{key}": {value:.2g}')
    path, tested, span = run.run_dir / CHART_NAME, RATES[: len(losses)], losses[0] - min(losses)

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(tested, losses, color="tab:blue", alpha=0.35, linewidth=1, label="loss of a step")
        axes.plot(tested, smooth(losses), color="tab:blue", label="smoothed")
        axes.axvline(
            suggestion, color="tab:red", linestyle="--", label=f"suggestion: {suggestion:.2g}"
        )
        axes.set_ylim(min(losses) - 0.1 * span, losses[0] + 0.5 * span)  # divergence is cut off
        axes.set(
            title=f"{run.name}: learning-rate test",
            xscale="log",
            xlabel="learning_rate",
            ylabel="loss (nats per token)",
        )
        axes.legend(frameon=False)

    with writing_to(path):
        charts.draw_by_hand(path, plot)
    record_search(run, None)
    print_line(f"chart: {path}")


def suggested_rates(config: TrainConfig, learning_rate: float) -> dict[str, float]:
    """Return the keys to set: those of the groups with own rates too, which keep their ratio."""
    rates = {"learning_rate": learning_rate}
    for group in GROUPS:
        key = f"{group}_learning_rate"
        rate = getattr(config, key)
        if rate is not None:
            rates[key] = learning_rate * rate / config.learning_rate
    return rates
