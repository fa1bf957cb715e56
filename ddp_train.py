"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. It can start torchrun itself.

`main` is the command, `run_worker` is what each process runs, `Trainer.train` is the training loop.
"""

from __future__ import annotations

if __name__ == "__main__":  # --help, a mistyped option and a locked run need no torch
    from processes.before_torch import check_before_torch

    check_before_torch()

import os
import sys
from collections.abc import Generator, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from basics.errors import drop_unwritable_output
from basics.failpoints import failpoint
from basics.json_files import finite_or_none
from basics.memory_meters import keep_freed_memory
from checkpointing import CheckpointMeta, TrainingState, Validation
from microbatch_search.search import search
from processes.before_torch import exit_with
from processes.command_line import read_command_line
from processes.launch import Process, process_group, started_by_torchrun, this_process
from processes.startup_agreement import AgreedError, Agreement, leave
from processes.watchdog import Watchdog
from reporting.clock import CHECKPOINT, VALIDATION, WAITING, PhaseClock
from run_config import TrainConfig, load_run
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, prefetch
from trainer.background_saver import BackgroundSaver
from trainer.compilation import compiled_code_of_run
from trainer.launcher import launch
from trainer.learning_rate_search import find_learning_rate
from trainer.reports import Reports
from trainer.schedule import learning_rate_at, momentum_at
from trainer.startup import PreparedRun, build_state, prepare_run
from trainer.step import TrainingStep
from trainer.stopping import Stop
from trainer.user_commands import run_when_done
from trainer.validation import validate


def main() -> None:
    clock, agreement = PhaseClock.since_process_start(), Agreement.in_one_process()
    try:
        if started_by_torchrun():
            clock.import_from_parent()
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            run_worker(agreement, clock)
            leave(0)
        else:
            sys.exit(launch(__file__, read_command_line(), clock, agreement))
    except AgreedError as error:
        agreement.exit(error)
    except Exception as error:
        exit_with(error)
    finally:
        drop_unwritable_output()


def run_worker(agreement: Agreement, clock: PhaseClock) -> None:
    """Run one of the processes that torchrun has started. Every rank."""
    options = agreement.run("command line", read_command_line)
    process = agreement.run("process", this_process)
    if options.find_max_microbatch:
        run = agreement.run("configs", lambda: load_run(options.runs_dir, options.run))
        return search(run, process, agreement, options=options, wrap=wrap_in_ddp)
    if process.device.type == "cpu":
        keep_freed_memory()
    if options.find_learning_rate:
        return find_learning_rate(options, process, agreement, wrap_in_ddp, microbatch_indices)
    options = options.after_restart(agreement.step_before_restart())
    watchdog = Watchdog(process, agreement.connect("watchdog"), phase=lambda: clock.current)
    with watchdog.start():  # a node may be lost while another one downloads
        prepared = prepare_run(options, process, clock, agreement)
        agreement.require_same("run", prepared.agreed_values())
        prepared.say_if_finished(process)
        if not prepared.is_finished:
            train(prepared, watchdog, clock, agreement)
    run_when_done(prepared, process, stop_signal=watchdog.stop_signal)


def train(prepared: PreparedRun, watchdog: Watchdog, clock: PhaseClock,
          agreement: Agreement) -> None:
    """Train a run; all of its memory is free afterwards. Every rank."""
    process = watchdog.process
    prepared = agreement.run("device", lambda: prepared.for_device(process.device))
    state = agreement.run("state", lambda: build_state(prepared, process))
    watchdog.expect_steps(prepared.run.train.hang_timeout_seconds, prepared.run.heartbeat_path)
    with process_group(process, agreement.connect("group"), prepared.run.train) as group:
        trainer = Trainer(prepared, state, watchdog, clock=clock, group=group)
        global_step = trainer.train(agreement)
    if process.is_main:
        trainer.end(global_step)


def wrap_in_ddp(loss: nn.Module, process: Process, train: TrainConfig) -> nn.Module:
    """Wrap the training loss so that DDP averages its gradients over the processes. Every rank."""
    if process.world_size == 1:
        return loss  # there is nothing to average, and DDP would cost time
    parallel_loss = DistributedDataParallel(  # the model has no buffers to broadcast
        loss, device_ids=[process.device] if process.device.type == "cuda" else None,
        gradient_as_bucket_view=True)
    if train.all_reduce_dtype == "bf16":
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


class Trainer:
    """One process's part in the training of a run.

    Args:
        group: a gloo group of all processes, for waits longer than a collective's timeout.
    """

    def __init__(self, prepared: PreparedRun, state: TrainingState, watchdog: Watchdog, *,
                 clock: PhaseClock, group: dist.ProcessGroup) -> None:
        self.prepared, self.run, self.config = prepared, prepared.run, prepared.train
        self.plan, self.data, self.state = prepared.plan, prepared.data, state
        self.watchdog, self.process, self.clock = watchdog, watchdog.process, clock
        self.group, resumed = group, prepared.resume_from
        self.saver = BackgroundSaver(
            self.run.checkpoints_dir, keep=self.config.keep_checkpoints, newest=resumed,
            protected=[resumed.name] if resumed else [], heartbeat=watchdog.heartbeat)
        self.reports = Reports(prepared, clock=clock, watchdog=watchdog, saver=self.saver)
        self.stop = Stop(prepared, clock=clock, watchdog=watchdog, group=group, saver=self.saver)

    def train(self, agreement: Agreement) -> int:
        """Train to the end of the run, or as far as this launch may go; return the last step.

        Every rank.
        """
        self.begin(agreement)
        microbatches, global_step = self.microbatches(), self.prepared.first_step - 1
        ends = self.stop.is_over
        while not ends:
            global_step += 1
            self.watchdog.heartbeat(global_step)
            learning_rate = learning_rate_at(self.config, global_step,
                                             num_steps=self.plan.num_steps)
            loss, grad_norm = self.step.take(
                microbatches, num_microbatches=self.plan.gradient_accumulation_steps,
                learning_rate=learning_rate, momentum=momentum_at(
                    self.config, global_step, num_steps=self.plan.num_steps),
                probe=self.reports.diagnostics.probe(global_step))
            self.reports.add(loss, grad_norm)
            if global_step == self.prepared.first_step:
                self.reports.after_first_step(loss)
            ends = self.stop.after(global_step, is_report_due=self.reports.is_due)
            saves = ends or self.stop.is_save_due(global_step)
            if saves or self.reports.is_due:
                self.reports.write(global_step, learning_rate, waits=saves)
            if saves:
                self.save_and_validate(global_step)
                ends = self.stop.is_asked() or ends  # perhaps during the validation
        microbatches.close()
        self.step.unwrap()
        return global_step

    def end(self, global_step: int) -> None:
        """Write the summary, and wait for what works beside training. Rank 0, without the group."""
        is_due = self.stop.is_validation_due(global_step)
        self.reports.end(global_step, stop_reason=self.stop.reason,
                         lacks_validation=is_due and not self.saver.is_validated)

    def begin(self, agreement: Agreement) -> None:
        """Print the settings, compile, run a validation that is still missing. Every rank."""
        self.reports.begin(self.state.model.num_parameters())
        agreement.record_training_began(self.prepared.first_step)
        with compiled_code_of_run(self.run.run_dir, self.config, self.process):
            self.step = TrainingStep(self.state, self.config, self.process, wrap=wrap_in_ddp)
        self.reports.report_step(self.step)
        if self.prepared.lacks_validation:  # an earlier launch ended before it
            self.wait_for_all()
            self.validate(self.prepared.first_step - 1)
            self.wait_for_all()

    def microbatches(self) -> Generator[Microbatch]:
        """Return this process's microbatches, each of them read while the one before is used."""
        indices = microbatch_indices(self.plan, self.process.rank,
                                     first_step=self.prepared.first_step)
        microbatches = prefetch(self.data.train, indices, device=self.process.device)
        return self.clock.waiting_for(self.watchdog.watching(microbatches))

    def save_and_validate(self, global_step: int) -> None:
        """Let rank 0 save, validate and start to draw while the other ranks wait. Every rank."""
        if self.process.is_main:
            self.save(global_step)
        self.wait_for_all()
        if self.stop.is_validation_due(global_step):
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
        train_loss = finite_or_none(self.reports.window.take_loss_since_checkpoint())
        with self.clock.phase(CHECKPOINT):
            self.saver.save(self.state, CheckpointMeta(
                identity=self.reports.identity.name, global_step=global_step,
                tokens=(global_step + 1) * self.plan.tokens_per_step,
                loss=train_loss if self.stop.counts_train_loss(global_step) else None,
                train_loss=train_loss,
                seconds=self.clock.read(), usd=self.clock.usd(),
                optimizer=self.config.optimizer, code=self.reports.code,
                tokenizer=self.data.tokenizer_name, tokenizer_file=self.data.tokenizer_file,
                loss_scale=self.state.loss_scale(),
                model=self.run.model, random_seed=self.config.random_seed,
                data=self.data.fingerprints,
            ))
        self.reports.warn_of_failed_write()

    def validate(self, global_step: int) -> None:
        """Measure the validation loss, on rank 0 or on all ranks; rank 0 records it.

        A collective if `validate_on` is `all`: every rank.
        """
        on_all = self.config.validate_on == "all"
        if not (self.process.is_main or on_all):
            return
        with self.clock.phase(VALIDATION) as phase:
            loss = validate(
                self.step, self.data.validation, shares=on_all,
                watched=lambda microbatches, count: self.reports.console.validation_bar(
                    self.watchdog.watching(microbatches), count),
                is_interrupted=lambda: bool(self.watchdog.stop_signal))
        if loss is not None and self.process.is_main:
            self.reports.console.report_validation(
                global_step, loss, phase.seconds, bytes_per_token=self.data.bytes_per_token)
            self.reports.write_samples(global_step)  # before: after a kill both are repeated
            self.saver.add_validation(Validation(
                loss=finite_or_none(loss), seconds=self.clock.read(), usd=self.clock.usd()))


if __name__ == "__main__":
    main()
