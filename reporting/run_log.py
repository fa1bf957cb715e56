"""The log of a run: what its terminal shows, `metrics.jsonl`, `summary.json`."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from basics.errors import why_not_written
from basics.failpoints import failpoint
from basics.files import append_whole, write_atomically
from basics.json_files import to_json
from basics.text import counted, dollars
from reporting.clock import VALIDATION, PhaseClock
from reporting.estimate import Pace
from reporting.loss_window import Window
from reporting.metrics_file import (
    INITIAL_LOSS,
    LARGEST,
    NUM_LAYERS,
    read_metrics,
    read_samples,
    set_key,
)
from reporting.summary import RunEnd, duration, summarise, summary_lines, write_status
from reporting.terminal import Shown, Terminal
from run_config import ModelConfig, Run
from tokens.batch_plan import BatchPlan

PLAIN_LINE_SECONDS = 10  # between lines if there is no terminal for a panel


class SetResult(NamedTuple):
    """The result of one validation set, in nats per token."""

    name: str  # "" for the dataset's own validation file, if `validation` names no sets
    loss: float
    bytes_per_token: float | None = None  # the mean; None if it is not known

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is more than a record may have, or the loss is NaN."""
        return math.exp(self.loss) if self.loss < math.log(LARGEST) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        if self.bytes_per_token is None:
            return None
        return self.loss / math.log(2) / self.bytes_per_token

    @property
    def text(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"{self.name} (perplexity {self.perplexity:,.2f}{bits})"


@dataclass
class Report:
    """A record of `metrics.jsonl` and its line in the making, of training or of a validation."""

    global_step: int
    tokens: int  # that the run has trained on by then
    loss: float  # nats per token, finite or not; of a validation, of the set that decides `best`
    values: dict[str, Any]  # of the record
    window: Window | None = None  # the steps of a report of training
    compared: str = ""  # the loss with that of the reference
    warnings: list[str] = field(default_factory=list)


class RunLog:
    """Prints and records the progress of a run. On ranks other than 0 it does nothing."""

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        tokenizer: str | None,
        bytes_per_token: float | None,
        *,
        clock: PhaseClock,
        pace: Pace,
        is_active: bool,
    ) -> None:
        self.run = run
        self.plan = plan
        self.tokenizer = tokenizer
        self.bytes_per_token = bytes_per_token  # of the dataset's text
        self.clock = clock
        self.is_active = is_active
        self._pace = pace
        self._terminal = Terminal(Shown(run.name, num_steps=plan.num_steps))
        self._last_plain_line = -math.inf
        self._unwritten = ""  # records that a full disk refused

    def say(self, line: str) -> None:
        if self.is_active:
            self._terminal.say(line)

    def warn(self, what: str, failure: str) -> None:
        if failure:
            self.say(f"warning: {what}: {failure}")

    def start(self, first_step: int) -> None:
        """Say in `summary.json` that the run trains, and show it from `first_step` on."""
        if self.is_active:
            self.write_status("running", None)
            self._terminal.shown.global_step = first_step - 1
            self._terminal.shown.usd_per_hour = self.clock.usd_per_hour
            self._terminal.start(self.run.metrics_path, self.run.samples_path)

    def report_layers(self, global_step: int, before: ModelConfig, after: ModelConfig) -> None:
        """Say and record that the model has more layers from this step on."""
        self.say(
            f"step {global_step + 1:,}/{self.plan.num_steps:,} | from here on {after.n_layers}"
            f" layers, {after.num_parameters:,} parameters; until now"
            f" {counted(before.n_layers, 'layer')}, {before.num_parameters:,}"
        )
        self.record(global_step, {NUM_LAYERS: after.n_layers})

    def write_status(self, status: str, reason: str | None) -> None:
        write_status(
            self.run,
            self.clock,
            status=status,
            reason=reason,
            num_steps=self.plan.num_steps,
            tokenizer=self.tokenizer,
            bytes_per_token=self.bytes_per_token,
        )

    def show(self, global_step: int, share: float | None = None, *, is_last: bool = False) -> None:
        """Show that a step is taken, or which share of what takes long, such as a validation.

        After `is_last` the panel is drawn at the end alone: see `Terminal.leave`.
        """
        if is_last:
            self._terminal.leave()
        elif self.is_active:
            self._terminal.shown.global_step = global_step
            done = "" if share is None else f", {share:.0%}"
            self._terminal.draw(f"running in {self.clock.current}{done}")

    def report_steps(self, report: Report) -> None:
        """Record and show the steps of a window, as of when it was closed. Rank 0."""
        window, global_step = report.window, report.global_step
        assert window is not None
        spent, usd = window.seconds, sum(window.usd.values())
        seconds_left = self._pace.seconds_after_report(global_step, spent)
        left = self._left(seconds_left, usd)
        self.record(global_step, report.values | left, window.spent)
        loss = f"loss {report.loss:.4f}{self._compared(report)} | "
        said = (
            f"{loss if 'train_loss' in report.values else ''}"
            f"grad norm {window.numbers['grad_norm']:.2f}"
            f" | lr {window.learning_rate:.2e}"
            f" | {report.values['tokens_per_second'] or 0:,.0f} tok/s"
            f" | {spent[VALIDATION] / sum(spent.values()):.0%} in validation"
        )
        if self.clock.usd_per_hour is not None:
            said += f" | ${dollars(usd)}"
        if "usd_at_end" in left:
            said += f" of ${dollars(left['usd_at_end'])}"
        is_due = time.monotonic() - self._last_plain_line >= PLAIN_LINE_SECONDS
        if is_due and not self._terminal.has_panel:  # a log file gets lines
            self._last_plain_line = time.monotonic()
            if seconds_left is not None:
                said += f" | {duration(seconds_left)} left"
            self.say(f"step {global_step + 1:,}/{self.plan.num_steps:,} | {said}")
        for warning in report.warnings:
            self.say(f"warning: {warning}")

    def report_validation(
        self, report: Report, results: Sequence[SetResult], seconds: float
    ) -> None:
        """Record and show one validation, of all sets; the first one decides `best`. Rank 0."""
        global_step = report.global_step
        first, *others = results
        record = {"validation_loss": first.loss, "validation_seconds": seconds}
        if first.name:
            record["validation_perplexity"] = first.perplexity
        if first.bits_per_byte is not None:
            record["validation_bits_per_byte"] = first.bits_per_byte
        spent = self.clock.spent()
        seconds_left = self._pace.seconds_after_validation(global_step)
        record |= report.values | self._left(seconds_left, sum(spent[1].values()))
        for result in others:
            record[set_key("validation_loss", result.name)] = result.loss
            record[set_key("validation_perplexity", result.name)] = result.perplexity
            if result.bits_per_byte is not None:
                record[set_key("validation_bits_per_byte", result.name)] = result.bits_per_byte
        self.record(global_step, record, spent)
        self._terminal.shown.samples = read_samples(self.run.samples_path)
        said = f"validation loss {first.loss:.4f}"
        if first.name:
            said += f" on {first.text}"
        said += self._compared(report)
        for result in others:
            said += f", {result.loss:.4f} on {result.text}"
        self.say(f"step {global_step + 1:,}/{self.plan.num_steps:,} | {said} | {seconds:.1f} s")
        for warning in report.warnings:
            self.say(f"warning: {warning}")

    def report_initial_validation(self, results: Sequence[SetResult], seconds: float) -> None:
        """Record and show the validation before the first step. No checkpoint has its loss."""
        self._pace.add_validation()
        self.record(0, {"tokens": 0, INITIAL_LOSS: results[0].loss, "validation_seconds": seconds})
        said = ", ".join(
            f"{result.loss:.4f} on {result.text}" if result.name else f"{result.loss:.4f}"
            for result in results
        )
        self.say(f"step 0/{self.plan.num_steps:,} | validation loss {said} | {seconds:.1f} s")

    def _left(self, seconds_left: float | None, usd: float) -> dict[str, float]:
        """Return what a record has of the time and the dollars to come, as far as it is known."""
        if seconds_left is None:
            return {}
        left = {"seconds_left": round(seconds_left, 3)}
        if self.clock.usd_per_hour is not None:
            left["usd_at_end"] = round(usd + seconds_left / 3600 * self.clock.usd_per_hour, 6)
        return left

    def _compared(self, report: Report) -> str:
        """Return the text of a report's comparison with the reference; the panel keeps the last."""
        self._terminal.shown.compared = report.compared or self._terminal.shown.compared
        return f" ({report.compared})" if report.compared else ""

    def record(
        self,
        global_step: int,
        values: dict[str, Any],
        spent: tuple[dict[str, float], dict[str, float]] | None = None,
    ) -> None:
        """Add a record to `metrics.jsonl`.

        Args:
            spent: seconds and dollars of all launches by phase; None: those of now.
        """
        if not self.is_active:
            return
        seconds, usd = spent or self.clock.spent()
        was_behind = bool(self._unwritten)
        record = {
            "global_step": global_step,
            "tokens": self.plan.tokens_of(global_step + 1),
            "seconds": round(sum(seconds.values()), 3),
            **values,
        }
        if usd:
            record["usd"] = round(sum(usd.values()), 6)
        self._terminal.add(record)
        self._unwritten += to_json(record) + "\n"
        failure = self._write_records()
        if failure and not was_behind:  # printed once, until a write succeeds
            self.say(
                f"warning: {failure} in {self.run.run_dir}; training continues and tries again"
            )

    def _write_records(self) -> str:
        """Write the records that are not on disk yet; return what failed."""
        try:
            if self._unwritten:
                failpoint("record")
                append_whole(self.run.metrics_path, self._unwritten)
        except OSError as error:
            return f"metrics.jsonl could not be written ({why_not_written(error)})"
        self._unwritten = ""
        return ""

    def finish(self, end: RunEnd) -> str:
        """Write `summary.json` and print it; return what could not be written, if anything."""
        failure = self._write_records()
        records = read_metrics(self.run.metrics_path)
        records += map(json.loads, self._unwritten.splitlines())  # a full disk refused them
        summary = summarise(self.run, self.plan, self.clock, end, records)
        if not failure:
            try:
                failpoint("summary")
                write_atomically(self.run.summary_path, to_json(summary, indent=2) + "\n")
            except OSError as error:
                failure = f"summary.json could not be written ({why_not_written(error)})"
        shown = self._terminal.shown
        shown.seconds, shown.usd = sum(summary["seconds"].values()), sum(self.clock.usd().values())
        shown.seconds_left = shown.usd_at_end = None
        because = f" ({summary['reason']})" if summary["reason"] else ""
        self._terminal.close(f"{summary['status']}{because}")
        for line in summary_lines(summary, self.run):
            self.say(line)
        return failure


def batch_arithmetic(plan: BatchPlan) -> list[str]:
    """Return the sizes of a global batch and of the whole run as text."""
    steps = f"{plan.num_steps:,} steps = {plan.num_tokens:,} tokens"
    if plan.epoch_tokens:
        epochs = plan.num_tokens / plan.epoch_tokens
        steps += f", {epochs:.2f} times the dataset's {plan.epoch_tokens:,}"
    return [
        f"microbatch {plan.microbatch_size} x accumulation {plan.gradient_accumulation_steps} x"
        f" {counted(plan.world_size, 'process', 'processes')} = global batch"
        f" {plan.global_batch_size} sequences x {plan.context_length:,} tokens ="
        f" {plan.tokens_per_step:,} tokens per step",
        steps,
    ]
