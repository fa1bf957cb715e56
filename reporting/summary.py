"""`summary.json`: the status of a run, or how it ended, and the same as text."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from basics.cli import RUNS
from basics.errors import BEHIND_REFERENCE, STOP_SIGNALS
from basics.files import write_atomically
from basics.json_files import found_object, to_json
from basics.text import dollars
from reporting.clock import COMPILE, PHASES, TRAINING, PhaseClock
from reporting.estimate import step_seconds
from reporting.metrics_file import LARGEST, is_number, set_keys
from run_config import Run
from tokens.batch_plan import BatchPlan

FINISHED = "finished"
# What stops a launch before that.
MAX_STEPS = "--max-steps"
SIGNAL = "signal"
BUDGET = "budget"
BEHIND = "behind"


@dataclass(frozen=True)
class StopReason:
    """Why a launch ends before the run does."""

    kind: str  # MAX_STEPS, SIGNAL, BUDGET or BEHIND
    text: str  # such as the signal's name


@dataclass(frozen=True)
class RunEnd:
    """The state of a run when a launch ends."""

    global_step: int
    stop_reason: StopReason | None  # unless the run is finished
    lacks_validation: bool  # the last step is taken, but its validation was interrupted
    this_launch: dict[str, Any]  # its steps that were measured
    facts: dict[str, Any]  # what else stands in `summary.json`, as it stands there
    failure: str = ""  # what is wrong with a run whose steps are all taken


def summarise(
    run: Run, plan: BatchPlan, clock: PhaseClock, end: RunEnd, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the contents of `summary.json` at the end of a launch, from all the run's records."""
    tokens = plan.tokens_of(end.global_step + 1)
    is_finished = plan.has_no_step_after(end.global_step) and not end.lacks_validation
    reason = None if is_finished else end.stop_reason
    seconds = clock.read()
    last = {
        key: next((record[key] for record in reversed(records) if key in record), None)
        for key in ("train_loss", "validation_loss", "validation_bits_per_byte")
    }
    last |= last_of_sets(records)
    status = FINISHED if is_finished else "stopped"
    return {
        "run": run.name,
        "status": "failed" if end.failure else status,
        "reason": end.failure or (reason and reason.text),
        "stopped_by": reason and reason.kind,
        "global_step": end.global_step,
        "num_steps": plan.num_steps,
        "tokens": tokens,
        **last,
        "skipped_steps": sum(record.get("skipped_steps") or 0 for record in records),
        **_spent(clock),
        "tokens_per_second": tokens / (step_seconds(seconds) + seconds[COMPILE]),
        "tokens_per_second_overall": tokens / sum(seconds.values()),
        "this_launch": end.this_launch,
        **end.facts,
        "batch": asdict(plan),
        "model": run.model.model_dump(),
        "train": run.train_settings(),
    }


