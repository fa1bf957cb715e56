"""A run made ready: all that can be checked before the first collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from batch_plan import BatchPlan
from checkpointing import (
    LATEST,
    Checkpoint,
    check_position,
    check_weights_fit,
    find_checkpoint,
)
from command_line import Options
from launching import Process
from preparation.providing import provide_dataset
from run_clock import DOWNLOAD, Budget, PhaseClock
from run_config import Run, UserError, load_run
from run_metrics import spent_before
from token_dataset import RunData, check_token_range, open_run_data

Step = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Job:
    """A run, checked and ready to start."""

    run: Run
    data: RunData
    resume_from: Checkpoint | None
    options: Options

    @property
    def plan(self) -> BatchPlan:
        """The data's plan, or a shorter one that `fit_budget` laid out in an earlier start."""
        laid_out = self.resume_from.meta.num_steps if self.resume_from else None
        if not self.run.train.fit_budget or laid_out is None:
            return self.data.plan
        return replace(self.data.plan, num_steps=min(laid_out, self.data.plan.num_steps))

    @property
    def first_step(self) -> int:
        return self.resume_from.meta.global_step + 1 if self.resume_from else 0

    @property
    def is_finished(self) -> bool:
        return self.first_step >= self.plan.num_steps

    def finished_line(self) -> str:
        return (f"{self.run.name} is complete: {self.plan.num_steps:,} steps,"
                f" {self.plan.num_tokens:,} tokens; --fresh starts it over")


def prepare(options: Options, process: Process, clock: PhaseClock, step: Step) -> Job:
    """Check everything that can be checked before the first collective. Every rank.

    Args:
        step: runs one part of it on every rank, see `Agreement.on`.

    Raises:
        UserError: on every rank, whichever found it.
    """
    run = step("configs",
               lambda: load_run(options.runs_dir, options.run).priced(options.usd_per_hour))
    dataset_dir = options.datasets_dir / run.train.dataset
    with clock.phase(DOWNLOAD):
        step("dataset", lambda: provide_dataset(dataset_dir, run.train.dataset)
             if process.is_main_of_node else None)
    data = step("data", lambda: open_run_data(run, dataset_dir, world_size=process.world_size))
    step("token ids", lambda: check_token_range(run, data) if process.is_main_of_node else None)
    resume_from = step("checkpoint", lambda: find_resume_point(run, options, data.plan))
    job = Job(run, data, resume_from, options)
    if resume_from is not None:
        clock.go_on_from(resume_from.meta.seconds, resume_from.meta.usd)
    if not options.fresh:
        clock.count_lost(*spent_before(run.metrics_path, run.summary_path))
    clock.usd_per_hour = run.train.usd_per_hour
    step("budget", lambda: check_budget(job, clock))
    return job


def find_resume_point(run: Run, options: Options, plan: BatchPlan) -> Checkpoint | None:
    """Find the checkpoint that the run goes on from, and check that it fits."""
    if options.fresh:
        return None
    checkpoint = find_checkpoint(run.checkpoints_dir, options.checkpoint or LATEST)
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; start without naming one")
    if checkpoint is not None:
        check_weights_fit(checkpoint, run.model)
        check_position(checkpoint, plan)
    return checkpoint


def check_budget(job: Job, clock: PhaseClock) -> None:
    """Refuse to go on with a run that has spent all it may spend."""
    budget = Budget(job.run.train, clock)
    if not job.is_finished and budget.seconds_left() <= 0:
        raise UserError(f"{job.run.train_path}: {budget.nearest_limit()}; raise it to go on")
