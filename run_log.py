"""What a person and a file get to see of a run: bar or plain lines, metrics, summary."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from batch_plan import BatchPlan
from run_clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    DOWNLOAD,
    LOST,
    STARTUP,
    TRAINING,
    VALIDATION,
    WAITING,
    PhaseClock,
)
from run_config import Run
from run_metrics import (
    WindowSummary,
    read_metrics,
    remove_metrics_from,
    to_json,
    write_aside,
)

PLAIN_LINE_SECONDS = 10  # between lines where there is no terminal to draw a bar on
ONCE_A_START = (STARTUP, DOWNLOAD, COMPILE, LOST)  # does not grow with the steps
SHOWN_PHASES = {
    TRAINING: "training", WAITING: "waiting", VALIDATION: "validation",
    CHECKPOINT: "checkpoints and charts", COMPILE: "compiling and first steps",
    DOWNLOAD: "download", STARTUP: "start-up", LOST: "lost between starts",
}


@dataclass(frozen=True)
class RunEnd:
    """Where a run stands when a start of it ends."""

    global_step: int
    stop_reason: str | None  # where the run is not finished
    num_parameters: int
    best: dict[str, Any]  # checkpoint, global_step, loss
    checkpoints: dict[str, float]  # of this start: saved, stalled_seconds, longest_write_seconds
    machine: dict[str, Any]


class RunLog:
    """The one place that prints and records. On other ranks than 0 it does nothing."""

    def __init__(self, run: Run, plan: BatchPlan, *, clock: PhaseClock, is_active: bool) -> None:
        self.run, self.plan, self.clock = run, plan, clock
        self.is_active = is_active
        self._bar = tqdm(disable=True)
        self._last_plain_line = -math.inf
        self._last_step, self._last_seconds = -1, 0.0

    def say(self, line: str) -> None:
        """Print one line without tearing the bar."""
        if self.is_active:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def start(self, first_step: int, facts: list[str]) -> None:
        """Print what is about to happen, and start the bar at `first_step`."""
        for line in facts:
            self.say(line)
        if self.is_active:
            remove_metrics_from(self.run.metrics_path, first_step)
            self._bar = tqdm(total=self.plan.num_steps, initial=first_step, unit="step",
                             desc=self.run.name, disable=None, dynamic_ncols=True)

    def step(self) -> None:
        self._bar.update()

    def measure_from(self, global_step: int) -> None:
        """Count tokens a second from behind this step on."""
        self._last_step, self._last_seconds = global_step, _step_seconds(self.clock.read())

    def lay_out(self, plan: BatchPlan) -> None:
        """Show that the run is to end after another number of steps."""
        self.plan, self._bar.total = plan, plan.num_steps
        self.say(f"laid out to end inside the budget: {plan.num_steps:,} steps ="
                 f" {plan.num_tokens:,} tokens")

    def report_steps(self, global_step: int, learning_rate: float, window: WindowSummary) -> None:
        """Record and show the steps up to and with `global_step`."""
        if not self.is_active:
            return
        seconds, last_step = self.clock.read(), self._last_step
        elapsed = _step_seconds(seconds) - self._last_seconds
        self.measure_from(global_step)
        # The first step of a start is not counted: it compiles, and may be alone in its report.
        num_tokens = (global_step - last_step) * self.plan.tokens_per_step
        tokens_per_second = num_tokens / elapsed if num_tokens else None
        self._record(global_step, asdict(window) | {
            "learning_rate": learning_rate,
            "tokens_per_second": tokens_per_second,
        })
        share = seconds[VALIDATION] / sum(seconds.values())
        said = f"{tokens_per_second or 0:,.0f} tok/s | validating {share:.0%}"
        seconds_left = self._seconds_left(global_step, seconds)
        if self.clock.usd_per_hour is not None:
            usd = sum(self.clock.usd().values())
            at_end = usd + seconds_left / 3600 * self.clock.usd_per_hour
            said += f" | ${usd:,.2f} of ${at_end:,.2f}"
        self._bar.set_postfix_str(f"loss {window.train_loss:.4f} | {said}")
        plain = self._bar.disable or not sys.stdout.isatty()  # a file gets no bar
        if plain and time.monotonic() - self._last_plain_line >= PLAIN_LINE_SECONDS:
            self._last_plain_line = time.monotonic()
            self.say(self._plain_line(global_step, learning_rate, window) + said
                     + f" | {_duration(seconds_left)} left")

    def report_validation(self, global_step: int, loss: float, seconds: float) -> None:
        """Record and show one validation."""
        if not self.is_active:
            return
        self._record(global_step, {"validation_loss": loss, "validation_seconds": seconds})
        self.say(f"step {global_step + 1:,}/{self.plan.num_steps:,} | validation loss {loss:.4f}"
                 f" | {seconds:.1f} s")

    def validation_bar(self, batches: Iterable[Any], total: int) -> Iterable[Any]:
        """Show a second bar while validating."""
        return tqdm(batches, total=total, unit="batch", desc="validating", leave=False,
                    disable=None if self.is_active else True, dynamic_ncols=True)

    def finish(self, end: RunEnd) -> None:
        """Write `summary.json` and print what it says."""
        self._bar.close()
        summary = _summarise(self.run, self.plan, self.clock, end)
        write_aside(self.run.summary_path, to_json(summary, indent=2) + "\n")
        for line in _summary_lines(summary, self.run):
            self.say(line)

    def _record(self, global_step: int, values: dict[str, float]) -> None:
        record = {
            "global_step": global_step,
            "tokens": (global_step + 1) * self.plan.tokens_per_step,
            "seconds": round(sum(self.clock.read().values()), 3),
        } | values
        if usd := self.clock.usd():
            record["usd"] = round(sum(usd.values()), 6)
        with self.run.metrics_path.open("a") as file:
            file.write(to_json(record) + "\n")

    def _plain_line(self, global_step: int, learning_rate: float, window: WindowSummary) -> str:
        return (f"step {global_step + 1:,}/{self.plan.num_steps:,} | loss {window.train_loss:.4f}"
                f" | grad norm {window.grad_norm:.2f} | lr {learning_rate:.2e} | ")

    def _seconds_left(self, global_step: int, seconds: dict[str, float]) -> float:
        steps_left = self.plan.num_steps - 1 - global_step
        recurring = sum(seconds.values()) - sum(seconds[phase] for phase in ONCE_A_START)
        return steps_left * recurring / (global_step + 1)


def batch_arithmetic(plan: BatchPlan) -> list[str]:
    """Say how a global batch comes about and what the run amounts to."""
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    return [
        f"microbatch {plan.microbatch_size} x accumulation {plan.gradient_accumulation_steps}"
        f" x {processes} = global batch {plan.global_batch_size} sequences"
        f" x {plan.context_length:,} tokens = {plan.tokens_per_step:,} tokens a step",
        f"{plan.num_steps:,} steps = {plan.num_tokens:,} tokens",
    ]


def _summarise(run: Run, plan: BatchPlan, clock: PhaseClock, end: RunEnd) -> dict[str, Any]:
    """Gather what `summary.json` says."""
    records = read_metrics(run.metrics_path)
    tokens = (end.global_step + 1) * plan.tokens_per_step
    is_finished = end.global_step == plan.num_steps - 1
    seconds, usd = clock.read(), clock.usd()
    return {
        "run": run.name,
        "status": "finished" if is_finished else "stopped",
        "reason": None if is_finished else end.stop_reason,
        "global_step": end.global_step,
        "num_steps": plan.num_steps,
        "tokens": tokens,
        "num_parameters": end.num_parameters,
        "train_loss": _last(records, "train_loss"),
        "validation_loss": _last(records, "validation_loss"),
        "best": end.best,
        "checkpoints": end.checkpoints,
        "seconds": seconds,
        "usd": usd | {"total": sum(usd.values())} if usd else None,
        "tokens_per_second": tokens / (_step_seconds(seconds) + seconds[COMPILE]),
        "tokens_per_second_overall": tokens / sum(seconds.values()),
        "machine": end.machine,
        "batch": asdict(plan),
        "model": run.model.model_dump(),
        "train": run.train.model_dump(),
    }


def _summary_lines(summary: dict[str, Any], run: Run) -> list[str]:
    """Word a summary for a person."""
    best, saved = summary["best"], summary["checkpoints"]
    losses = f"training loss {_loss(summary['train_loss'])}"
    if summary["validation_loss"] is not None:
        losses += f", validation loss {_loss(summary['validation_loss'])}"
    because = f" ({summary['reason']})" if summary["reason"] else ""
    return [
        f"{run.name} {summary['status']} at step {summary['global_step'] + 1:,} of"
        f" {summary['num_steps']:,}{because}: {losses} (nats a token)",
        _split("time", summary["seconds"], _duration),
        *([_split("cost", summary["usd"], "${:,.2f}".format)] if summary["usd"] else []),
        f"{summary['tokens']:,} tokens: {summary['tokens_per_second']:,.0f} a second while"
        f" training, {summary['tokens_per_second_overall']:,.0f} with everything else",
        f"checkpoints: {saved['saved']} in this start; training stood still for"
        f" {saved['stalled_seconds']:.2f} s, while the longest was being written for"
        f" {saved['longest_write_seconds']:.2f} s",
        f"best checkpoint: {run.checkpoints_dir / best['checkpoint']}"
        f" (step {best['global_step'] + 1:,}, loss {_loss(best['loss'])})",
    ]


def _split(name: str, spent: dict[str, float], show: Callable[[float], str]) -> str:
    """Word what was spent, in all and by phase."""
    total = sum(spent[phase] for phase in SHOWN_PHASES) + spent[CHART]
    parts = {phase: spent[phase] for phase in SHOWN_PHASES}
    parts[CHECKPOINT] += spent[CHART]
    named = [f"{show(value)} {SHOWN_PHASES[phase]}" for phase, value in parts.items()
             if phase == TRAINING or show(value) != show(0.0)]
    return f"{name}: {show(total)} = {', '.join(named)}"


def _step_seconds(seconds: dict[str, float]) -> float:
    """Give what global steps have taken, with the waiting for data and for other processes."""
    return seconds[TRAINING] + seconds[WAITING]


def _last(records: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if key in record), None)


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