def last_of_sets(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the last validation has of sets with names, by key; none if it has none."""
    for record in reversed(records):
        if "validation_loss" in record:
            keys = ("validation_perplexity", *set_keys(record))
            return {key: record[key] for key in keys if key in record}
    return {}


def _spent(clock: PhaseClock) -> dict[str, Any]:
    seconds, usd = clock.spent()
    return {"seconds": seconds, "usd": usd | {"total": sum(usd.values())} if usd else None}


def write_status(
    run: Run,
    clock: PhaseClock,
    *,
    status: str,
    reason: str | None,
    num_steps: int,
    tokenizer: str | None,
    bytes_per_token: float | None,
) -> None:
    """Write the `summary.json` of a run that has not ended."""
    _write(
        run,
        {
            "run": run.name,
            "status": status,
            "reason": reason,
            "num_steps": num_steps,
            **_spent(clock),
            "tokenizer": tokenizer,
            "bytes_per_token": bytes_per_token,
            "model": run.model.model_dump(),
            "train": run.train_settings(),
        },
    )


def _write(run: Run, summary: dict[str, Any], *, durable: bool = False) -> None:
    with suppress(OSError):  # a full disk ends neither the run nor what follows it
        write_atomically(run.summary_path, to_json(summary, indent=2) + "\n", durable=durable)


def read_summary(run: Run) -> dict[str, Any]:
    """Return a run's `summary.json`; empty if it cannot be read."""
    return found_object(run.summary_path)


def spent_at_end(run: Run, global_step: int) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the seconds and dollars by phase, if the last launch ended in order after this step.

    They contain the time after the last checkpoint, such as that of charts, which the checkpoint
    does not record. Nothing of it is lost: no step is repeated.
    """
    summary = read_summary(run)
    if summary.get("global_step") != global_step:
        return None
    try:
        seconds = {phase: summary["seconds"][phase] for phase in PHASES}
        usd = {phase: summary["usd"][phase] for phase in PHASES if summary["usd"]}
    except (LookupError, TypeError):  # damaged: the checkpoint's record suffices
        return None
    is_whole = all(is_number(value, 0) for value in (*seconds.values(), *usd.values()))
    return (seconds, usd) if is_whole else None


def record_when_done(run: Run, status: int | None) -> None:
    """Add to `summary.json` how the command after the end of a run ended; None before its end.

    The command itself is not recorded: it may hold a token.
    """
    if summary := read_summary(run):  # else it cannot be read now: it stays as it is
        _write(run, summary | {"when_done": {"status": status}}, durable=True)


def final_figures(summary: dict[str, Any]) -> dict[str, float]:
    """Return what trackers show of a complete `summary.json`; empty if the run has not ended."""
    if "global_step" not in summary:  # only a status: it was not the end
        return {}
    figures = summary | {
        "steps": summary["global_step"] + 1,
        "seconds": sum(summary["seconds"].values()),
        "best_loss": (summary["best"] or {}).get("loss"),
        "usd": (summary["usd"] or {}).get("total"),
    }
    return {
        f"final/{key}": float(value)
        for key, value in figures.items()
        if is_number(value, -LARGEST, LARGEST)
    }


def final_status(run: Run, status: int) -> int:
    """Return the exit status of a launch whose processes have ended, and correct its summary.

    `status` is that of the processes. Where it is 0, 128 + n is returned if signal n has stopped
    the run, and `BEHIND_REFERENCE` if its reference has.
    """
    summary = read_summary(run)
    stopped_by = next(
        (128 + number for number, name in STOP_SIGNALS.items() if summary.get("reason") == name), 0
    )
    if summary.get("status") == "stopped" and summary.get("stopped_by") == BEHIND:
        stopped_by = BEHIND_REFERENCE
    if summary.get("status") == "running":  # the processes were killed
        signal_name = STOP_SIGNALS.get(status - 128)  # a second signal: they exited at once
        ended = {"status": "failed", "reason": f"ended with status {status}"}
        if signal_name:
            ended = {"status": "stopped", "reason": signal_name}
        _write(run, summary | ended)
    return status or stopped_by


def summary_lines(summary: dict[str, Any], run: Run) -> list[str]:
    """Return a summary as lines of text."""
    best = summary["best"]
    saved = summary["checkpoints"]
    price = run.config.usd_per_hour
    up = summary["machine"]["up_seconds"]  # also set-up, searches and downloads before the run
    losses = f"training loss {_loss(summary['train_loss'])}"
    if summary["validation_loss"] is not None:
        losses += f", validation loss {_loss(summary['validation_loss'])}"
        losses += f" on {run.config.deciding_set}" if run.config.deciding_set else ""
        for key, (metric, name) in set_keys(summary).items():
            if metric == "validation_loss":
                losses += f", {_loss(summary[key])} on {name}"
    because = f" ({summary['reason']})" if summary["reason"] else ""
    done = summary["global_step"] + 1
    wanted = summary["num_steps"]
    steps = f"step {done:,} of {wanted:,}"
    if done > wanted:
        steps = f"step {done:,}, {wanted:,} were wanted"
    lines = [
        f"{run.name} {summary['status']} at {steps}{because}: {losses} (nats per token)",
        _split("time of all launches", summary["seconds"], duration),
    ]
    if summary["status"] == "stopped":
        first = {
            BUDGET: "raise max_cost_usd or max_hours, then ",
            BEHIND: "raise or remove stop_if_behind, then ",
        }.get(summary["stopped_by"], "")
        steps = ""
        if summary["stopped_by"] == MAX_STEPS:  # the option is of a launch, not of the run
            steps = ", for as many steps, or without --max-steps to the end"
        lines.append(f"to continue: {first}run the same command again{steps}")
    if summary["usd"]:
        lines.append(_split("cost of all launches", summary["usd"], lambda usd: f"${dollars(usd)}"))
    if price:
        lines.append(
            f"machine up {duration(up)}, US${dollars(up / 3600 * price)} for all that it has done;"
            " this run's part of it: lab list"
        )
    if summary["energy_kwh"] is not None:
        lines.append(f"energy: {summary['energy_kwh']:,.3f} kWh, of the GPUs of rank 0's machine")
    if summary["skipped_steps"]:
        lines.append(f"steps skipped because of a non-finite gradient: {summary['skipped_steps']}")
    lines += [
        f"{summary['tokens']:,} tokens: {summary['tokens_per_second']:,.0f} per second while"
        f" training, {summary['tokens_per_second_overall']:,.0f} over all the time",
        f"checkpoints: {saved['saved']} in this launch; they stalled training for"
        f" {saved['stalled_seconds']:.2f} s; the longest write in the background took"
        f" {saved['longest_write_seconds']:.2f} s",
        _best_line(best, run),
    ]
    if any(run.run_dir.glob("*-chart.png")):
        lines.append(f"charts: {run.run_dir}/*-chart.png")
    if best is not None and summary["status"] == FINISHED:
        lines.append(f"next: {lab_command('generate', run)}; {lab_command('evaluate', run)}")
    return lines


def lab_command(verb: str, run: Run) -> str:
    """Return a command of the lab about a run, as it can be typed where the launch was."""
    place = run.run_dir.parent
    return f"uv run lab {verb} {run.name}" + ("" if place == RUNS else f" --runs-dir {place}")


def _best_line(best: dict[str, Any] | None, run: Run) -> str:
    """Return which checkpoint is the best one, and by which loss; the newest if none has a loss."""
    if best is None:
        return "no checkpoint could be written"
    path = run.checkpoints_dir / best["checkpoint"]
    step = f"step {best['global_step'] + 1:,}"
    if best["loss"] is not None:
        kind = "validation" if run.config.validates else "training"
        return f"best checkpoint: {path} ({step}, {kind} loss {best['loss']:.4f})"
    why = "none has a validation loss"
    if not run.config.validates:  # `Trainer.save` compares whole intervals only
        why = "none has the training loss of a whole interval"
    return f"newest checkpoint: {path} ({step}; {why}, so none is the best)"


def _split(name: str, spent: dict[str, float], show: Callable[[float], str]) -> str:
    parts = {TRAINING: spent[TRAINING]} | {phase: spent[phase] for phase in PHASES}
    named = [
        f"{show(value)} {phase}"
        for phase, value in parts.items()
        if phase == TRAINING or show(value) != show(0.0)
    ]
    return f"{name}: {show(sum(parts.values()))} = {', '.join(named)}"


def _loss(loss: float | None) -> str:
    return "not finite or not recorded" if loss is None else f"{loss:.4f}"


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
