"""Train a run: `torchrun --nproc_per_node=8 ddp_train.py RUN`. Reads as the story of one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from run_config import BatchPlan, Run, UserError, load_run


@dataclass(frozen=True)
class Options:
    """The command line."""

    run: str
    checkpoint: str | None
    datasets_dir: Path
    runs_dir: Path
    nproc_per_node: int | None
    max_steps: int | None
    fresh: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.argument("checkpoint", required=False)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True, help="Where token datasets lie; made if missing.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True, help="Where the run directories lie.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N",
              help="Processes to start, when not started by torchrun.  [default: one a GPU]")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N",
              help="Stop after N global steps of this start, leaving a checkpoint.")
@click.option("--fresh", is_flag=True,
              help="Start over; earlier checkpoints are set aside, never deleted.")
def command_line(**options: Any) -> Options:
    """Train RUN, a directory in --runs-dir with a model.json and a train.json.

    A run that has a checkpoint goes on from its latest one; CHECKPOINT names another one to go
    on from: latest, best or a checkpoint directory's name. Started without torchrun, the script
    starts torchrun itself.
    """
    return Options(**options)


def read_command_line() -> Options:
    """Parse the command line. Raises: UserError; after --help it exits."""
    try:
        options = command_line.main(standalone_mode=False)
    except click.ClickException as error:
        raise UserError(f"{error.format_message()} See --help.") from None
    if not isinstance(options, Options):  # --help was asked for, and has been printed
        sys.exit(0)
    return options


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
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from charting import draw_charts
from checkpointing import (
    BEST,
    LATEST,
    Checkpoint,
    CheckpointMeta,
    TrainingState,
    check_position,
    check_weights_fit,
    find_checkpoint,
    load_checkpoint,
    remove_partial_checkpoints,
    renew_links,
    save_checkpoint,
    set_aside,
)
from dataset_preparation import provide_dataset
from gpt import GPTModel
from launching import (
    AgreedError,
    Agreement,
    Process,
    autocast,
    choose_precision,
    default_num_processes,
    machine_facts,
    process_group,
    seed_for,
    set_matmul_precision,
    share_cpu_cores,
    start_torchrun,
    started_by_torchrun,
    this_process,
)
from optimization import build_optimizer, clip_gradients, learning_rate_at, set_learning_rate
from run_log import RunEnd, RunLog, batch_arithmetic
from run_metrics import (
    CHART,
    CHECKPOINT,
    VALIDATION,
    PhaseClock,
    StepWindow,
    finite_or_none,
    read_metrics,
)
from sampling import SamplingOptions, generate_tokens
from token_dataset import RunData, check_token_range, open_run_data, prefetch
from tokenizer import decode, load_tokenizer

Step = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Job:
    """A run, checked and ready to start."""

    run: Run
    data: RunData
    resume_from: Checkpoint | None
    options: Options

    @property
    def first_step(self) -> int:
        return self.resume_from.meta.global_step + 1 if self.resume_from else 0

    @property
    def is_finished(self) -> bool:
        return self.first_step >= self.data.plan.num_steps


def main() -> None:
    try:
        if started_by_torchrun():
            agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            work(agreement)
        else:
            sys.exit(launch(read_command_line()))
    except AgreedError as error:
        agreement.tell_once(f"Error: {error}")
        sys.exit(2)
    except UserError as error:
        stop_with(error)


def launch(options: Options) -> int:
    """Check the run in this one process, then train it under torchrun; give its exit status."""
    num_processes = options.nproc_per_node or default_num_processes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = Process(rank=0, local_rank=0, world_size=num_processes, device=device)
    job = prepare(options, alone, lambda step, part: part())
    if job.is_finished:
        print(finished_line(job))
        return 0
    return start_torchrun(__file__, sys.argv[1:], num_processes=num_processes)


def work(agreement: Agreement) -> None:
    """Be one of the processes that torchrun has started. Every rank."""
    options = agreement.on("command line", read_command_line)
    process = agreement.on("process", this_process)
    job = prepare(options, process, agreement.on)
    agreement.same("job", (job.run.model, job.run.train, job.data.plan, job.first_step))
    if job.is_finished:
        if process.is_main:
            print(finished_line(job))
        return
    state = agreement.on("state", lambda: build_state(job, process))
    with process_group(process):
        train(Trainer(job, process, state))


def prepare(options: Options, process: Process, step: Step) -> Job:
    """Check everything that can be checked before the first collective. Every rank.

    Args:
        step: runs one part of it on every rank, see `Agreement.on`.

    Raises:
        UserError: on every rank, whichever found it.
    """
    run = step("configs", lambda: load_run(options.runs_dir, options.run))
    dataset_dir = options.datasets_dir / run.train.dataset
    step("dataset", lambda: provide_dataset(dataset_dir, run.train.dataset)
         if process.is_main_of_node else None)
    data = step("data", lambda: open_run_data(run, dataset_dir, world_size=process.world_size))
    step("token ids", lambda: check_token_range(run, data) if process.is_main_of_node else None)
    resume_from = step("checkpoint", lambda: find_resume_point(run, options, data.plan))
    return Job(run, data, resume_from, options)


def find_resume_point(run: Run, options: Options, plan: BatchPlan) -> Checkpoint | None:
    """Find the checkpoint that the run goes on from, and check that it fits."""
    if options.fresh and options.checkpoint:
        raise UserError(f"--fresh starts over, {options.checkpoint} goes on: name one of the two")
    if options.fresh:
        return None
    checkpoint = find_checkpoint(run.checkpoints_dir, options.checkpoint or LATEST)
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; start without naming one")
    if checkpoint is not None:
        check_weights_fit(checkpoint, run.model)
        check_position(checkpoint, plan)
    return checkpoint


def finished_line(job: Job) -> str:
    return (f"{job.run.name} is complete: {job.data.plan.num_steps:,} steps,"
            f" {job.data.plan.num_tokens:,} tokens; --fresh starts it over")


def build_state(job: Job, process: Process) -> TrainingState:
    """Build the model and its optimizer, from the checkpoint that the run goes on from."""
    config = job.run.train
    torch.manual_seed(config.random_seed)  # the same weights on every rank
    model = GPTModel(job.run.model).to(process.device)
    uses_fp16 = choose_precision(config, process.device) == "fp16"
    scaler = GradScaler(process.device.type, enabled=uses_fp16)
    state = TrainingState(model, build_optimizer(model, config), scaler)
    if job.resume_from is not None:
        load_checkpoint(job.resume_from, state)
    return state


def train(trainer: Trainer) -> None:
    """Train a run to its end, or for `--max-steps` steps. Every rank."""
    trainer.start()
    batches = trainer.batches()
    for global_step in trainer.steps:
        trainer.train_step(global_step, batches)
        trainer.report_if_due(global_step)
        if trainer.saves_after(global_step):
            dist.barrier()
            if trainer.process.is_main:
                trainer.validate_save_and_chart(global_step)
            dist.barrier()
    batches.close()
    if trainer.process.is_main:
        trainer.finish()


class Trainer:
    """What one process holds while it trains a run, and the steps it takes."""

    def __init__(self, job: Job, process: Process, state: TrainingState) -> None:
        self.run, self.data, self.plan = job.run, job.data, job.data.plan
        self.job, self.process, self.config = job, process, job.run.train
        share_cpu_cores(process)
        self.precision = choose_precision(self.config, process.device)
        set_matmul_precision(self.precision)
        self.state, self.model = state, state.model
        self.parallel_model = self._parallel(state.model)
        max_steps = job.options.max_steps or self.plan.num_steps
        self.steps = range(job.first_step, min(self.plan.num_steps, job.first_step + max_steps))
        self.clock = PhaseClock(job.resume_from.meta.seconds if job.resume_from else {})
        self.log = RunLog(self.run, self.plan, clock=self.clock, is_active=process.is_main)
        self.window = StepWindow(process.device)

    def _parallel(self, model: GPTModel) -> nn.Module:
        if self.process.world_size == 1:
            return model  # nobody to share gradients with: DDP would only cost time
        device_ids = [self.process.device] if self.process.device.type == "cuda" else None
        return DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True
        )

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
            f" {self.precision} on {self.process.device.type}",
        ])

    def batches(self) -> Generator[tuple[Tensor, Tensor]]:
        """This process's microbatches from here on, one read ahead."""
        indices = self.plan.microbatch_indices(self.process.rank, steps=self.steps)
        return prefetch(self.data.train, indices, device=self.process.device)

    def train_step(self, global_step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Take one global step. Every rank; nothing here waits for the device."""
        optimizer, scaler = self.state.optimizer, self.state.scaler
        set_learning_rate(optimizer, self.learning_rate(global_step))
        loss = self.accumulate_gradients(global_step, batches)
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(self.model, self.config.clipping_max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        self.window.add(loss, grad_norm)
        self.log.step()

    def accumulate_gradients(
        self, global_step: int, batches: Iterator[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Sum the gradients of one global step; give this process's mean loss, () float32."""
        num_microbatches = self.plan.gradient_accumulation_steps
        step_loss = torch.zeros((), device=self.process.device)
        for accumulation_step in range(num_microbatches):
            token_ids, targets = next(batches)  # each (B, T)
            index = self.plan.microbatch_index(
                global_step, accumulation_step, rank=self.process.rank
            )
            torch.manual_seed(seed_for(self.config.random_seed, index))
            # DDP reads require_backward_grad_sync in the forward pass, so forward and backward
            # both stand inside no_sync().
            with self._gradient_sync(accumulation_step == num_microbatches - 1):
                with autocast(self.precision, self.process.device):
                    loss = self.parallel_model(token_ids, targets) / num_microbatches
                self.state.scaler.scale(loss).backward()
            step_loss += loss.detach()
        return step_loss

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or self.parallel_model is self.model:
            return nullcontext()
        return self.parallel_model.no_sync()

    def learning_rate(self, global_step: int) -> float:
        return learning_rate_at(self.config, global_step, num_steps=self.plan.num_steps)

    def report_if_due(self, global_step: int) -> None:
        """Report after every few steps, and before a checkpoint, so that it splits no average.

        A collective: every rank.
        """
        if self.window.is_full or self.saves_after(global_step):
            summary = self.window.summarise()
            self.log.report_steps(global_step, self.learning_rate(global_step), summary)

    def validates_after(self, global_step: int) -> bool:
        return self.config.validates and self._is_due(global_step, self.config.validation_interval)

    def saves_after(self, global_step: int) -> bool:
        return (
            self.validates_after(global_step)
            or self._is_due(global_step, self.config.checkpoint_interval)
            or global_step == self.steps[-1]
        )

    def _is_due(self, global_step: int, interval: int | None) -> bool:
        is_last = global_step == self.plan.num_steps - 1
        return is_last or (interval is not None and (global_step + 1) % interval == 0)

    def validate_save_and_chart(self, global_step: int) -> None:
        """Do rank 0's work between two barriers."""
        train_loss = self.window.take_loss_since_checkpoint()
        by_train_loss = not self.config.validates and self._is_due(
            global_step, self.config.checkpoint_interval)
        loss = train_loss if by_train_loss else None
        if self.validates_after(global_step):
            with self.clock.phase(VALIDATION) as phase:
                loss = self.validate()
            self.log.report_validation(global_step, loss, phase.seconds)
        with self.clock.phase(CHECKPOINT):
            self.save(global_step, loss, train_loss)
        with self.clock.phase(CHART):
            draw_charts(self.run.run_dir, read_metrics(self.run.metrics_path))

    @torch.inference_mode()
    def validate(self) -> float:
        """Give the mean loss over the run's validation microbatches, in nats a token."""
        num_batches = self.config.validation_batches
        batches = prefetch(self.data.validation, range(num_batches), device=self.process.device)
        total = torch.zeros((), dtype=torch.float64, device=self.process.device)
        self.model.eval()
        for token_ids, targets in self.log.validation_bar(batches, num_batches):
            with autocast(self.precision, self.process.device):
                total += self.model(token_ids, targets)
        self.model.train()
        return total.item() / num_batches

    def save(self, global_step: int, loss: float | None, train_loss: float) -> None:
        meta = CheckpointMeta(
            global_step=global_step,
            tokens=(global_step + 1) * self.plan.tokens_per_step,
            loss=finite_or_none(loss),
            train_loss=finite_or_none(train_loss),
            seconds=self.clock.read(),
            tokenizer=self.data.tokenizer_name,
        )
        save_checkpoint(self.run.checkpoints_dir, self.state, meta)

    def finish(self) -> None:
        """Write and print how it ended. Rank 0."""
        best = find_checkpoint(self.run.checkpoints_dir, BEST)
        end = RunEnd(
            global_step=self.steps[-1],
            num_parameters=self.model.num_parameters(),
            seconds=self.clock.read(),
            best={"checkpoint": best.name, "global_step": best.meta.global_step,
                  "loss": best.meta.loss},
            machine=machine_facts(self.process, self.precision),
        )
        self.log.finish(end)
        self.print_sample()

    def print_sample(self) -> None:
        """Print what the model makes up, where its tokenizer is known."""
        if self.data.tokenizer_name is not None:
            tokenizer = load_tokenizer(self.data.tokenizer_name)
            with autocast(self.precision, self.process.device):
                ids = generate_tokens(self.model, [tokenizer.eot_token],
                                      SamplingOptions(max_new_tokens=400))
            self.log.say(f"sample:\n{decode(tokenizer, ids)}")


if __name__ == "__main__":
    main()
