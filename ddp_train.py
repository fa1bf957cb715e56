"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. It can start torchrun itself.

Each process runs `run_worker`; `Trainer.train` is the loop, `TrainingStep.take` one global step.
"""

if __name__ == "__main__":  # --help, a mistyped option and a locked run need no torch
    from basics.entry_points import begin_command

    begin_command()
    from processes.command_line import check_before_torch

    check_before_torch()

import os
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from basics.cli import exit_with
from basics.entry_points import keep_freed_memory
from basics.errors import drop_unwritable_output
from basics.failpoints import failpoint
from basics.json_files import finite_or_none
from checkpointing import CheckpointMeta, TrainingState, Validation
from ops.schedule import learning_rate_at
from optim import clip_gradients, set_rates
from processes.command_line import Options, read_command_line
from processes.distributed import Process, end_torchrun, process_group, spans_nodes, this_process
from processes.startup_agreement import AgreedError, Agreement, leave
from processes.watchdog import Watchdog
from reporting.clock import CHECKPOINT, COMPILE, VALIDATION, WAITING, PhaseClock
from reporting.setting_changes import settings_of
from reporting.summary import final_status
from run_config import TrainConfig
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, dropout_seed, read_ahead
from trainer.background_saver import BackgroundSaver
from trainer.commands import launch, run_to_search, search
from trainer.diagnostics import NO_DIAGNOSTICS, Diagnostics
from trainer.learning_rate_search import prepare_range_test, report_range_test, run_range_test
from trainer.losses import Losses, validate
from trainer.microbatch_trial import TRIAL_VARIABLE, MicrobatchTrial
from trainer.precision import autocast
from trainer.reports import Reports
from trainer.side_processes import run_when_done
from trainer.startup import PreparedRun, build_state, open_run_dir, prepare_run
from trainer.stopping import Stop


def main() -> None:
    clock, agreement = PhaseClock.since_process_start(), Agreement.in_one_process()
    try:
        if "RANK" in os.environ:  # torchrun has started this process
            clock.import_from_parent()
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            leave(run_worker(agreement, clock))
        else:
            leave(launch(read_command_line(), clock, agreement))
    except AgreedError as error:
        agreement.exit(error)
    except Exception as error:
        exit_with(error)
    finally:
        drop_unwritable_output()


def run_worker(agreement: Agreement, clock: PhaseClock) -> int:
    """Run one of the processes that torchrun has started; return its exit status. Every rank."""
    options = agreement.run("command line", read_command_line)
    process = agreement.run("process", this_process)
    if TRIAL_VARIABLE in os.environ:
        measure_microbatch(MicrobatchTrial(options, process, agreement))
        return 0
    if options.find_max_microbatch:  # one process starts the trials
        run = agreement.run("search", lambda: run_to_search(options, process.world_size))
        if process.is_main:
            search(run, options, process.world_size)
        return 0
    if process.device.type == "cpu":
        keep_freed_memory()
    options = options.after_restart(agreement.step_before_restart())
    watchdog = Watchdog(
        process,
        agreement.connect("watchdog"),
        phase=lambda: clock.current,
        seconds=clock.total_seconds,
    )
    if options.find_learning_rate:
        find_learning_rate(options, watchdog, agreement)
        return 0
    with watchdog.start():  # a node may be lost while another one downloads
        prepared = prepare_run(options, process, clock, agreement)
        agreement.require_same("run", prepared.agreed_values())
        prepared.say_if_finished(process)
        if not prepared.is_finished:
            train_run(prepared, watchdog, clock, agreement)
    run_when_done(prepared, process, stop_signal=watchdog.stop_signal)
    if not watchdog.stop_signal:
        return 0
    # Of rank 0 alone: torchrun ends all when one fails, and rank 0 is the last to end.
    status = final_status(prepared.run, 0) if process.is_main else 0
    if status or spans_nodes():
        end_torchrun(process)
    return status


def train_run(
    prepared: PreparedRun, watchdog: Watchdog, clock: PhaseClock, agreement: Agreement
) -> None:
    """Train a run; all of its memory is free afterwards. Every rank."""
    process = watchdog.process
    watchdog.write_heartbeats(prepared.run.heartbeat_path)
    prepared = agreement.run("device", lambda: prepared.for_device(process.device))
    state = agreement.run("state", lambda: build_state(prepared, process))
    watchdog.expect_steps(prepared.config.hang_timeout_seconds)
    with process_group(process, agreement.connect("group"), prepared.config) as group:
        trainer = Trainer(prepared, state, watchdog, clock=clock, group=group)
        global_step = trainer.train(agreement)
    if process.is_main:
        trainer.end(global_step)


def find_learning_rate(options: Options, watchdog: Watchdog, agreement: Agreement) -> None:
    """Train from the initial weights with growing rates, and suggest one. Every rank."""
    process = watchdog.process
    with watchdog.start():
        prepared = prepare_range_test(options, watchdog, agreement)
        state = agreement.run("state", lambda: build_state(prepared, process))
        with process_group(process, agreement.connect("group"), prepared.config):
            step = TrainingStep(state, prepared.config, process)
            microbatches = read_microbatches(prepared, watchdog, PhaseClock())
            num_microbatches = prepared.plan.gradient_accumulation_steps
            losses = run_range_test(
                lambda rate: step.take(
                    microbatches, num_microbatches=num_microbatches, learning_rate=rate
                )[0],
                watchdog,
            )
            microbatches.close()
            del step.parallel_loss  # its threads must be gone before its process group
    report_range_test(prepared.run, losses, process)


def measure_microbatch(trial: MicrobatchTrial) -> None:
    """Take a few steps on random tokens, with one size of the microbatch. Every rank."""
    with trial.measuring() as (state, config, microbatches):
        step = TrainingStep(state, config, trial.process)
        trial.time_steps(
            lambda: step.take(
                microbatches,
                learning_rate=config.learning_rate,
                num_microbatches=trial.num_microbatches,
            )
        )


def wrap_in_ddp(loss: nn.Module, process: Process, config: TrainConfig) -> Any:
    """Wrap the training loss so that DDP averages its gradients over the processes. Every rank."""
    if process.world_size == 1:
        return loss  # there is nothing to average, and DDP would cost time
    parallel_loss = DistributedDataParallel(  # the model has no buffers to broadcast
        loss,
        device_ids=[process.device] if process.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if config.all_reduce_dtype == "bf16":
        parallel_loss.register_comm_hook(None, bf16_compress_hook)
    return parallel_loss


def microbatch_indices(plan: BatchPlan, rank: int, *, first_step: int) -> Iterator[int]:
    """Yield the microbatches of one process, as positions in the token file.

    Data is a pure function of the position in the run: no loader has a state to save.
    """
    for global_step in range(first_step, plan.num_steps):
        for accumulation_step in range(plan.gradient_accumulation_steps):
            accumulated = global_step * plan.gradient_accumulation_steps + accumulation_step
            yield accumulated * plan.world_size + rank


def read_microbatches(
    prepared: PreparedRun, watchdog: Watchdog, clock: PhaseClock
) -> Generator[Microbatch]:
    """Yield this process's microbatches, each read while the one before is used."""
    process = watchdog.process
    indices = microbatch_indices(prepared.plan, process.rank, first_step=prepared.first_step)
    with closing(read_ahead(prepared.data.train, indices, device=process.device)) as upcoming:
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
        self.losses = Losses(state.model, config, process)
        self.parallel_loss = wrap_in_ddp(self.losses.training, process, config)

    def take(
        self, microbatches: Iterator[Microbatch], *, num_microbatches: int, learning_rate: float
    ) -> tuple[Tensor, Tensor]:
        """Take one global step, on the next `num_microbatches`. Every rank.

        Nothing here waits for the device. Returned are this process's mean loss and the norm of the
        averaged gradient, each () float32.
        """
        failpoint("train")
        model, optimizer, scaler = self.state.model, self.state.optimizer, self.state.scaler
        set_rates(optimizer, learning_rate)
        step_loss = torch.zeros((), device=self.process.device)
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
            step_loss += loss.detach()
        scaler.unscale_(optimizer)
        self.diagnostics.before_update(model, token_ids, targets)
        del loss, token_ids, targets  # the update can use their memory
        grad_norm = clip_gradients(self._parameters, self.config.clipping_max_norm)
        # If it is 1, the fused kernels change neither weights nor moments nor their step count.
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        self.diagnostics.after_update(model)
        # Where DDP accumulates, the gradients stay: they are views of its buckets, and would be
        # allocated twice. With one microbatch it is cheaper to copy new ones into the buckets.
        optimizer.zero_grad(set_to_none=not accumulates)
        return step_loss, grad_norm


