"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. It can start torchrun itself.

Each process runs `worker_main`; `Trainer.train` is the loop, `TrainingStep.take` one global step.
"""

if __name__ == "__main__":  # --help, a mistyped option and a locked run need no torch
    from basics.entry_points import begin_command

    begin_command()
    from processes.command_line import check_before_torch

    check_before_torch()

import gc
import math
import os
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from basics.cli import exit_with
from basics.device import free_cache, is_cpu, is_gpu
from basics.entry_points import keep_freed_memory
from basics.errors import DISK_FULL, NON_FINITE, UserError, drop_unwritable_output
from basics.failpoints import failpoint
from basics.json_files import finite_or_none
from basics.machine import code_version
from basics.text import counted
from checkpointing import CheckpointMeta, TrainingState, Validation, best_of, list_checkpoints
from ops.schedule import learning_rate_at
from optim import clip_gradients, decay_line, rates_line, set_rates
from processes.command_line import Options, read_command_line
from processes.distributed import Process, end_torchrun, process_group, spans_nodes, this_process
from processes.startup_agreement import AgreedError, Agreement, leave
from processes.startup_progress import StartupProgress
from processes.watchdog import Watchdog
from reporting.clock import CHECKPOINT, COMPILE, TRAINING, VALIDATION, WAITING, PhaseClock
from reporting.estimate import Pace
from reporting.loss_window import LossWindow
from reporting.machine_time import begin_launch, read_uses, record_launch
from reporting.metrics_file import CHANGED
from reporting.run_log import Report, RunLog, SetResult, batch_arithmetic
from reporting.setting_changes import change_lines, settings_of
from reporting.summary import RunEnd, final_status, lab_command
from run_config import Stage, TrainConfig
from settings.machine import FULL_SOFTMAX_INTERVAL
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, RunData, dropout_seed, read_ahead
from trainer.after_checkpoint import AfterCheckpoint
from trainer.background_saver import BackgroundSaver
from trainer.budget import Budget
from trainer.chart_drawing import ChartDrawing
from trainer.commands import launch_run, run_to_search, search
from trainer.diagnostics import NO_DIAGNOSTICS, Diagnostics
from trainer.growth import grown_state
from trainer.launch import Launch
from trainer.loss_functions import LossFunctions, validate
from trainer.machine_readings import MachineReadings
from trainer.microbatch_trial import TRIAL_VARIABLE, MicrobatchTrial
from trainer.observer import Observer
from trainer.precision import attention_kernel, autocast
from trainer.reference_check import ReferenceCheck
from trainer.samples import Samples
from trainer.speed_check import SpeedCheck
from trainer.startup import (
    OpenedDir,
    PreparedRun,
    build_state,
    decide_for_device,
    open_run_dir,
    prepare_run,
    print_if_finished,
)
from trainer.stopping import Stop
from trainer.tracking import Tracking
from trainer.user_commands import execute_when_done

MAX_SKIPPED_STEPS = 20  # in a row, whose gradients are not finite; then the run ends


def main() -> None:
    clock, agreement = PhaseClock.since_process_start(), Agreement.in_one_process()
    try:
        if "RANK" in os.environ:  # torchrun has started this process
            clock.import_from_parent()
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            leave(worker_main(agreement, clock))
        else:
            leave(launch_run(read_command_line(), clock, agreement))
    except AgreedError as error:
        agreement.exit(error)
    except Exception as error:
        exit_with(error)
    finally:
        drop_unwritable_output()


def worker_main(agreement: Agreement, clock: PhaseClock) -> int:
    """Run one of the processes that torchrun has started; return its exit status. Every rank."""
    options = agreement.do("command line", read_command_line)
    process = agreement.do("process", this_process)
    if TRIAL_VARIABLE in os.environ:
        measure_microbatch(MicrobatchTrial(options, process, agreement))
        return 0
    if options.find_max_microbatch:  # one process starts the trials
        run = agreement.do("search", lambda: run_to_search(options, process.world_size))
        if process.is_main:
            search(run, options, process.world_size)
        return 0
    if is_cpu(process.device):
        keep_freed_memory()
    # If training had begun before torchrun restarted the processes, they resume, even with --fresh.
    options = options.after_restart(agreement.step_before_restart())
    progress = StartupProgress(
        options.run,
        lambda: f"checking {agreement.step}" if clock.current == "startup" else clock.current,
        clock.launch_seconds,
        is_active=process.is_main,
    )
    watchdog = Watchdog(
        process,
        agreement.connect("watchdog"),
        phase=lambda: clock.current,
        seconds=clock.total_seconds,
    )
    # A node may be lost while another one downloads.
    with closing(progress), watchdog.start():
        prepared = prepare_run(options, process, clock, agreement)
        print_if_finished(prepared, process)
        if not prepared.resume.is_finished:
            train_run(prepared, options, watchdog, clock, agreement, progress)
    execute_when_done(
        prepared.run,
        options,
        process,
        was_finished=prepared.resume.is_finished,
        stop_signal=watchdog.stop_signal,
    )
    if not watchdog.stop_signal:
        return 0
    # Only rank 0 exits with the signal's status: torchrun ends all processes as soon as one fails,
    # and rank 0 is the last to end.
    # torchrun itself would return 0 for processes that have ended in order.
    status = final_status(prepared.run, 0) if process.is_main else 0
    if status or spans_nodes():
        end_torchrun(process)
    return status


def train_run(
    prepared: PreparedRun,
    options: Options,
    watchdog: Watchdog,
    clock: PhaseClock,
    agreement: Agreement,
    progress: StartupProgress,
) -> None:
    """Train a run; all of its memory is free afterwards. Every rank."""
    process, data, resume = watchdog.process, prepared.data, prepared.resume
    uses = read_uses(prepared.run.run_dir)  # before the first heartbeat replaces the last one
    watchdog.write_heartbeats(prepared.run.heartbeat_path)
    run, warnings = agreement.do(
        "device", lambda: decide_for_device(prepared.run, data.plan, process.device)
    )
    state = agreement.do("state", lambda: build_state(run, data, resume, options, process))
    watchdog.expect_steps(run.config.hang_timeout_seconds)
    opened = agreement.do(
        "run directory",
        lambda: (
            open_run_dir(run, data, resume, prepared.reference, options, clock)
            if process.is_main
            else None
        ),
    )
    if process.is_main:
        begin_launch(run, clock, uses)
    with process_group(process, agreement.connect("group"), run.config) as group:
        launch = Launch(
            run, data, resume, prepared.reference, options, watchdog, clock, progress, group
        )
        trainer = Trainer(launch, state, energy_kwh=prepared.energy_kwh)
        global_step = trainer.train(agreement, opened, prepared.warnings + warnings)
    if process.is_main:
        trainer.end(global_step)


def measure_microbatch(trial: MicrobatchTrial) -> None:
    """Take a few steps on random tokens, with one size of the microbatch. Every rank."""
    with trial.measuring() as (state, config, microbatches):
        step = TrainingStep(state, config, trial.process)
        trial.time_steps(
            lambda global_step: step.take(
                microbatches,
                learning_rate=config.learning_rate,
                num_microbatches=trial.num_microbatches,
                global_step=global_step,
            )
        )


def wrap_in_ddp(loss: nn.Module, process: Process, config: TrainConfig) -> Any:
    """Wrap the training loss so that DDP averages its gradients over the processes. Every rank."""
    if process.world_size == 1:
        return loss  # there is nothing to average, and DDP would cost time
    parallel_loss = DistributedDataParallel(  # the model has no buffers to broadcast
        loss,
        device_ids=[process.device] if is_gpu(process.device) else None,
        gradient_as_bucket_view=True,
    )
    if config.all_reduce_dtype == "bf16":
        parallel_loss.register_comm_hook(None, bf16_compress_hook)
    return parallel_loss


def microbatch_indices(plan: BatchPlan, rank: int, *, first_step: int) -> Iterator[int]:
    """Yield the indices of one process's microbatches in the run's data.

    Data is a pure function of the position in the run: no loader has a state to save.
    """
    for global_step in range(first_step, plan.num_steps):
        for accumulation_step in range(plan.gradient_accumulation_steps):
            accumulated = global_step * plan.gradient_accumulation_steps + accumulation_step
            yield accumulated * plan.world_size + rank


def read_microbatches(
    data: RunData, first_step: int, watchdog: Watchdog, clock: PhaseClock
) -> Generator[Microbatch]:
    """Yield this process's microbatches from a step on, each read while the one before is used."""
    process = watchdog.process
    indices = microbatch_indices(data.plan, process.rank, first_step=first_step)
    with closing(read_ahead(data.training, indices, device=process.device)) as upcoming:
        while True:
            # The first step's wait is part of starting up, not a sign of slow data.
            with clock.phase(COMPILE if clock.current == COMPILE else WAITING):
                microbatch = next(upcoming, None)
            if microbatch is None:
                return
            watchdog.heartbeat()
            yield microbatch


