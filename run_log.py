"""What a person and a file get to see of a run: bar or plain lines, metrics, summary."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from run_config import BatchPlan, Run
from run_metrics import (
    TRAINING,
    VALIDATION,
    PhaseClock,
    WindowSummary,
    read_metrics,
    remove_metrics_from,
    to_json,
    write_aside,
)

PLAIN_LINE_SECONDS = 10  # between lines where there is no terminal to draw a bar on
@dataclass(frozen=True)
class RunEnd:
    """Where a run stands when a start of it ends."""

    global_step: int
    num_parameters: int
    seconds: dict[str, float]  # by phase, over all starts
    best: dict[str, Any]  # checkpoint, global_step, loss
    machine: dict[str, Any]


class RunLog:
    """The one place that prints and records. On other ranks than 0 it does nothing."""

    def __init__(self, run: Run, plan: BatchPlan, *, clock: PhaseClock, is_active: bool) -> None:
        self.run, self.plan, self.clock = run, plan, clock
        self.is_active = is_active
        self._bar = tqdm(disable=True)
        self._last_plain_line = -math.inf
        self._last_training_seconds = clock.read()[TRAINING]
        self._last_tokens = 0

    def say(self, line: str) -> None:
        """Print one line without tearing the bar."""
        if self.is_active:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def start(self, first_step: int, facts: list[str]) -> None:
        """Print what is about to happen, and start the bar at `first_step`."""
        for line in facts:
            self.say(line)
        self._last_tokens = first_step * self.plan.tokens_per_step
        if self.is_active:
            remove_metrics_from(self.run.metrics_path, first_step)
            self._bar = tqdm(total=self.plan.num_steps, initial=first_step, unit="step",
                             desc=self.run.name, disable=None, dynamic_ncols=True)

    def step(self) -> None:
        self._bar.update()

    def report_steps(self, global_step: int, learning_rate: float, window: WindowSummary) -> None:
        """Record and show the steps up to and with `global_step`."""
        if not self.is_active:
            return
        seconds = self.clock.read()
        tokens = (global_step + 1) * self.plan.tokens_per_step
        elapsed = seconds[TRAINING] - self._last_training_seconds
        tokens_per_second = (tokens - self._last_tokens) / elapsed
        self._last_training_seconds, self._last_tokens = seconds[TRAINING], tokens
        self._record(global_step, asdict(window) | {
            "learning_rate": learning_rate,
            "tokens_per_second": tokens_per_second,
        })
        share = seconds[VALIDATION] / sum(seconds.values())
        speed = f"{tokens_per_second:,.0f} tok/s | validating {share:.0%}"
        self._bar.set_postfix_str(f"loss {window.train_loss:.4f} | {speed}")
        plain = self._bar.disable or not sys.stdout.isatty()  # a file gets no bar
        if plain and time.monotonic() - self._last_plain_line >= PLAIN_LINE_SECONDS:
            self._last_plain_line = time.monotonic()
            self.say(self._plain_line(global_step, learning_rate, window) + speed
                     + f" | {_duration(self._seconds_left(global_step, seconds))} left")

    def report_validation(self, global_step: int, loss: float, seconds: float) -> None:
        """Record and show one validation."""
        self._record(global_step, {"validation_loss": loss, "validation_seconds": seconds})
        self.say(f"step {global_step + 1:,}/{self.plan.num_steps:,} | validation loss {loss:.4f}"
                 f" | {seconds:.1f} s")

    def validation_bar(self, batches: Iterable[Any], total: int) -> Iterable[Any]:
        """Show a second bar while validating. Rank 0."""
        return tqdm(batches, total=total, unit="batch", desc="validating", leave=False,
                    disable=None, dynamic_ncols=True)

    def finish(self, end: RunEnd) -> None:
        """Write `summary.json` and print what it says."""
        self._bar.close()
        summary = _summarise(self.run, self.plan, end)
        write_aside(self.run.summary_path, to_json(summary, indent=2) + "\n")
        for line in _summary_lines(summary, self.run):
            self.say(line)

    def _record(self, global_step: int, values: dict[str, float]) -> None:
        record = {
            "global_step": global_step,
            "tokens": (global_step + 1) * self.plan.tokens_per_step,
            "seconds": round(sum(self.clock.read().values()), 3),
        } | values
        with self.run.metrics_path.open("a") as file:
            file.write(to_json(record) + "\n")

    def _plain_line(self, global_step: int, learning_rate: float, window: WindowSummary) -> str:
        return (f"step {global_step + 1:,}/{self.plan.num_steps:,} | loss {window.train_loss:.4f}"
                f" | grad norm {window.grad_norm:.2f} | lr {learning_rate:.2e} | ")

    def _seconds_left(self, global_step: int, seconds: dict[str, float]) -> float:
        steps_left = self.plan.num_steps - 1 - global_step
        return steps_left * sum(seconds.values()) / (global_step + 1)


def batch_arithmetic(plan: BatchPlan) -> list[str]:
    """Say how a global batch comes about and what the run amounts to."""
    processes = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    return [
        f"microbatch {plan.microbatch_size} x accumulation {plan.gradient_accumulation_steps}"
        f" x {processes} = global batch {plan.global_batch_size} sequences"
        f" x {plan.context_length:,} tokens = {plan.tokens_per_step:,} tokens a step",
        f"{plan.num_steps:,} steps = {plan.num_tokens:,} tokens",
    ]


def _summarise(run: Run, plan: BatchPlan, end: RunEnd) -> dict[str, Any]:
    """Gather what `summary.json` says."""
    records = read_metrics(run.metrics_path)
    tokens = (end.global_step + 1) * plan.tokens_per_step
    return {
        "run": run.name,
        "status": "finished" if end.global_step == plan.num_steps - 1 else "stopped",
        "global_step": end.global_step,
        "num_steps": plan.num_steps,
        "tokens": tokens,
        "num_parameters": end.num_parameters,
        "train_loss": _last(records, "train_loss"),
        "validation_loss": _last(records, "validation_loss"),
        "best": end.best,
        "seconds": end.seconds,
        "tokens_per_second": tokens / end.seconds[TRAINING],
        "tokens_per_second_overall": tokens / sum(end.seconds.values()),
        "machine": end.machine,
        "batch": asdict(plan),
        "model": run.model.model_dump(),
        "train": run.train.model_dump(),
    }


def _summary_lines(summary: dict[str, Any], run: Run) -> list[str]:
    """Word a summary for a person."""
    seconds, best = summary["seconds"], summary["best"]
    waiting = sum(seconds.values()) - seconds[TRAINING] - seconds[VALIDATION]
    losses = f"training loss {_loss(summary['train_loss'])}"
    if summary["validation_loss"] is not None:
        losses += f", validation loss {_loss(summary['validation_loss'])}"
    return [
        f"{run.name} {summary['status']} at step {summary['global_step'] + 1:,} of"
        f" {summary['num_steps']:,}: {losses} (nats a token)",
        f"{_duration(seconds[TRAINING])} training, {_duration(seconds[VALIDATION])} validation,"
        f" {_duration(waiting)} checkpoints and charts",
        f"{summary['tokens']:,} tokens: {summary['tokens_per_second']:,.0f} a second while"
        f" training, {summary['tokens_per_second_overall']:,.0f} with everything else",
        f"best checkpoint: {run.checkpoints_dir / best['checkpoint']}"
        f" (step {best['global_step'] + 1:,}, loss {_loss(best['loss'])})",
    ]


def _last(records: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if key in record), None)


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
