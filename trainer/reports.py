"""What a training run says and records: its start, losses, speed, samples, warnings, its end."""

import gc
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from basics.errors import DISK_FULL, NON_FINITE, UserError, describe
from basics.machine import code_version, machine_up_seconds
from checkpointing import best_of, list_checkpoints
from gpt import GPTModel
from optim import decay_line, rates_line
from processes.distributed import device_name, gpu_uuids, machine_facts
from processes.startup_agreement import AgreedError
from processes.watchdog import Watchdog
from reporting.clock import CHECKPOINT, COMPILE, TRAINING, VALIDATION, WAITING, PhaseClock
from reporting.loss_window import LossWindow, Window
from reporting.machine_meter import MachineMeter
from reporting.metrics_file import CHANGED
from reporting.run_log import RunLog, batch_arithmetic
from reporting.sampling import Sampler
from reporting.setting_changes import change_lines
from reporting.speed import SPEED_CHECK_STEPS, Speed, find_gpu, flops_per_token
from reporting.summary import RunEnd, StopReason
from trainer.background_saver import BackgroundSaver
from trainer.diagnostics import Diagnostics
from trainer.precision import attention_kernel, autocast
from trainer.side_processes import SideProcesses, command_failed
from trainer.startup import PreparedRun


class Reports:
    """Prints and records a run as it trains. Only rank 0 does; `write` is a collective.

    `window` takes the loss of each step, and gives it to `log` at a report.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        model: GPTModel,
        *,
        clock: PhaseClock,
        watchdog: Watchdog,
        saver: BackgroundSaver,
    ) -> None:
        self.prepared, self.run, self.plan = prepared, prepared.run, prepared.plan
        self.model, self.config = model, prepared.config
        self.clock, self.watchdog, self.saver = clock, watchdog, saver
        self.process, is_main = watchdog.process, watchdog.process.is_main
        self.log = RunLog(
            self.run, self.plan, prepared.data.tokenizer_name, clock=clock, is_active=is_main
        )
        self.window = LossWindow(self.process.device)
        self.diagnostics = Diagnostics(
            self.config.diagnostics_interval if is_main else None, self.config.precision
        )
        self.meter = MachineMeter(self.run.run_dir, gpu_uuids(self.process) if is_main else [])
        self._gpu = find_gpu(device_name(self.process))
        self._kernel = attention_kernel(model, self.config, self.process.device)
        self._sampler = Sampler(
            model,
            prepared.data.tokenizer_name,
            heartbeat=watchdog.heartbeat,
            tokenizer_path=prepared.data.tokenizer_path,
        )
        self.beside = SideProcesses(prepared, log=self.log, clock=clock, watchdog=watchdog)
        saver.after_write = self.beside.after_checkpoint.start
        watchdog.before_exit = self._before_exit
        self._reports_speed = True
        self._has_ended = False  # the full summary is on disk
        self.code = code_version() if is_main else ""

    def begin(self, aside_dir: Path | None) -> None:
        """Print the settings, and where earlier checkpoints are now; start what runs beside."""
        resume_from, say = self.prepared.resume_from, self.log.say
        self.log.start(self.prepared.first_step)
        if aside_dir is not None:
            say(f"earlier checkpoints that the run does not go on from are now in {aside_dir}")
            self.beside.after_checkpoint.start()  # the copy learns of it before it has more
        if resume_from is not None:
            say(f"resuming from {resume_from.path}")
            for line in change_lines(self.prepared.changes, self.prepared.first_step):
                say(line)
            if self.prepared.changes and not self.prepared.is_trained:  # else no step uses them
                self.log.record(self.prepared.first_step - 1, {CHANGED: self.prepared.changes})
        num_parameters = self.model.num_parameters()
        for warning in self.prepared.warnings:
            say(f"warning: {warning}")
        for line in batch_arithmetic(self.plan):
            say(line)
        say(
            f"{num_parameters:,} parameters, {self.plan.num_tokens / num_parameters:.1f} tokens per"
            f" parameter; {self.config.precision} on {self.process.device.type}; attention:"
            f" {self._kernel}"
        )
        say(f"learning rates: {rates_line(self.run.model, self.config)}")
        if line := decay_line(self.model, self.config):
            say(line)
        if self.process.is_main:
            self.meter.start(self.prepared.energy_kwh)
            self.beside.track()
        self.clock.enter(COMPILE)  # until the end of the first step

    def after_first_step(self, loss: Tensor) -> None:
        """Start to measure speed and to detect hangs: all is compiled and allocated. Every rank."""
        loss.item()  # waits for the device
        gc.collect()
        gc.freeze()  # exempt start-up objects from garbage collection; scanning them stalls steps
        self.clock.enter(TRAINING)
        self.window.restart_timing()
        self.watchdog.start_hang_detection()

    def write(self, global_step: int, learning_rate: float, *, waits: bool) -> None:
        """Report the steps since the last report. A collective: every rank.

        With `waits` also those that the device may not have finished yet.
        """
        num_measured = global_step - self.prepared.first_step  # all but the first one
        says_speed = self._reports_speed and num_measured + 1 >= SPEED_CHECK_STEPS
        for window in self.window.close(
            global_step, learning_rate, self.clock, waits=waits or says_speed
        ):
            for measured in self.diagnostics.pop_measured(up_to=window.global_step):
                self.log.record(measured.global_step, measured.numbers, window)
                self.clock.count_diagnostics(measured.seconds)
            self.log.report_steps(window, self._machine(window))
            if self.window.longest_skipped >= self.config.max_skipped_steps:
                self._end_skipping(window.global_step)
        gc.collect()  # it is not automatic; activation checkpointing leaves cycles, as saving does
        self.warn_of_failed_write()
        self.beside.warn()
        if says_speed:
            self._reports_speed = False
            if self.process.is_main:
                self._say_speed(num_measured)

    def _machine(self, window: Window) -> dict[str, Any]:
        """Return what the record of a window has of the machine: a new reading, and the MFU."""
        self.log.warn("a reading of the machine failed", self.meter.pop_failure())
        speed, reading = window.steps_per_second, self.meter.pop_reading()
        if self._gpu is None or speed is None:
            return reading
        flops = speed * self.plan.tokens_per_step * flops_per_token(self.run.model)
        return reading | {"mfu": self._gpu.mfu(flops / self.process.world_size)}

    def _end_skipping(self, global_step: int) -> NoReturn:
        """End a run whose gradients stay non-finite. Raises: AgreedError: on every rank."""
        reason = (
            f"{self.run.run_dir}: the gradients of {self.window.longest_skipped} steps in a"
            f" row, up to step {global_step + 1:,}, were not finite; resume from an earlier"
            " checkpoint with a lower learning_rate, or with precision bf16 or fp32"
            + (', or with attention "flash"' if self._kernel == "cudnn" else "")
        )
        self.watchdog.before_exit("failed", reason)
        raise AgreedError(reason, status=NON_FINITE)

    def warn_of_failed_write(self) -> None:
        if failure := self.saver.pop_failure():
            self.log.say(
                f"warning: {failure} in {self.run.checkpoints_dir}: each later"
                " checkpoint tries again"
            )

    def _say_speed(self, num_steps: int) -> None:
        """Print the speed of this launch's last `num_steps`, and what may explain it."""
        spent = self.clock.read_this_launch()
        seconds = spent[TRAINING] + spent[WAITING]
        self.log.say(
            Speed(
                tokens_per_second=num_steps * self.plan.tokens_per_step / seconds,
                num_processes=self.process.world_size,
                flops_per_token=flops_per_token(self.run.model),
                device_name=device_name(self.process),
                precision=self.config.precision,
                attention_kernel=self._kernel,
                is_compiled=self.config.compile,
                waiting_share=spent[WAITING] / seconds,
                microbatch_tokens=self.plan.tokens_per_microbatch,
                throttling=self.meter.throttling(),
                drop_rate=self.run.model.drop_rate,
            ).line()
        )

    def report_validation(self, global_step: int, loss: float, seconds: float) -> None:
        """Record a validation, and continue the run's `sample_prompts` with the model. Rank 0."""
        self.log.report_validation(
            global_step, loss, seconds, bytes_per_token=self.prepared.data.bytes_per_token
        )
        if prompts := self.config.sample_prompts:
            with self.clock.phase(VALIDATION), autocast(self.config.precision, self.process.device):
                failure = self._sampler.try_to_write(self.run.samples_path, prompts, global_step)
            self.log.warn("no samples", failure)

    def draw_charts(self) -> None:
        """Start to draw the run's charts, the last thing before training goes on. Rank 0."""
        self.beside.draw_charts()
        self.beside.warn()
        self.window.restart_timing()

    def end(
        self, global_step: int, *, stop_reason: StopReason | None, lacks_validation: bool
    ) -> None:
        """Write and print the summary, and wait for the processes beside training. Rank 0.

        That may take 15 minutes, so it is called when the process group is gone, in which the other
        ranks would wait for this one, and after the last write of a checkpoint.

        Raises: UserError: the last validation loss is not finite; the last checkpoint or the
            records could not be written, or the last --after-checkpoint failed.
        """
        if not self.watchdog.stop_signal:
            self.beside.finish_charts()
        best = best_of(list_checkpoints(self.run.checkpoints_dir))
        self.meter.stop()
        last = self.saver.validation if self.plan.is_trained_after(global_step) else None
        failure = "the last validation loss is not finite" if last and last.loss is None else ""
        unwritten = self.log.finish(
            RunEnd(
                first_step=self.prepared.first_step,
                global_step=global_step,
                failure=failure,
                stop_reason=stop_reason,
                lacks_validation=lacks_validation,
                facts={
                    "num_parameters": self.model.num_parameters(),
                    "tokenizer": self.prepared.data.tokenizer_name,
                    "best": best
                    and {
                        "checkpoint": best.name,
                        "global_step": best.meta.global_step,
                        "loss": best.loss,
                    },
                    "checkpoints": {
                        "saved": self.saver.num_checkpoints,
                        "longest_write_seconds": self.saver.longest_write_seconds,
                        "stalled_seconds": self.clock.read_this_launch()[CHECKPOINT],
                    },
                    "energy_kwh": self.meter.energy_kwh,
                    "machine": machine_facts(self.process, self.config.precision)
                    | {
                        "compiled": self.config.compile,
                        "attention": self._kernel,
                        "deterministic": self.config.deterministic,
                        "up_seconds": machine_up_seconds(),
                        "head_chunk_tokens": self.model.options.head_chunk_tokens,
                    },
                    "code": self.code,
                },
            )
        )
        self._has_ended = not (unwritten or self.saver.is_behind)
        command_failure = self.beside.finish()
        if self.saver.is_behind:
            unwritten = self.saver.pop_failure()
        if unwritten:
            raise UserError(
                f"{unwritten} in {self.run.run_dir}; then run the same command again:"
                " it resumes from the last whole one",
                DISK_FULL,
            )
        self.warn_of_failed_write()
        if failure:
            raise UserError(
                f"{failure}; resume from an earlier checkpoint with a lower learning_rate",
                NON_FINITE,
            )
        if not self.watchdog.stop_signal:  # the notice of a preemption may be 30 s long
            self._print_sample()
        if command_failure:
            raise command_failed("--after-checkpoint", command_failure)

    def _before_exit(self, status: str, reason: str) -> None:
        """Finish a checkpoint that is being written, and record why the run ends. Any thread."""
        if self.process.is_main and not self._has_ended:
            self.saver.wait(timeout=self.watchdog.deadlines.last_write)
            self.log.write_status(status, reason)

    def _print_sample(self) -> None:
        """Print a sample of the model's text, of the first prompt; a failure is only a warning."""
        prompts = self.config.sample_prompts
        if self.prepared.data.tokenizer_name is None or prompts == ():
            return
        prompt = prompts[0] if prompts else ""
        try:
            with autocast(self.config.precision, self.process.device):
                self.log.say(f"sample:\n{prompt}{self._sampler.text(prompt)}")
        except Exception as error:
            self.log.say(f"warning: no sample: {describe(error)}")