class TrainingStep:
    """Takes the global steps of one process. Building one compiles the model. Every rank."""

    def __init__(
        self,
        state: TrainingState,
        config: TrainConfig,
        process: Process,
        diagnostics: Diagnostics = NO_DIAGNOSTICS,
    ) -> None:
        self.state, self.config = state, config
        self.process, self.diagnostics = process, diagnostics
        self._parameters = list(state.model.parameters())  # finding them takes 1 ms of each step
        self.loss_functions = LossFunctions(state.model, config, process)
        self.parallel_loss = wrap_in_ddp(self.loss_functions.training, process, config)

    def take(
        self,
        microbatches: Iterator[Microbatch],
        *,
        num_microbatches: int,
        learning_rate: float,
        global_step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Take one global step, on the next `num_microbatches`. Every rank.

        Nothing here waits for the device. Returns this process's mean loss, NaN in a step whose
        loss has a part of the vocabulary, and the norm of the averaged gradient, each () float32.
        """
        failpoint("train")
        self.loss_functions.choose_candidates(global_step)
        model, optimizer, scaler = self.state.model, self.state.optimizer, self.state.scaler
        set_rates(optimizer, learning_rate)
        step_loss = torch.zeros((), device=self.process.device)
        # Only with several processes are there gradients to average, after the last microbatch.
        accumulates = self.process.world_size > 1 and num_microbatches > 1
        for accumulation_step in range(num_microbatches):
            index, token_ids, targets = next(microbatches)
            if model.config.drop_rate:  # nothing else draws random numbers
                torch.manual_seed(dropout_seed(self.config.random_seed, index))
            is_last = accumulation_step == num_microbatches - 1
            # DDP reads require_backward_grad_sync in the forward pass, so forward and backward
            # must both be inside no_sync().
            with nullcontext() if is_last or not accumulates else self.parallel_loss.no_sync():
                with autocast(self.config.precision, self.process.device):
                    loss = self.parallel_loss(token_ids, targets) / num_microbatches
                if failpoint("gradient"):
                    loss = loss * torch.nan
                scaler.scale(loss).backward()
            step_loss += loss.detach()  # stays on the device; `LossWindow` reads it later
        if model.candidates is not None:
            step_loss *= torch.nan  # it cannot be compared with that of all entries
        # In fp16 the gradients have the loss scale: diagnostics and clipping need them without it.
        scaler.unscale_(optimizer)
        self.diagnostics.before_update(model, token_ids, targets)
        del loss, token_ids, targets  # the update can use their memory
        grad_norm = clip_gradients(self._parameters, self.config.clipping_max_norm)
        # If it is 1, the fused kernels change neither weights nor moments nor their step count. In
        # fp16 `scaler.step` replaces it by its own, which `unscale_` has found, and removes that
        # after the step. Otherwise the scaler is disabled and only calls `optimizer.step`.
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        self.diagnostics.after_update(model)
        # Where DDP accumulates, the gradients stay: they are views of its buckets, and would be
        # allocated twice. With one microbatch it is cheaper to copy new ones into the buckets.
        optimizer.zero_grad(set_to_none=not accumulates)
        return step_loss, grad_norm


class Trainer:
    """One process's part in a launch.

    `log` prints and records, `pace` measures, `saver` writes checkpoints, `stop` says when to end,
    `observers` are the features beside that. Only rank 0's do anything, but for `stop`.
    """

    def __init__(self, launch: Launch, state: TrainingState, *, energy_kwh: float) -> None:
        self.launch, self.state = launch, state
        data, watchdog, process = launch.data, launch.watchdog, launch.process
        self.loss_window = LossWindow(process.device)
        self.saver = BackgroundSaver(
            launch.run.checkpoints_dir,
            keep=launch.config.keep_checkpoints,
            newest=launch.resume.checkpoint,
            heartbeat=watchdog.heartbeat,
            after_write=self.after_write,
        )
        self.pace = Pace(
            launch.run, launch.plan, launch.clock, lambda: self.saver.longest_write_seconds
        )
        self.log = RunLog(
            launch.run,
            launch.plan,
            data.tokenizer_name,
            data.training.token_file.bytes_per_token,
            clock=launch.clock,
            pace=self.pace,
            is_active=process.is_main,
        )
        self.attention_kernel = attention_kernel(state.model, launch.config, process.device)
        self.diagnostics = NO_DIAGNOSTICS
        self.observers: list[Observer] = []
        if process.is_main:
            self.diagnostics = Diagnostics(
                launch.config.diagnostics_interval, launch.config.precision, self.log
            )
            self.observers = self.features(energy_kwh)
        self.stop = Stop(launch, self.observers)
        self.code = code_version() if process.is_main else ""
        self.has_summary = False  # of the launch's end: `before_exit` must not overwrite it
        watchdog.before_exit = self.before_exit

    def features(self, energy_kwh: float) -> list[Observer]:
        """Return the observers of the run, in the order in which each moment calls them. Rank 0."""
        launch, log, kernel = self.launch, self.log, self.attention_kernel
        config, command = launch.config, launch.options.after_checkpoint
        machine = MachineReadings(
            launch, self.state, log, attention_kernel=kernel, energy_kwh=energy_kwh
        )
        found: list[Observer] = [self.diagnostics]
        if launch.reference:  # before the budget: of two reasons to end the first counts
            found.append(ReferenceCheck(launch, launch.reference))
        if config.max_hours or config.max_cost_usd:
            found.append(Budget(launch, self.pace))
        if command:  # before the others: at the end they share what is left after a stop signal
            found.append(AfterCheckpoint(launch, log, command))
        found += [
            ChartDrawing(launch, log),
            machine,
            SpeedCheck(launch, self.pace, log, machine.meter, attention_kernel=kernel),
        ]
        if config.tracker != "none":
            found.append(Tracking(launch, log))
        return [*found, Samples(launch, self.state, log)]

    def train(
        self,
        agreement: Agreement,
        opened: OpenedDir | None,  # on rank 0
        warnings: list[str],
    ) -> int:
        """Train to the end of the run, or of this launch; return the last step. Every rank."""
        self.begin(agreement, opened, warnings)
        launch, stages = self.launch, self.launch.stages
        launch.clock.enter(COMPILE)  # until the end of the first step
        self.step = TrainingStep(self.state, launch.config, launch.process, self.diagnostics)
        self.pace.begin(stages)
        self.validate_before_first_step()
        global_step = launch.resume.first_step - 1  # returned if the launch has no step to take
        for place, stage in enumerate(stages):
            if self.stop.has_ended or launch.last_step < stage.steps.start:
                break
            # A checkpoint may be loaded with fewer layers than its next step trains.
            if self.state.model.config.n_layers < stage.model.n_layers:
                self.add_layers(stage)
                self.pace.begin(stages[place:])
            global_step = self.train_steps(stage.steps)
        launch.progress.close()  # also of a launch that took no step
        del self.step.parallel_loss  # its threads must be gone before its process group
        return global_step

    def begin(
        self,
        agreement: Agreement,
        opened: OpenedDir | None,  # on rank 0
        warnings: list[str],
    ) -> None:
        """Print the settings, start what observes the launch. Every rank."""
        first_step = self.launch.resume.first_step
        if opened is not None:
            self.identity = opened.identity
            self.log.start(first_step)
            self.launch.progress.say = self.log.say
            if opened.aside_dir is not None:
                moved = ""
                if any((opened.aside_dir / "checkpoints").iterdir()):
                    moved = ", and the checkpoints that it does not go on from,"
                self.log.say(f"the run's files as they were{moved} are now in {opened.aside_dir}")
            self.say_settings(warnings)
            for observer in self.observers:
                observer.start(opened)
        # From here on a restart by torchrun resumes, also with --fresh.
        agreement.record_training_began(first_step)

    def add_layers(self, stage: Stage) -> None:
        """Go on with the layers that a stage trains, as from the last checkpoint. Every rank."""
        if self.launch.process.is_main:
            with self.launch.clock.phase(CHECKPOINT):
                self.saver.wait()  # a failure while they compile then loses no step
        self.wait_for_all()
        self.launch.clock.enter(COMPILE)
        self.launch.watchdog.expect_steps(self.launch.config.hang_timeout_seconds)
        before = self.state.model.config
        del self.step  # before there are two models in memory
        grown = grown_state(self.state, self.launch.run, self.launch.process)
        self.state.model, self.state.optimizer = grown.model, grown.optimizer  # observers see them
        del grown
        gc.unfreeze()  # `after_first_step` has exempted the old model
        gc.collect()
        free_cache()  # the layers need larger blocks
        self.step = TrainingStep(
            self.state, self.launch.config, self.launch.process, self.diagnostics
        )
        self.log.report_layers(stage.steps.start, before, stage.model)

    def validate_before_first_step(self) -> None:
        """Validate if an earlier launch has ended before it, or if the run asks for it."""
        resume = self.launch.resume
        if resume.lacks_validation:
            self.wait_for_all()
            self.validate(resume.first_step - 1)
            self.wait_for_all()
        if self.launch.config.validate_at_start and resume.first_step == 0:
            self.wait_for_all()
            self.validate_initial_weights()
            self.wait_for_all()

    def train_steps(self, steps: range) -> int:
        """Take these steps, or those until the launch ends; return the last one. Every rank."""
        launch, config, plan = self.launch, self.launch.config, self.launch.plan
        microbatches = read_microbatches(launch.data, steps.start, launch.watchdog, launch.clock)
        for global_step in range(steps.start, min(steps.stop, launch.last_step + 1)):
            launch.watchdog.heartbeat(global_step)
            learning_rate = learning_rate_at(config, global_step, num_steps=plan.num_steps)
            self.diagnostics.begin_step(global_step)
            loss, grad_norm = self.step.take(
                microbatches,
                num_microbatches=plan.gradient_accumulation_steps,
                learning_rate=learning_rate,
                global_step=global_step,
            )
            self.loss_window.add(loss, grad_norm)
            self.log.show(global_step, is_last=bool(launch.watchdog.stop_signal))
            if global_step == steps.start:
                self.after_first_step(loss)
            is_last = global_step == steps.stop - 1  # no report has steps of two stages
            is_report_due = self.loss_window.is_full or is_last
            for observer in self.observers:
                observer.step(global_step, is_report_due=is_report_due)
            ends = self.stop.after(global_step)
            # A launch that ends saves what it has trained, whatever the intervals say.
            saves = ends or config.is_save_due(global_step, num_steps=plan.num_steps)
            if saves or is_report_due:
                self.report(global_step, learning_rate, waits=saves or is_last)
            if saves:
                self.save_and_validate(global_step)
                ends = self.stop.agree()  # perhaps during the validation
            if ends:
                break
        microbatches.close()
        return global_step

    def say_settings(self, warnings: list[str]) -> None:
        """Print what the launch goes on from, the warnings of the start-up, sizes and rates."""
        launch, resume, model = self.launch, self.launch.resume, self.state.model
        run, plan = launch.run, launch.plan
        lines = []
        if resume.checkpoint is not None:
            lines.append(f"resuming from {resume.checkpoint.path}")
            lines += change_lines(resume.changes, resume.first_step)
            if resume.changes and not resume.has_no_step_left:  # else no step uses them
                self.log.record(resume.first_step - 1, {CHANGED: resume.changes})
        lines += [f"warning: {warning}" for warning in warnings]
        lines += batch_arithmetic(plan)
        num_parameters = run.model.num_parameters
        lines.append(
            f"{num_parameters:,} parameters, {plan.num_tokens / num_parameters:.1f} tokens per"
            f" parameter; {run.config.precision} on {launch.process.device.type}; attention:"
            f" {self.attention_kernel}"
        )
        first, *others = launch.stages
        if others:
            lines.append(
                f"{counted(first.model.n_layers, 'layer')}, {first.model.num_parameters:,}"
                f" parameters, until step {first.steps.stop:,}; then {run.model.n_layers} layers"
            )
        if run.config.sampled_softmax is not None:
            lines.append(
                f"sampled softmax: the loss has {run.config.sampled_softmax:,} of"
                f" {run.model.vocab_size:,} entries of the vocabulary; in each"
                f" {FULL_SOFTMAX_INTERVAL}th step it has all and is reported"
            )
        lines.append(f"learning rates: {rates_line(run.model, run.config)}")
        lines.append(decay_line(model, run.config))
        lines.append(f"checkpoints and charts: {run.run_dir}; {lab_command('watch', run)}")
        for line in lines:
            self.log.say(line)

    def after_first_step(self, loss: Tensor) -> None:
        """Start to measure speed and to detect hangs: all is compiled and allocated. Every rank."""
        loss.item()  # waits for the device
        gc.collect()
        gc.freeze()  # exempt start-up objects from garbage collection; scanning them stalls steps
        self.launch.clock.enter(TRAINING)
        self.loss_window.restart_timing()
        self.launch.watchdog.start_hang_detection()
        self.launch.progress.close()

    def report(self, global_step: int, learning_rate: float, *, waits: bool) -> None:
        """Record the steps since the last report. A collective: every rank.

        With `waits` also those that the device may not have finished yet.
        """
        plan = self.launch.plan
        for window in self.loss_window.close(
            global_step, learning_rate, self.launch.clock, waits=waits
        ):
            speed = window.steps_per_second and window.steps_per_second * plan.tokens_per_step
            report = Report(
                window.global_step,
                plan.tokens_of(window.global_step + 1),
                window.numbers.get("train_loss", math.nan),
                window.numbers | {"tokens_per_second": speed},
                window,
            )
            for observer in self.observers:
                observer.report(report)
            if self.launch.process.is_main:
                self.log.report_steps(report)
            if self.loss_window.longest_skipped >= MAX_SKIPPED_STEPS:
                self.fail_skipping(window.global_step)
        gc.collect()  # it is not automatic; activation checkpointing leaves cycles, as saving does
        self.warn_of_failed_write()

    def fail_skipping(self, global_step: int) -> NoReturn:
        """End a run whose gradients stay non-finite. Raises: AgreedError: on every rank."""
        reason = (
            f"{self.launch.run.run_dir}: the gradients of {self.loss_window.longest_skipped} steps"
            f" in a row, up to step {global_step + 1:,}, were not finite; resume from an earlier"
            " checkpoint with a lower learning_rate, or with precision bf16 or fp32"
            + (', or with attention "flash"' if self.attention_kernel == "cudnn" else "")
        )
        self.before_exit("failed", reason)
        raise AgreedError(reason, status=NON_FINITE)

    def save_and_validate(self, global_step: int) -> None:
        """Let rank 0 save, validate and start to draw while the other ranks wait. Every rank."""
        if self.launch.process.is_main:
            self.save(global_step)
        # The others wait in gloo, without a limit; the next collective of NCCL would time out.
        self.wait_for_all()
        num_steps = self.launch.plan.num_steps
        if self.launch.config.is_validation_due(global_step, num_steps=num_steps):
            self.validate(global_step)
        for observer in self.observers:
            observer.checkpoint()
        self.loss_window.restart_timing()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait for the slowest process, however long it takes. Every rank."""
        with self.launch.clock.phase(WAITING), self.launch.watchdog.suspended():
            failpoint("wait")
            dist.barrier(self.launch.group)

    def save(self, global_step: int) -> None:
        """Copy the training state; a background thread writes it. Rank 0."""
        launch, config, clock = self.launch, self.launch.config, self.launch.clock
        train_loss = finite_or_none(self.loss_window.pop_loss_since_checkpoint())
        is_due = config.is_save_due(global_step, num_steps=launch.plan.num_steps)
        # A launch that ends early has averaged fewer steps: its loss compares with no other.
        decides_best = not config.validates and is_due
        with clock.phase(CHECKPOINT):
            seconds, usd = clock.spent()
            self.saver.save(
                self.state,
                CheckpointMeta(
                    identity=self.identity.name,
                    global_step=global_step,
                    tokens=launch.plan.tokens_of(global_step + 1),
                    loss=train_loss if decides_best else None,
                    train_loss=train_loss,
                    seconds=seconds,
                    usd=usd,
                    optimizer=config.optimizer,
                    code=self.code,
                    tokenizer=launch.data.tokenizer_name,
                    tokenizer_file=launch.data.tokenizer_file,
                    loss_scale=self.state.loss_scale(),
                    model=self.state.model.config,
                    random_seed=config.random_seed,
                    settings=settings_of(launch.run),
                    data=launch.data.fingerprints,
                ),
            )
        self.warn_of_failed_write()

    def after_write(self) -> None:
        """Tell the observers that a checkpoint is whole on disk. In the saver's thread."""
        for observer in self.observers:
            observer.written()

    def warn_of_failed_write(self) -> None:
        if failure := self.saver.pop_failure():
            self.log.say(
                f"warning: {failure} in {self.launch.run.checkpoints_dir}: each later"
                " checkpoint tries again"
            )

    def validate(self, global_step: int) -> None:
        """Measure the loss on each validation set: on rank 0, or as a collective (`validate_on`).

        Rank 0 records the losses.
        """
        clock = self.launch.clock
        with clock.phase(VALIDATION) as phase:
            results = self.measure_validation_losses(global_step)
        if results is None:
            return
        tokens = self.launch.plan.tokens_of(global_step + 1)
        # The first set decides `best`.
        report = Report(global_step, tokens, results[0].loss, {})
        for observer in self.observers:
            observer.validation(report)
        # After the samples: the time left counts them too, with each validation to come.
        self.log.report_validation(report, results, phase.seconds)
        loss = finite_or_none(report.loss)
        seconds, usd = clock.spent()
        self.saver.add_validation(Validation(loss=loss, seconds=seconds, usd=usd))

    def validate_initial_weights(self) -> None:
        """Record the validation losses before the first step. Every rank."""
        with self.launch.clock.phase(VALIDATION) as phase:
            results = self.measure_validation_losses(-1)
        if results is not None:
            self.log.report_initial_validation(results, phase.seconds)

    def measure_validation_losses(self, global_step: int) -> list[SetResult] | None:
        """Measure the loss on each validation set after a step. Every rank.

        None after a stop signal, and on ranks other than 0.
        """
        data, losses = self.launch.data, {}
        for name, microbatches in data.validation_sets.items():
            show = partial(self.log.show, global_step)
            loss = validate(self.step.loss_functions, microbatches, self.launch.watchdog, show)
            if loss is None:  # with `validate_on` "all" on every rank
                return None
            losses[name] = loss
        if not self.launch.process.is_main:
            return None
        return [
            SetResult(name, losses[name], bytes_per_token)
            for name, bytes_per_token in data.set_bytes_per_token.items()
        ]

    def end(self, global_step: int) -> None:
        """Write what is left and the summary; wait for the processes beside training. Rank 0.

        This may take 15 minutes. Call it after the process group is destroyed: inside the group the
        other ranks would wait for this one.

        Raises: UserError: the last validation loss is not finite; the last checkpoint or the
            records could not be written, or an observer failed.
        """
        launch = self.launch
        # A write that a full disk refused may succeed now; it is the last chance.
        with launch.clock.phase(CHECKPOINT):
            self.saver.retry()
        if launch.resume.has_no_step_left:  # an earlier launch was killed before it came to this
            self.saver.tidy()
            for observer in self.observers:
                observer.checkpoint()
        facts = self.facts_at_end()
        for observer in self.observers:
            facts |= observer.end()
        end = self.describe_end(global_step, facts)
        unwritten = self.log.finish(end)
        self.has_summary = not (unwritten or self.saver.is_behind)
        failures = [observer.finish() for observer in self.observers]
        record_launch(launch.run, launch.clock)
        if self.saver.is_behind:
            unwritten = self.saver.pop_failure()
        if unwritten:
            raise UserError(
                f"{unwritten} in {launch.run.run_dir}; then run the same command again:"
                " it resumes from the last whole one",
                DISK_FULL,
            )
        self.warn_of_failed_write()
        if end.failure:
            raise UserError(
                f"{end.failure}; resume from an earlier checkpoint with a lower learning_rate",
                NON_FINITE,
            )
        for observer in self.observers:
            observer.close()
        for failure in filter(None, failures):
            raise failure

    def facts_at_end(self) -> dict[str, Any]:
        """Return what `summary.json` says of the model, its data and its checkpoints. Rank 0."""
        run, data = self.launch.run, self.launch.data
        best = best_of(list_checkpoints(run.checkpoints_dir))
        return {
            "num_parameters": run.model.num_parameters,
            "tokenizer": data.tokenizer_name,
            "bytes_per_token": data.training.token_file.bytes_per_token,
            "best": best
            and {
                "checkpoint": best.name,
                "global_step": best.meta.global_step,
                "loss": best.loss,
            },
            "checkpoints": {
                "saved": self.saver.num_checkpoints,
                "longest_write_seconds": self.saver.longest_write_seconds,
                "stalled_seconds": self.launch.clock.read_this_launch()[CHECKPOINT],
            },
            "code": self.code,
        }

    def describe_end(self, global_step: int, facts: dict[str, Any]) -> RunEnd:
        """Return how the launch ends, for `summary.json`. Rank 0."""
        plan, last = self.launch.plan, self.saver.validation
        has_no_step_left = plan.has_no_step_after(global_step)
        has_diverged = has_no_step_left and last is not None and last.loss is None
        is_due = self.launch.config.is_validation_due(global_step, num_steps=plan.num_steps)
        return RunEnd(
            global_step=global_step,
            this_launch=self.pace.this_launch(global_step),
            failure="the last validation loss is not finite" if has_diverged else "",
            stop_reason=self.stop.reason,
            lacks_validation=is_due and last is None,
            facts=facts,
        )

    def before_exit(self, status: str, reason: str) -> None:
        """Finish a checkpoint that is being written, and record why the run ends. Any thread."""
        if self.launch.process.is_main and not self.has_summary:
            self.saver.wait(timeout=self.launch.watchdog.deadlines.last_write)
            self.log.write_status(status, reason)
            record_launch(self.launch.run, self.launch.clock)


if __name__ == "__main__":
    main()
