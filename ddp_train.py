"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. Reads as the story of one run."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NoReturn

STARTED = time.perf_counter()
if __name__ == "__main__":
    gc.disable()  # looking through what is imported takes a tenth of a start

from command_line import Options, read_command_line
from run_config import UserError, load_run


def stop_with(error: UserError) -> NoReturn:
    print(f"Error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


# Before torch is imported: --help and a typing error are answered at once. Processes of torchrun
# check later, together, so that one of them speaks for all.
if __name__ == "__main__" and "RANK" not in os.environ:
    try:
        options = read_command_line()
        load_run(options.runs_dir, options.run)
    except UserError as error:
        stop_with(error)

import torch
import torch.distributed as dist

from charting import draw_charts
from checkpoint_writer import CheckpointWriter
from checkpointing import (
    BEST,
    CheckpointMeta,
    find_checkpoint,
    load_checkpoint,
    remove_partial_checkpoints,
    renew_links,
    set_aside,
)
from expected_speed import SPEED_CHECK_STEPS, Speed, flops_per_token
from job import Job, prepare
from launching import (
    AgreedError,
    Agreement,
    Process,
    autocast,
    choose_precision,
    default_num_processes,
    machine_facts,
    process_group,
    start_torchrun,
    started_by_torchrun,
    this_process,
    throttling,
)
from memory_meters import keep_freed_memory
from microbatch_search import search
from optimization import learning_rate_at
from run_clock import (
    CHART,
    CHECKPOINT,
    COMPILE,
    REPORT_INTERVAL,
    TRAINING,
    VALIDATION,
    WAITING,
    Budget,
    Pace,
    PhaseClock,
)
from run_log import RunEnd, RunLog, batch_arithmetic
from run_metrics import StepWindow, finite_or_none, read_metrics
from sampling import SamplingOptions, generate_tokens
from token_dataset import Microbatch, prefetch
from tokenizer import decode, load_tokenizer
from training_step import TrainingState, TrainingStep, build_training_state


def main() -> None:
    clock = PhaseClock(since=STARTED)
    try:
        if started_by_torchrun():
            clock.take_over()
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            work(agreement, clock)
        else:
            sys.exit(launch(read_command_line(), clock))
    except AgreedError as error:
        agreement.tell_once(f"Error: {error}")
        sys.exit(2)
    except UserError as error:
        stop_with(error)


def launch(options: Options, clock: PhaseClock) -> int:
    """Check the run in this one process, then train it under torchrun; give its exit status."""
    num_processes = options.nproc_per_node or default_num_processes()
    if not options.find_max_microbatch:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        alone = Process(rank=0, local_rank=0, world_size=num_processes, device=device)
        job = prepare(options, alone, clock, lambda step, part: part())
        if job.is_finished:
            print(job.finished_line())
            return 0
    clock.hand_over()
    return start_torchrun(__file__, sys.argv[1:], num_processes=num_processes)


def work(agreement: Agreement, clock: PhaseClock) -> None:
    """Be one of the processes that torchrun has started. Every rank."""
    options = agreement.on("command line", read_command_line)
    process = agreement.on("process", this_process)
    if options.find_max_microbatch:
        run = agreement.on("configs", lambda: load_run(options.runs_dir, options.run))
        search(run, process, agreement, memory_limit_gib=options.memory_limit_gib,
               save=options.save)
        return
    if process.device.type == "cpu":
        keep_freed_memory()
    job = prepare(options, process, clock, agreement.on)
    agreement.same("job", (job.run.model, job.run.train, job.plan, job.first_step))
    if job.is_finished:
        if process.is_main:
            print(job.finished_line())
        return
    state = agreement.on("state", lambda: build_state(job, process))
    with process_group(process):
        train(Trainer(job, process, state, clock))


def build_state(job: Job, process: Process) -> TrainingState:
    """Build the model and its optimizer, from the checkpoint that the run goes on from."""
    state = build_training_state(job.run.model, job.run.train, process.device)
    if job.resume_from is not None:
        load_checkpoint(job.resume_from, state)
    return state


def train(trainer: Trainer) -> None:
    """Train a run to its end, or as far as this start may go. Every rank."""
    trainer.start()
    trainer.compile()
    batches = trainer.batches()
    for global_step in trainer.steps():
        trainer.train_step(global_step, batches)
        trainer.report_if_due(global_step)
        if trainer.saves_after(global_step):
            trainer.wait_for_all()
            validation_loss = trainer.validate_if_due(global_step)
            if trainer.process.is_main:
                trainer.save_and_chart(global_step, validation_loss)
            trainer.wait_for_all()
    batches.close()
    if trainer.process.is_main:
        trainer.finish()


class Trainer:
    """What one process holds while it trains a run, and the steps it takes."""

    step: TrainingStep

    def __init__(self, job: Job, process: Process, state: TrainingState,
                 clock: PhaseClock) -> None:
        self.job, self.run, self.config = job, job.run, job.run.train
        self.data, self.plan, self.process = job.data, job.plan, process
        self.state, self.model, self.clock = state, state.model, clock
        self.writer = CheckpointWriter(self.run.checkpoints_dir)
        self.last_step = self._last_step_of_this_start()
        self.stop_reason = "--max-steps" if job.options.max_steps else None
        self.budget = Budget(self.config, clock)
        self.lays_out_next = self.config.fit_budget
        self.judges_speed = True
        self.log = RunLog(self.run, self.plan, clock=clock, is_active=process.is_main)
        self.window = StepWindow(process.device)

    def _last_step_of_this_start(self) -> int:
        max_steps = self.job.options.max_steps or self.plan.num_steps
        return min(self.plan.num_steps, self.job.first_step + max_steps) - 1

    def start(self) -> None:
        """Put old records aside where the run does not go on from its end; say what begins."""
        if self.process.is_main:
            remove_partial_checkpoints(self.run.checkpoints_dir)
            renew_links(self.run.checkpoints_dir)
            aside_dir = set_aside(
                self.run.run_dir,
                lambda checkpoint: checkpoint.meta.global_step >= self.job.first_step,
            )
            if aside_dir is not None:
                self.log.say(f"earlier checkpoints from step {self.job.first_step} on are"
                             f" now in {aside_dir}")
            if self.job.resume_from is not None:
                self.log.say(f"going on from {self.job.resume_from.path}")
        parameters = self.model.num_parameters()
        self.log.start(self.job.first_step, [
            *(f"warning: {warning}" for warning in self.run.warnings),
            *batch_arithmetic(self.plan),
            f"{parameters:,} parameters, {self.plan.num_tokens / parameters:.1f} tokens for each;"
            f" {choose_precision(self.config, self.process.device)} on {self.process.device.type}",
        ])
        self.clock.enter(COMPILE)  # what is done once, up to the end of the first step

    def compile(self) -> None:
        """Make ready to take steps. A collective: every rank."""
        self.step = TrainingStep(self.state, self.config, self.process)
        if self.step.why_eager:
            self.log.say(f"warning: compiling failed, so it trains slower: {self.step.why_eager}")

    def steps(self) -> Iterator[int]:
        """The global steps of this start; its end may move while they are taken."""
        global_step = self.job.first_step
        while global_step <= self.last_step:
            yield global_step
            global_step += 1

    def batches(self) -> Generator[Microbatch]:
        """This process's microbatches from here on, one read ahead."""
        steps = range(self.job.first_step, self.data.plan.num_steps)
        indices = self.plan.microbatch_indices(self.process.rank, steps=steps)
        return self.clock.waiting_for(
            prefetch(self.data.train, indices, device=self.process.device))

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

    def learning_rate(self, global_step: int) -> float:
        return learning_rate_at(self.config, global_step, num_steps=self.plan.num_steps)

    def wait_for_all(self) -> None:
        """Wait for the slowest process. A collective: every rank."""
        with self.clock.phase(WAITING):
            dist.barrier()

    def report_if_due(self, global_step: int) -> None:
        """Report after every few steps, and before a checkpoint, so that it splits no average.

        A collective: every rank.
        """
        if not (self.window.is_full or self.saves_after(global_step)):
            return
        summary = self.window.summarise()
        self.log.report_steps(global_step, self.learning_rate(global_step), summary)
        num_steps = global_step - self.job.first_step  # measured, after the first
        if self.process.is_main and self.judges_speed and num_steps + 1 >= SPEED_CHECK_STEPS:
            self.judges_speed = False
            self.log.say(self.speed(num_steps).line())
        if self.budget.is_limited and global_step < self.last_step:
            self.keep_to_budget(global_step)

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

    def keep_to_budget(self, global_step: int) -> None:
        """Let rank 0's clock say where the run has to end. A collective: every rank."""
        self.clock.longest_write = self.writer.longest_write_seconds
        pace = Pace.measured(
            self.clock, num_steps=global_step - self.job.first_step, plan=self.plan,
            train=self.config, num_parameters=self.model.num_parameters(),
        )
        if self.config.fit_budget:
            self.lay_out(self._from_main(self._fitting_steps(global_step, pace)))
        if self._from_main(int(self._is_spent_after(global_step, pace))):
            self.last_step = global_step
            self.stop_reason = self.budget.nearest_limit()

    def _from_main(self, number: int) -> int:
        decided = torch.tensor(number, device=self.process.device)
        dist.broadcast(decided, src=0)
        return int(decided.item())

    def _fitting_steps(self, global_step: int, pace: Pace) -> int:
        """Count the steps that the budget has room for, once they can be judged. Rank 0."""
        is_judged = global_step - self.job.first_step + 1 >= 2 * REPORT_INTERVAL
        if not (self.lays_out_next and is_judged):
            return self.plan.num_steps
        self.lays_out_next = False
        affordable = self.budget.affordable_steps(pace)
        return min(self.data.plan.num_steps, global_step + 1 + affordable)

    def lay_out(self, num_steps: int) -> None:
        """Let the schedule end after another number of steps. Every rank."""
        if num_steps != self.plan.num_steps:
            self.plan = replace(self.plan, num_steps=num_steps)
            self.last_step = self._last_step_of_this_start()
            self.log.lay_out(self.plan)

    def _is_spent_after(self, global_step: int, pace: Pace) -> bool:
        ahead = range(global_step + 1, min(global_step + REPORT_INTERVAL, self.last_step) + 1)
        due = [global_step, *ahead]  # what this step brings comes after its report
        saves_later = self.last_step not in ahead
        return not self.budget.affords(pace.seconds(
            len(ahead), num_validations=sum(map(self.validates_after, due)),
            num_savings=sum(map(self.saves_after, due)) + saves_later,
        ) + pace.last_write)

    def validates_after(self, global_step: int) -> bool:
        return self.config.validates and self._is_due(global_step, self.config.validation_interval)

    def saves_after(self, global_step: int) -> bool:
        return (
            self.validates_after(global_step)
            or self._is_due(global_step, self.config.checkpoint_interval)
            or global_step == self.last_step
        )

    def _is_due(self, global_step: int, interval: int | None) -> bool:
        is_last = global_step == self.plan.num_steps - 1
        return is_last or (interval is not None and (global_step + 1) % interval == 0)

    def validate_if_due(self, global_step: int) -> float | None:
        """Validate where `validate_on` says so. A collective if that is `all`: every rank."""
        validates_here = self.process.is_main or self.config.validate_on == "all"
        if not (validates_here and self.validates_after(global_step)):
            return None
        with self.clock.phase(VALIDATION) as phase:
            loss = self.validate()
        self.log.report_validation(global_step, loss, phase.seconds)
        return loss

    @torch.inference_mode()
    def validate(self) -> float:
        """Give the mean loss over the run's validation sequences, in nats a token."""
        data, shares = self.data.validation, self.config.validate_on == "all"
        start, stride = (self.process.rank, self.process.world_size) if shares else (0, 1)
        indices = range(start, len(data), stride)
        batches = prefetch(data, indices, device=self.process.device)
        total = torch.zeros((), dtype=torch.float64, device=self.process.device)
        self.model.eval()
        for _, token_ids, targets in self.log.validation_bar(batches, len(indices)):
            total += self.step.validation_loss(token_ids, targets) * len(token_ids)
        self.model.train()
        if shares:
            dist.all_reduce(total)
        return total.item() / self.config.num_validation_sequences

    def save_and_chart(self, global_step: int, validation_loss: float | None) -> None:
        """Do rank 0's work between two barriers."""
        train_loss = self.window.take_loss_since_checkpoint()
        by_train_loss = not self.config.validates and self._is_due(
            global_step, self.config.checkpoint_interval)
        with self.clock.phase(CHECKPOINT):
            self.save(global_step, train_loss if by_train_loss else validation_loss, train_loss)
        with self.clock.phase(CHART):
            draw_charts(self.run.run_dir, read_metrics(self.run.metrics_path))
        gc.collect()  # what a chart is made of refers to itself
        self.lays_out_next = self.config.fit_budget  # now that it is known what this costs

    def save(self, global_step: int, loss: float | None, train_loss: float) -> None:
        meta = CheckpointMeta(
            global_step=global_step,
            tokens=(global_step + 1) * self.plan.tokens_per_step,
            loss=finite_or_none(loss),
            train_loss=finite_or_none(train_loss),
            seconds=self.clock.read(),
            usd=self.clock.usd(),
            num_steps=self.plan.num_steps if self.config.fit_budget else None,
            tokenizer=self.data.tokenizer_name,
        )
        self.writer.save(self.state, meta)

    def finish(self) -> None:
        """Wait for the last checkpoint; write and print how it ended. Rank 0."""
        with self.clock.phase(CHECKPOINT):
            self.writer.wait()
        best = find_checkpoint(self.run.checkpoints_dir, BEST)
        end = RunEnd(
            global_step=self.last_step,
            stop_reason=self.stop_reason,
            num_parameters=self.model.num_parameters(),
            best={"checkpoint": best.name, "global_step": best.meta.global_step,
                  "loss": best.meta.loss},
            checkpoints={"saved": self.writer.num_checkpoints,
                         "stalled_seconds": self.clock.read_this_start()[CHECKPOINT],
                         "longest_write_seconds": self.writer.longest_write_seconds},
            machine=machine_facts(self.process, self.step.precision)
            | {"compiled": self.step.is_compiled},
        )
        self.log.finish(end)
        self.print_sample()

    def print_sample(self) -> None:
        """Print what the model makes up, where its tokenizer is known."""
        if self.data.tokenizer_name is not None:
            tokenizer = load_tokenizer(self.data.tokenizer_name)
            with autocast(self.step.precision, self.process.device):
                ids = generate_tokens(self.model, [tokenizer.eot_token],
                                      SamplingOptions(max_new_tokens=400))
            self.log.say(f"sample:\n{decode(tokenizer, ids)}")


if __name__ == "__main__":
    main()
