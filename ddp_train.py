"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. Reads as the story of one run."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace

STARTED = time.perf_counter()

from processes.before_torch import check_before_torch, exit_with

if __name__ == "__main__":
    check_before_torch()

import torch
import torch.distributed as dist

from basics.errors import DISK, UserError, drop_unwritable_output, print_line
from basics.failpoints import failpoint
from basics.json_files import finite_or_none
from basics.memory_meters import keep_freed_memory
from checkpointing import (
    CheckpointMeta,
    best_of,
    list_checkpoints,
    remove_partial_checkpoints,
    renew_links,
    set_aside,
)
from microbatch_search.search import search
from processes.command_line import Options, read_command_line
from processes.launch import (
    Process,
    default_num_processes,
    machine_facts,
    process_group,
    start_torchrun,
    started_by_torchrun,
    this_process,
    throttling,
)
from processes.run_lock import release_run
from processes.startup_agreement import AgreedError, Agreement
from processes.watchdog import Watchdog
from reporting.charts import try_to_draw_charts
from reporting.clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    TRAINING,
    VALIDATION,
    WAITING,
    Pace,
    PhaseClock,
)
from reporting.console import Console, batch_arithmetic
from reporting.loss_window import LossWindow
from reporting.sampling import sample_text, try_to_write_samples
from reporting.speed import SPEED_CHECK_STEPS, Speed, flops_per_token
from reporting.summary import RunEnd, settle
from run_config import load_run
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatch, prefetch
from trainer.background_saver import BackgroundSaver
from trainer.checkpoint_loading import load_checkpoint
from trainer.optimization import learning_rate_at
from trainer.precision import autocast, choose_precision
from trainer.startup import Job, prepare
from trainer.step import TrainingState, TrainingStep, build_training_state
from trainer.stopping import Ending
from trainer.validation import mean_loss


def main() -> None:
    clock = PhaseClock(since=STARTED)
    try:
        if started_by_torchrun():
            clock.take_over()
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            work(agreement, clock)
        else:
            agreement = Agreement.in_one_process()
            sys.exit(launch(read_command_line(), agreement, clock))
    except AgreedError as error:
        agreement.report_once(error.line())
        drop_unwritable_output()
        os._exit(error.status)  # at once: taking a process group down may wait for the others
    except UserError as error:
        exit_with(error)
    finally:
        drop_unwritable_output()


