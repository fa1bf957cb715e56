"""How a run stands, or has ended: `summary.json`, and what a person reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from basics.errors import STOP_SIGNALS
from basics.files import read_plain, write_aside
from basics.json_files import to_json
from reporting.clock import (
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
from reporting.metrics_file import read_metrics
from run_config import Run
from tokens.batch_plan import BatchPlan

SHOWN_PHASES = {
    TRAINING: "training", WAITING: "waiting", VALIDATION: "validation",
    CHECKPOINT: "checkpoints and charts", COMPILE: "compiling and first steps",
    DOWNLOAD: "download", STARTUP: "start-up", LOST: "lost between starts",
}
FINISHED = "finished"


@dataclass(frozen=True)
class RunEnd:
    """Where a run stands when a start of it ends."""

    global_step: int
    stop_reason: str | None  # where the run is not finished
    owes_validation: bool  # then it is not, though all its steps are taken
    num_parameters: int
    best: dict[str, Any] | None  # checkpoint, global_step, loss
    checkpoints: dict[str, float]  # of this start: saved, longest_write_seconds
    machine: dict[str, Any]


def summarise(run: Run, plan: BatchPlan, clock: PhaseClock, end: RunEnd) -> dict[str, Any]:
    """Gather what `summary.json` says."""
    records = read_metrics(run.metrics_path)
    tokens = (end.global_step + 1) * plan.tokens_per_step
    is_finished = end.global_step == plan.num_steps - 1 and not end.owes_validation
    seconds, usd = clock.read(), clock.usd()
    return {
        "run": run.name,
        "status": FINISHED if is_finished else "stopped",
        "reason": None if is_finished else end.stop_reason,
        "global_step": end.global_step,
        "num_steps": plan.num_steps,
        "tokens": tokens,
        "num_parameters": end.num_parameters,
        "train_loss": _last(records, "train_loss"),
        "validation_loss": _last(records, "validation_loss"),
        "skipped_steps": sum(record.get("skipped_steps", 0) for record in records),
        "best": end.best,
        "checkpoints": end.checkpoints
        | {"stalled_seconds": clock.read_this_start()[CHECKPOINT]},
        **_spent(seconds, usd),
        "tokens_per_second": tokens / (step_seconds(seconds) + seconds[COMPILE]),
        "tokens_per_second_overall": tokens / sum(seconds.values()),
        "machine": end.machine,
        "batch": asdict(plan),
        "model": run.model.model_dump(),
        "train": run.train.model_dump(),
    }


def is_marked(run: Run, status: str) -> bool:
    """Tell if `summary.json` is there and says that a run stands like this."""
    try:
        return json.loads(read_plain(run.summary_path))["status"] == status
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def mark_run(run: Run, status: str, reason: str | None, *, seconds: dict[str, float],
             usd: dict[str, float]) -> None:
    """Write a `summary.json` that says how a run stands, and what it has spent."""
    state = {"run": run.name, "status": status, "reason": reason, **_spent(seconds, usd)}
    with suppress(OSError):
        write_aside(run.summary_path, to_json(state, indent=2) + "\n")


def _spent(seconds: dict[str, float], usd: dict[str, float]) -> dict[str, Any]:
    return {"seconds": seconds, "usd": usd | {"total": sum(usd.values())} if usd else None}


def settle(run: Run, status: int) -> int:
    """Give the exit status of a start whose processes have ended, and let its summary know.

    Args:
        status: torchrun's; 0 is also that of a run that a signal to one process has stopped.
    """
    try:
        summary = json.loads(read_plain(run.summary_path))
        stopped_by = next((128 + number for number, name in STOP_SIGNALS.items()
                           if summary["reason"] == name), 0)
        if summary["status"] == "running":  # nobody was left to say more
            signal_name = STOP_SIGNALS.get(status - 128)  # a second one: it left at once
            summary |= {"status": "stopped", "reason": signal_name} if signal_name else {
                "status": "failed", "reason": f"ended with status {status}"}
            with suppress(OSError):
                write_aside(run.summary_path, to_json(summary, indent=2) + "\n")
        return status or stopped_by
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return status


def summary_lines(summary: dict[str, Any], run: Run) -> list[str]:
    """Word a summary for a person."""
    best, saved = summary["best"], summary["checkpoints"]
    losses = f"training loss {_loss(summary['train_loss'])}"
    if summary["validation_loss"] is not None:
        losses += f", validation loss {_loss(summary['validation_loss'])}"
    because = f" ({summary['reason']})" if summary["reason"] else ""
    return [
        f"{run.name} {summary['status']} at step {summary['global_step'] + 1:,} of"
        f" {summary['num_steps']:,}{because}: {losses} (nats a token)",
        _split("time", summary["seconds"], duration),
        *([_split("cost", summary["usd"], "${:,.2f}".format)] if summary["usd"] else []),
        f"{summary['tokens']:,} tokens: {summary['tokens_per_second']:,.0f} a second while"
        f" training, {summary['tokens_per_second_overall']:,.0f} with everything else",
        f"checkpoints: {saved['saved']} in this start; training stood still for"
        f" {saved['stalled_seconds']:.2f} s, while the longest was being written for"
        f" {saved['longest_write_seconds']:.2f} s",
        *([f"steps skipped, their gradient was not finite: {summary['skipped_steps']}"]
          if summary["skipped_steps"] else []),
        f"best checkpoint: {run.checkpoints_dir / best['checkpoint']}"
        f" (step {best['global_step'] + 1:,}, loss {_loss(best['loss'])})"
        if best else "no checkpoint could be written",
    ]


def _split(name: str, spent: dict[str, float], show: Callable[[float], str]) -> str:
    """Word what was spent, in all and by phase."""
    total = sum(spent[phase] for phase in SHOWN_PHASES) + spent[CHART]
    parts = {phase: spent[phase] for phase in SHOWN_PHASES}
    parts[CHECKPOINT] += spent[CHART]
    named = [f"{show(value)} {SHOWN_PHASES[phase]}" for phase, value in parts.items()
             if phase == TRAINING or show(value) != show(0.0)]
    return f"{name}: {show(total)} = {', '.join(named)}"


def step_seconds(seconds: dict[str, float]) -> float:
    """Give what global steps have taken, with the waiting for data and for other processes."""
    return seconds[TRAINING] + seconds[WAITING]


def _last(records: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if key in record), None)


def _loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