class Trainer:
    """One process's part in the training of a run; `group` is of gloo, for waits of any length."""

    def __init__(
        self,
        prepared: PreparedRun,
        state: TrainingState,
        watchdog: Watchdog,
        *,
        clock: PhaseClock,
        group: dist.ProcessGroup,
    ) -> None:
        self.prepared, self.config, self.data = prepared, prepared.config, prepared.data
        self.plan, self.state, self.clock, self.group = prepared.plan, state, clock, group
        self.watchdog, self.process = watchdog, watchdog.process
        self.saver = BackgroundSaver(
            prepared.run.checkpoints_dir,
            keep=self.config.keep_checkpoints,
            newest=prepared.resume_from,
            heartbeat=watchdog.heartbeat,
        )
        self.reports = Reports(
            prepared, state.model, clock=clock, watchdog=watchdog, saver=self.saver
        )
        self.stop = Stop(prepared, clock=clock, watchdog=watchdog, group=group, saver=self.saver)

    def train(self, agreement: Agreement) -> int:
        """Train to the end of the run, or of this launch; return the last step. Every rank."""
        self.begin(agreement)
        microbatches = read_microbatches(self.prepared, self.watchdog, self.clock)
        losses, num_steps = self.reports.window, self.plan.num_steps
        global_step = self.prepared.first_step - 1
        for global_step in range(self.prepared.first_step, self.stop.last_step + 1):
            self.watchdog.heartbeat(global_step)
            learning_rate = learning_rate_at(self.config, global_step, num_steps=num_steps)
            self.step.diagnostics.begin_step(global_step)
            loss, grad_norm = self.step.take(
                microbatches,
                num_microbatches=self.plan.gradient_accumulation_steps,
                learning_rate=learning_rate,
            )
            losses.add(loss, grad_norm)
            self.reports.log.step()
            if global_step == self.prepared.first_step:
                self.reports.after_first_step(loss)
            ends = self.stop.after(global_step, is_report_due=losses.is_full)
            saves = ends or self.prepared.is_save_due(global_step)
            if saves or losses.is_full:
                self.reports.write(global_step, learning_rate, waits=saves)
            if saves:
                self.save_and_validate(global_step)
                ends = self.stop.is_asked() or ends  # perhaps during the validation
            if ends:
                break
        microbatches.close()
        del self.step.parallel_loss  # its threads must be gone before its process group
        return global_step

    def begin(self, agreement: Agreement) -> None:
        """Print the settings, compile, run a validation that is still missing. Every rank."""
        self.identity, aside_dir = open_run_dir(self.prepared, self.process, self.clock)
        self.reports.begin(aside_dir)
        agreement.record_training_began(self.prepared.first_step)
        self.step = TrainingStep(self.state, self.config, self.process, self.reports.diagnostics)
        if self.prepared.lacks_validation:  # an earlier launch ended before it
            self.wait_for_all()
            self.validate(self.prepared.first_step - 1)
            self.wait_for_all()

    def end(self, global_step: int) -> None:
        """Write what is left; wait for what works beside training. Rank 0, without the group."""
        with self.clock.phase(CHECKPOINT):
            self.saver.retry()
        if self.prepared.is_trained:  # an earlier launch was killed before it came to this
            self.saver.tidy()
            self.reports.draw_charts()
        is_due = self.prepared.is_validation_due(global_step)
        self.reports.end(
            global_step,
            stop_reason=self.stop.reason,
            lacks_validation=is_due and self.saver.validation is None,
        )

    def save_and_validate(self, global_step: int) -> None:
        """Let rank 0 save, validate and start to draw while the other ranks wait. Every rank."""
        if self.process.is_main:
            self.save(global_step)
        self.wait_for_all()
        if self.prepared.is_validation_due(global_step):
            self.validate(global_step)
        if self.process.is_main:
            self.reports.draw_charts()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Wait for the slowest process, however long it takes. Every rank."""
        with self.clock.phase(WAITING), self.watchdog.suspended():
            failpoint("wait")
            dist.barrier(self.group)

    def save(self, global_step: int) -> None:
        """Copy the training state; a background thread writes it. Rank 0."""
        train_loss = finite_or_none(self.reports.window.pop_loss_since_checkpoint())
        decides_best = not self.config.validates and self.prepared.is_save_due(global_step)
        with self.clock.phase(CHECKPOINT):
            self.saver.save(
                self.state,
                CheckpointMeta(
                    identity=self.identity.name,
                    global_step=global_step,
                    tokens=(global_step + 1) * self.plan.tokens_per_step,
                    loss=train_loss if decides_best else None,
                    train_loss=train_loss,
                    seconds=self.clock.read(),
                    usd=self.clock.usd(),
                    optimizer=self.config.optimizer,
                    code=self.reports.code,
                    tokenizer=self.data.tokenizer_name,
                    tokenizer_file=self.data.tokenizer_file,
                    loss_scale=self.state.loss_scale(),
                    model=self.prepared.run.model,
                    random_seed=self.config.random_seed,
                    settings=settings_of(self.prepared.run),
                    data=self.data.fingerprints,
                ),
            )
        self.reports.warn_of_failed_write()

    def validate(self, global_step: int) -> None:
        """Measure the validation loss, on rank 0 or, a collective, on all; rank 0 records it."""
        with self.clock.phase(VALIDATION) as phase:
            loss = validate(self.step.losses, self.data.validation, self.watchdog)
        if loss is not None and self.process.is_main:
            self.reports.report_validation(global_step, loss, phase.seconds)
            self.saver.add_validation(
                Validation(
                    loss=finite_or_none(loss), seconds=self.clock.read(), usd=self.clock.usd()
                )
            )


if __name__ == "__main__":
    main()