def launch(options: Options, agreement: Agreement, clock: PhaseClock) -> int:
    """Check the run in this one process, then train it under torchrun; give its exit status."""
    num_processes = options.nproc_per_node or default_num_processes()
    if options.find_max_microbatch:  # which may go on beside a start that trains the run
        return start_torchrun(__file__, sys.argv[1:], num_processes=num_processes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = Process(rank=0, local_rank=0, world_size=num_processes, device=device)
    job = prepare(options, alone, clock, agreement)
    if job.is_finished:
        print_line(job.finished_line())
        return 0
    release_run()  # from here on rank 0 has it
    clock.hand_over()
    return settle(job.run, start_torchrun(__file__, sys.argv[1:], num_processes=num_processes))


def work(agreement: Agreement, clock: PhaseClock) -> None:
    """Be one of the processes that torchrun has started. Every rank."""
    options = agreement.run("command line", read_command_line)
    process = agreement.run("process", this_process)
    if options.find_max_microbatch:
        run = agreement.run("configs", lambda: load_run(options.runs_dir, options.run))
        search(run, process, agreement, memory_limit_gib=options.memory_limit_gib,
               save=options.save)
        return
    if process.device.type == "cpu":
        keep_freed_memory()
    if agreement.is_torchrun_restart():
        options = replace(options, fresh=False, checkpoint=None)
    job = prepare(options, process, clock, agreement)
    agreement.require_same("job", job.identity())
    if job.is_finished:
        if process.is_main:
            print_line(job.finished_line())
        return
    state = agreement.run("state", lambda: build_state(job, process))
    watchdog = Watchdog(process, agreement.connect("watchdog"), phase=lambda: clock.current,
                        heartbeat_path=job.run.heartbeat_path)
    watchdog.start()
    try:
        with process_group(process, agreement.connect("group"), job.run.train) as control:
            train(Trainer(job, state, watchdog, control, clock), agreement)
        watchdog.stop()
    except AgreedError:  # all ranks have come to it together
        watchdog.stop()
        raise
    except BaseException as error:
        watchdog.fail(error)


def build_state(job: Job, process: Process) -> TrainingState:
    """Build the model and its optimizer, from the checkpoint that the run goes on from."""
    state = build_training_state(job.run.model, job.run.train, process.device)
    if job.resume_from is not None:
        load_checkpoint(job.resume_from, state)
    return state


def train(trainer: Trainer, agreement: Agreement) -> None:
    """Train a run to its end, or as far as this start may go. Every rank."""
    trainer.start()
    if trainer.process.is_main:
        agreement.record_training_began()
    trainer.compile()
    batches = trainer.batches()
    for global_step in trainer.steps():
        trainer.train_step(global_step, batches)
        trainer.ending.heed_signals(global_step)
        trainer.report_if_due(global_step)
        if trainer.ending.saves_after(global_step):
            trainer.validate_and_save(global_step)
    batches.close()
    if trainer.process.is_main:
        trainer.finish()


class Trainer:
    """What one process holds while it trains a run, and the steps it takes.

    Args:
        group: of all processes, for what waits longer than a collective on their devices may.
    """

    step: TrainingStep

    def __init__(self, job: Job, state: TrainingState, watchdog: Watchdog,
                 group: dist.ProcessGroup, clock: PhaseClock) -> None:
        self.job, self.run, self.config, self.data = job, job.run, job.run.train, job.data
        self.process, self.clock = watchdog.process, clock
        self.state, self.model, self.watchdog, self.group = state, state.model, watchdog, group
        self.writer = BackgroundSaver(
            self.run.checkpoints_dir, keep=self.config.keep_checkpoints,
            protected=[job.resume_from.name] if job.resume_from else [], sign=watchdog.heartbeat)
        self.ending = Ending(job, clock=self.clock, watchdog=watchdog, group=group,
                             pace=self.pace)
        self.judges_speed, self.owes_validation = True, False
        self.log = Console(self.run, job.plan, clock=self.clock, is_active=self.process.is_main)
        self.window = LossWindow(self.process.device)

    @property
    def plan(self) -> BatchPlan:
        return self.ending.plan

    def start(self) -> None:
        """Put old records aside where the run does not go on from its end; say what begins."""
        self.watchdog.before_exit = self.break_off
        if self.process.is_main:
            remove_partial_checkpoints(self.run.checkpoints_dir)
            renew_links(self.run.checkpoints_dir)
            aside_dir = set_aside(self.run.run_dir, from_step=self.job.first_step)
            if aside_dir is not None:
                self.log.say(f"earlier checkpoints from step {self.job.first_step} on are"
                             f" now in {aside_dir}")
            if self.job.resume_from is not None:
                self.log.say(f"going on from {self.job.resume_from.path}")
        parameters = self.model.num_parameters()
        self.log.start(self.job.first_step, [
            *(f"warning: {warning}" for warning in [*self.run.warnings, *self.job.warnings]),
            *batch_arithmetic(self.plan),
            f"{parameters:,} parameters, {self.plan.num_tokens / parameters:.1f} tokens for each;"
            f" {choose_precision(self.config, self.process.device)} on {self.process.device.type}",
        ], owes_validation=self.job.owes_validation)
        self.clock.enter(COMPILE)  # what is done once, up to the end of the first step

    def compile(self) -> None:
        """Make ready to take steps. A collective: every rank."""
        failpoint("compile")
        self.step = TrainingStep(self.state, self.config, self.process)
        if self.step.why_eager:
            slower = "validates" if self.step.is_compiled else "trains"
            self.log.say(f"warning: compiling failed, so it {slower} slower: {self.step.why_eager}")
        if self.job.owes_validation:  # a signal came before it, in an earlier start
            self.validate_and_save(self.job.first_step - 1)

    def break_off(self, status: str, reason: str) -> None:
        """Leave in a hurry, but not before a checkpoint that is being written is whole."""
        if self.process.is_main:
            self.writer.wait(timeout=self.watchdog.deadlines.last_write)
            self.log.mark(status, reason)

    def steps(self) -> Iterator[int]:
        """The global steps of this start; its end may move while they are taken."""
        global_step = self.job.first_step
        while global_step <= self.ending.last_step:
            self.watchdog.heartbeat(global_step)
            failpoint("train")
            yield global_step
            global_step += 1

    def batches(self) -> Generator[Microbatch]:
        """This process's microbatches from here on, one read ahead."""
        steps = range(self.job.first_step, self.data.plan.num_steps)
        indices = self.plan.microbatch_indices(self.process.rank, steps=steps)
        batches = prefetch(self.data.train, indices, device=self.process.device)
        return self.clock.waiting_for(self.watchdog.watching(batches))

    def train_step(self, global_step: int, batches: Iterator[Microbatch]) -> None:
        """Take one global step. Every rank; after the first, nothing here waits for the device."""
        loss, grad_norm = self.step.take(
            batches, num_microbatches=self.plan.gradient_accumulation_steps,
            learning_rate=self.learning_rate(global_step),
        )
        self.window.add(loss, grad_norm)
        self.log.step()
        if global_step == self.job.first_step:
            loss.item()  # until the device is done
            gc.collect()
            gc.freeze()  # what is there by now stays: looking through it made for pauses
            self.clock.enter(TRAINING)
            self.log.measure_from(global_step)
            self.watchdog.start_hang_detection(self.config.hang_timeout_seconds)

    def learning_rate(self, global_step: int) -> float:
        return learning_rate_at(self.config, global_step, num_steps=self.plan.num_steps)

    def wait_for_all(self) -> None:
        """Wait for the slowest process, however long it takes. A collective: every rank."""
        with self.clock.phase(WAITING), self.watchdog.suspended():
            failpoint("wait")
            dist.barrier(self.group)

    def report_if_due(self, global_step: int) -> None:
        """Report after every few steps, and before a checkpoint, so that it splits no average.

        A collective: every rank.
        """
        if not (self.window.is_full or self.ending.saves_after(global_step)):
            return
        summary = self.window.summarise()
        self.log.report_steps(global_step, self.learning_rate(global_step), summary)
        self.tell_write_failure()
        self.ending.check_numbers(global_step, self.window.longest_skipped)
        num_steps = global_step - self.job.first_step  # measured, after the first
        if self.process.is_main and self.judges_speed and num_steps + 1 >= SPEED_CHECK_STEPS:
            self.judges_speed = False
            self.log.say(self.speed(num_steps).line())
        self.ending.keep_to_budget(global_step, self.log)

    def tell_write_failure(self) -> None:
        if failure := self.writer.take_failure():
            self.log.say(f"warning: {failure}; make room in {self.run.checkpoints_dir}: each later"
                         " checkpoint tries it again")

    def pace(self, num_steps: int) -> Pace:
        """Measure what the parts of the run take, from the last `num_steps`. Rank 0's counts."""
        self.clock.longest_write = self.writer.longest_write_seconds
        return Pace.measured(self.clock, num_steps=num_steps, plan=self.plan, train=self.config,
                             num_parameters=self.model.num_parameters())

    def speed(self, num_steps: int) -> Speed:
        """Tell how fast the last `num_steps` of this start were."""
        spent = self.clock.read_this_start()
        seconds = spent[TRAINING] + spent[WAITING]
        return Speed(
            tokens_per_second=num_steps * self.plan.tokens_per_step / seconds,
            num_processes=self.process.world_size,
            flops_per_token=flops_per_token(self.run.model),
            device_name=machine_facts(self.process, self.step.precision)["device"],
            precision=self.step.precision,
            attention_kernel=self.step.attention_kernel(),
            is_compiled=self.step.is_compiled,
            waiting_share=spent[WAITING] / seconds,
            microbatch_tokens=self.plan.tokens_per_microbatch,
            throttling=throttling(self.process.device),
        )

    def validate_and_save(self, global_step: int) -> None:
        """Do what is due between two steps. A collective: every rank."""
        self.wait_for_all()
        validation_loss = self.validate_if_due(global_step)
        self.ending.heed_signals(global_step)  # one may have cut the validation short
        if self.process.is_main:
            self.save_and_chart(global_step, validation_loss)
        self.wait_for_all()

    def validate_if_due(self, global_step: int) -> float | None:
        """Validate where `validate_on` says so. A collective if that is `all`: every rank.

        Gives the mean loss; None where it is not due, not here, or cut short by a signal.
        """
        validates_here = self.process.is_main or self.config.validate_on == "all"
        if not (validates_here and self.ending.validates_after(global_step)):
            return None
        with self.clock.phase(VALIDATION) as phase:
            loss = mean_loss(
                self.step, self.data.validation, shares=self.config.validate_on == "all",
                watched=lambda batches, count: self.log.validation_bar(
                    self.watchdog.watching(batches), count),
                is_cut_short=lambda: bool(self.watchdog.stop_signal))
        if loss is not None:
            self.log.report_validation(global_step, loss, phase.seconds)
            self.write_samples(global_step)
        return loss

    def write_samples(self, global_step: int) -> None:
        """Keep what the model makes of the run's prompts by now. Rank 0."""
        if self.process.is_main and (prompts := self.config.sample_prompts):
            with self.clock.phase(VALIDATION), autocast(self.step.precision, self.process.device):
                failure = try_to_write_samples(self.run.samples_path, self.model, prompts,
                                               self.data.tokenizer_name, global_step)
            self.log.warn("no samples", failure)

    def save_and_chart(self, global_step: int, validation_loss: float | None) -> None:
        """Do rank 0's work between two barriers."""
        train_loss = self.window.take_loss_since_checkpoint()
        by_train_loss = not self.config.validates and self.ending.is_due(
            global_step, self.config.checkpoint_interval)
        with self.clock.phase(CHECKPOINT):
            self.save(global_step, train_loss if by_train_loss else validation_loss, train_loss)
        self.chart()
        self.ending.lays_out_next = self.config.fit_budget  # now it is known what this costs

    def chart(self) -> None:
        with self.clock.phase(CHART):
            self.log.warn("no charts", try_to_draw_charts(self.run))
        gc.collect()  # what a chart is made of refers to itself

    def save(self, global_step: int, loss: float | None, train_loss: float) -> None:
        self.owes_validation = self.ending.validates_after(global_step) and loss is None
        self.writer.save(self.state, CheckpointMeta(
            global_step=global_step,
            tokens=(global_step + 1) * self.plan.tokens_per_step,
            loss=finite_or_none(loss),
            train_loss=finite_or_none(train_loss),
            seconds=self.clock.read(),
            usd=self.clock.usd(),
            num_steps=self.plan.num_steps if self.config.fit_budget else None,
            tokenizer=self.data.tokenizer_name,
            owes_validation=self.owes_validation,
            model=self.run.model,
            random_seed=self.config.random_seed,
            data=self.data.fingerprints,
        ))
        self.tell_write_failure()

    def finish(self) -> None:
        """Wait for the last checkpoint; write and print how it ended. Rank 0.

        Raises:
            UserError: the last checkpoint could not be written.
        """
        if self.job.is_trained:  # an earlier start was killed on its way out
            self.writer.prune()
            self.chart()
        with self.clock.phase(CHECKPOINT):
            self.writer.retry()
        best = best_of(list_checkpoints(self.run.checkpoints_dir))
        unwritten = self.log.finish(RunEnd(
            global_step=self.ending.last_step,
            stop_reason=self.ending.reason,
            owes_validation=self.owes_validation,
            num_parameters=self.model.num_parameters(),
            best=best and best.facts(),
            checkpoints=self.writer.facts(),
            machine=machine_facts(self.process, self.step.precision)
            | {"compiled": self.step.is_compiled},
        ))
        if self.writer.is_behind:
            unwritten = self.writer.take_failure()
        if unwritten:
            raise UserError(f"{unwritten}; make room in {self.run.run_dir} and type the same"
                            " command: it goes on from the last whole one", DISK)
        self.tell_write_failure()
        if self.data.tokenizer_name is not None:
            self.sample(self.data.tokenizer_name)

    def sample(self, tokenizer_name: str) -> None:
        """Show what the model writes. That it cannot fails no run. Rank 0."""
        try:
            with autocast(self.step.precision, self.process.device):
                self.log.say(f"sample:\n{sample_text(self.model, tokenizer_name)}")
        except Exception as error:
            self.log.say(f"warning: no sample: {type(error).__name__}: {error}")

if __name__ == "__main__":
    main()
