"""A run made ready: all that can be checked before the first collective."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import dataclass, replace

from basics.errors import UserError
from basics.failpoints import failpoint
from basics.manifest import digest_of
from checkpointing import (
    BEST,
    LATEST,
    Checkpoint,
    find_checkpoint,
    newest_whole,
    open_checkpoint,
)
from gpt import num_parameters
from preparation.ensure_dataset import provide_dataset
from processes.command_line import Options
from processes.launch import Process
from processes.startup_agreement import Agreement
from reporting.clock import BYTES_PER_PARAMETER_SAVED, DOWNLOAD, Budget, PhaseClock
from reporting.metrics_file import check_records, spent_before
from reporting.summary import FINISHED, is_marked
from run_config import Run, check_inside, load_run
from tokens.batch_plan import BatchPlan
from tokens.batches import RunData, check_token_range, open_run_data
from trainer.resuming import changed_validation, check_identity, check_position, check_weights_fit


@dataclass(frozen=True)
class Job:
    """A run, checked and ready to start."""

    run: Run
    data: RunData
    resume_from: Checkpoint | None
    options: Options
    has_ended: bool  # an earlier start has come through to the very end
    warnings: tuple[str, ...] = ()

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
    def is_trained(self) -> bool:
        """Whether nothing is left to be computed."""
        return self.first_step >= self.plan.num_steps and not self.owes_validation

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to be done: a kill may come between the last step and the end."""
        return self.is_trained and self.has_ended

    @property
    def owes_validation(self) -> bool:
        """Whether a signal kept an earlier start from validating at its end."""
        return bool(self.resume_from and self.resume_from.meta.owes_validation)

    def identity(self) -> object:
        """Give what has to be the same on all processes."""
        checkpoint = self.resume_from and (self.resume_from.name, digest_of(self.resume_from.path))
        return self.run.model, self.run.train, self.data.plan, self.data.fingerprints, checkpoint

    def finished_line(self) -> str:
        return (f"{self.run.name} is complete: {self.plan.num_steps:,} steps,"
                f" {self.plan.num_tokens:,} tokens; --fresh starts it over")


def prepare(options: Options, process: Process, clock: PhaseClock,
            agreement: Agreement) -> Job:
    """Check everything that can be checked before the first collective. Every rank.

    Raises:
        UserError: on every rank, whichever found it.
    """
    step = agreement.run
    run = step("configs",
               lambda: load_run(options.runs_dir, options.run).priced(options.usd_per_hour))
    step("run directory", lambda: check_run_dir(run))
    dataset_dir = options.datasets_dir / run.train.dataset
    step("dataset directory",
         lambda: check_inside(dataset_dir, options.datasets_dir, "--datasets-dir"))
    with clock.phase(DOWNLOAD):
        step("dataset", lambda: provide_dataset(dataset_dir, run.train.dataset)
             if process.is_main_of_node else None)
    data = step("data", lambda: open_run_data(run, dataset_dir, world_size=process.world_size))
    step("token ids", lambda: check_token_range(run, data) if process.is_main_of_node else None)
    has_ended, name, *warnings = json.loads(agreement.from_rank_0(
        "checkpoint", lambda: json.dumps([is_marked(run, FINISHED),
                                          *choose_checkpoint(run, options)])))
    sees_first = process.is_main_of_node and not process.is_main  # of what lies on this machine
    resume_from = step("resuming", lambda: check_resume_point(
        run, name, data, thoroughly=sees_first) if name else None)
    if resume_from is not None:
        warnings += changed_validation(resume_from, data.fingerprints)
    job = Job(run, data, resume_from, options, has_ended, tuple(warnings))
    if resume_from is not None:
        clock.go_on_from(resume_from.meta.seconds, resume_from.meta.usd)
    if not options.fresh:
        clock.count_lost(*step("spent", lambda: spent_before(run.metrics_path, run.summary_path)))
    clock.usd_per_hour = run.train.usd_per_hour
    step("budget", lambda: check_budget(job, clock))
    step("room", lambda: check_room(job) if process.is_main else None)
    return job


def check_run_dir(run: Run) -> None:
    """Refuse what a stranger may have laid where a run reads and writes.

    Raises:
        UserError: naming the first place that is not what a run has there.
    """
    failpoint("prepare")
    for path in (run.checkpoints_dir, run.run_dir / "set-aside"):
        check_inside(path, run.run_dir, "--runs-dir")
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise UserError(f"{path}: is not a directory; move it away")
    for path in (run.metrics_path, run.samples_path, run.evaluations_path, run.summary_path,
                 run.heartbeat_path):
        check_records(path)
    for path in (run.checkpoints_dir / LATEST, run.checkpoints_dir / BEST):
        if path.exists() and not path.is_symlink():
            raise UserError(f"{path}: is not a link; move it away: a run points it to a checkpoint")


def choose_checkpoint(run: Run, options: Options) -> list[str]:
    """Name the checkpoint that the run goes on from, or nothing; with warnings of damaged ones."""
    if options.fresh:
        return [""]
    if options.checkpoint in (None, LATEST):
        checkpoint, damaged = newest_whole(run.checkpoints_dir)
        instead = f"{checkpoint.name} is used instead" if checkpoint else ""
        warnings = [f"{line}; {instead}" for line in damaged]
    else:
        checkpoint, warnings = find_checkpoint(run.checkpoints_dir, options.checkpoint), []
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; start without naming one")
    return [checkpoint.name if checkpoint else "", *warnings]


def check_resume_point(run: Run, name: str, data: RunData, *, thoroughly: bool) -> Checkpoint:
    """Open a checkpoint that rank 0 has found whole, and check that it fits the run.

    Args:
        thoroughly: read every byte, as one process does of each machine: it may have its own copy.
    """
    try:
        checkpoint = open_checkpoint(run.checkpoints_dir / name, thoroughly=thoroughly)
    except UserError as error:
        raise UserError(f"{error}, on {socket.gethostname()}; copy the checkpoint there from"
                        " another machine of the run") from None
    check_identity(checkpoint, run, data.fingerprints)
    check_weights_fit(checkpoint, run.model)
    check_position(checkpoint, data.plan)
    return checkpoint


def check_room(job: Job) -> None:
    """Refuse to train what could not be saved.

    Raises:
        UserError: the disk has no room for the next checkpoint.
    """
    place = job.run.checkpoints_dir if job.run.checkpoints_dir.exists() else job.run.run_dir
    free = shutil.disk_usage(place).free
    needed = num_parameters(job.run.model) * BYTES_PER_PARAMETER_SAVED
    if not job.is_trained and free < needed:
        raise UserError(f"{job.run.run_dir}: a checkpoint takes {needed / 1e9:,.2f} GB, and the"
                        f" disk has {free / 1e9:,.2f} GB free; make room, or set --runs-dir")


def check_budget(job: Job, clock: PhaseClock) -> None:
    """Refuse to go on with a run that has spent all it may spend."""
    budget = Budget(job.run.train, clock)
    if not job.is_trained and budget.seconds_left() <= 0:
        raise UserError(f"{job.run.train_path}: {budget.nearest_limit()}; raise it to go on")
