"""Everything that is checked before the first collective, and the run that is ready to train."""

import json
import shutil
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

import checkpointing
from basics.checkpoint_files import (
    LATEST,
    Identity,
    named_as_checkpoints,
    read_identity,
    read_manifest,
    write_identity,
)
from basics.errors import UserError, print_line
from basics.failpoints import failpoint
from basics.files import existing
from basics.machine import num_cpu_cores
from basics.text import gb
from checkpointing import Checkpoint, TrainingState
from ops.schedule import schedule_warning
from preparation.ensure_dataset import provide_dataset
from processes.command_line import Options
from processes.distributed import Process, unused_gpus
from processes.run_lock import seconds_before
from processes.startup_agreement import Agreement
from reporting.clock import DOWNLOAD, PhaseClock, nearest_limit
from reporting.metrics_file import read_metrics, remove_metrics_from, spent_before
from reporting.setting_changes import Changes, find_changes, settings_of
from reporting.speed import checkpoint_bytes
from reporting.summary import FINISHED, read_summary, write_status
from reporting.tracker import check_tracker
from run_config import RUN_NAME, Run, TrainConfig, load_run
from tokens.batch_plan import BatchPlan, largest_divisor
from tokens.batches import RunData, open_run_data
from trainer.losses import build_training_state
from trainer.models import FREE_TO_CHANGE, initial_model
from trainer.precision import check_attention, has_precision, resolve_for_device


@dataclass(frozen=True)
class PreparedRun:
    """A run that has been checked and is ready to train."""

    run: Run
    config: TrainConfig  # the run's; `for_device` decides what the run leaves open
    data: RunData
    resume_from: Checkpoint | None
    options: Options
    summary_says_finished: bool = False
    warnings: tuple[str, ...] = ()
    energy_kwh: float = 0.0  # of earlier launches
    changes: Changes = field(default_factory=dict)  # of settings since the checkpoint

    def for_device(self, device: torch.device) -> Self:
        """Return the run with its precision decided; initialise CUDA. Raises: UserError."""
        config, warnings = resolve_for_device(self.run.config, device), [*self.warnings]
        check_attention(self.run.model, config, device)
        if not has_precision(device, config.precision or "fp32"):
            warnings.append(
                f'{self.run.train_path}: precision is "{config.precision}", in which'
                " this device is no faster than in fp32; without this key the fastest"
                " one is taken"
            )
        return replace(
            self, config=config, warnings=(*warnings, *unused_gpus(), *self._unused_cores(device))
        )

    def _unused_cores(self, device: torch.device) -> list[str]:
        """Return a line for a run that could have more processes on the CPU with the same batch."""
        if device.type != "cpu" or not self.run.config.global_batch_size:
            return []
        more = largest_divisor(self.plan.gradient_accumulation_steps, num_cpu_cores())
        if self.plan.world_size > 1 or more == 1:
            return []
        return [
            f"one process trains on {num_cpu_cores()} cores: with --nproc-per-node {more} a"
            " small model trains faster, on the same batches"
        ]  # 1.4 times, on two cores

    @property
    def plan(self) -> BatchPlan:
        return self.data.plan

    @property
    def first_step(self) -> int:
        return self.resume_from.meta.global_step + 1 if self.resume_from else 0

    @property
    def lacks_validation(self) -> bool:
        """Whether the checkpoint's validation was due, and an earlier launch ended before it."""
        return (
            self.resume_from is not None
            and self.resume_from.validation is None
            and self.is_validation_due(self.first_step - 1)
        )

    @property
    def is_trained(self) -> bool:
        return self.plan.is_trained_after(self.first_step - 1)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do; a kill may come between the last step and the end."""
        return self.is_trained and not self.lacks_validation and self.summary_says_finished

    def is_validation_due(self, global_step: int) -> bool:
        return self.config.validates and self._is_due(global_step, self.config.validation_interval)

    def is_save_due(self, global_step: int) -> bool:
        """Return whether the run's intervals ask for a checkpoint after a step."""
        return self.is_validation_due(global_step) or self._is_due(
            global_step, self.config.checkpoint_interval
        )

    def _is_due(self, global_step: int, interval: int | None) -> bool:
        is_last = global_step == self.plan.num_steps - 1
        return is_last or interval is not None and (global_step + 1) % interval == 0

    def run_identity(self) -> Identity:
        """Return what the launch trains as, anew if it starts over or steps back. Rank 0."""
        found = read_identity(self.run.run_dir)
        if self.resume_from is None:
            return Identity() if found is None or self.options.fresh else found
        meta = self.resume_from.meta
        found = found or Identity(name=meta.identity)
        # Later checkpoints may be elsewhere, so each one that is named begins something new.
        is_named = self.options.checkpoint not in (None, LATEST)
        is_new = is_named or copied_from(self.run) is not None
        if found.includes(meta.identity, meta.global_step) and not is_new:
            return found
        return found.after_step_back(meta.identity, meta.global_step)

    def agreed_values(self) -> object:
        """Return the values that must be equal on all processes."""
        found = self.resume_from
        checkpoint = found and (found.name, found.validation, read_manifest(found.path))
        return self.run.model, self.config, self.plan, self.data.fingerprints, checkpoint

    def say_if_finished(self, process: Process) -> None:
        if self.is_finished and process.is_main:
            steps, tokens = self.first_step, self.first_step * self.plan.tokens_per_step
            wanted = (
                "" if steps == self.plan.num_steps else (f", {self.plan.num_steps:,} were wanted")
            )
            original = copied_from(self.run)
            copy = f" in {original}, of which this is a copy" if original else ""
            print_line(
                f"{self.run.name} is complete: {steps:,} steps{wanted}, {tokens:,}"
                f" tokens{copy}; --fresh starts it over"
            )


def prepare_run(
    options: Options, process: Process, clock: PhaseClock, agreement: Agreement
) -> PreparedRun:
    """Check everything that can be checked before the first collective. Every rank."""
    step = agreement.run
    run = step(
        "configs", lambda: load_run(options.runs_dir, options.run).priced(options.usd_per_hour)
    )
    failpoint("prepare")
    step("tracker", lambda: check_tracker(run.config.tracker) if process.is_main else None)
    dataset_dir = options.datasets_dir / run.config.dataset
    with clock.phase(DOWNLOAD):
        step(
            "dataset",
            lambda: (
                provide_dataset(dataset_dir, run.config.dataset)
                if process.is_main_of_node
                else None
            ),
        )
    data = step("data", lambda: open_run_data(run, dataset_dir, world_size=process.world_size))
    says_finished, name, *warnings = json.loads(
        agreement.from_rank_0(
            "checkpoint",
            lambda: json.dumps(
                [read_summary(run).get("status") == FINISHED, *choose_checkpoint(run, options)]
            ),
        )
    )
    is_first_reader = process.is_main_of_node and not process.is_main  # of this machine's files
    resume_from = step(
        "resuming",
        lambda: check_resume_point(run, name, data, thoroughly=is_first_reader) if name else None,
    )
    if run.config.init_from and resume_from is None:  # later the other processes find it here too
        step(
            "initial weights",
            lambda: (
                process.is_main_of_node
                and initial_model(run, options.runs_dir, tokenizer_name=data.tokenizer_name)
            ),
        )
    if resume_from is not None:
        latest = resume_from.validation or resume_from.meta
        clock.resume(latest.seconds, latest.usd)
    records: list[dict[str, Any]] = []
    energy_kwh = 0.0
    if not options.fresh:
        records = step("records", lambda: read_metrics(run.metrics_path))
        *spent, energy_kwh = step("spent", lambda: spent_before(records, run.summary_path))
        clock.count_lost(*spent)
    warnings.append(clock.set_price(run.config.usd_per_hour))
    if not options.fresh:
        clock.count_lost(seconds_before(run.run_dir))  # of launches that were killed
    changes: Changes = {}
    if resume_from is not None:
        changes = find_changes(resume_from.meta.settings, settings_of(run))
        if process.is_main and (original := copied_from(run)):
            warnings.append(
                f"{run.run_dir} is a copy of {original} with its checkpoints, and goes"
                " on from there; --fresh starts it over"
            )
        rates = {
            record["global_step"]: record.get("learning_rate") or 0.0
            for record in records
            if "train_loss" in record
        }
        last_step = resume_from.meta.global_step
        warnings.append(
            schedule_warning(
                run.config,
                last_step,
                rates.get(last_step),
                num_steps=data.plan.num_steps,
                changed=changes if resume_from.meta.settings else None,
            )
        )
    prepared = PreparedRun(
        run,
        run.config,
        data,
        resume_from,
        options,
        says_finished,
        tuple(filter(None, warnings)),
        energy_kwh,
        changes,
    )
    goes_on = not prepared.is_trained  # each node by its own train.json: all take both steps
    step("room", lambda: check_room(run, clock, process) if goes_on else None)
    return prepared


def choose_checkpoint(run: Run, options: Options) -> list[str]:
    """Return the name of the checkpoint to resume from, or "", then warnings of others. Rank 0."""
    if options.fresh:
        return [""]
    partial = named_as_checkpoints(run.checkpoints_dir, partial=True)
    of_the_original = [path for path in partial if (path / "optimizer.pt").exists()]
    if of_the_original and not named_as_checkpoints(run.checkpoints_dir):
        newest = of_the_original[-1]
        raise UserError(
            f"{run.checkpoints_dir}: has checkpoints of the original system, whose"
            " optimizer state is not read; to train on from the weights of the newest,"
            f' make a run directory with "init_from": "{newest}" in train.json'
        )
    warnings = []
    if options.checkpoint in (None, LATEST):
        checkpoint, damaged = checkpointing.newest_whole(run.checkpoints_dir)
        warnings += [
            f"{line}; {checkpoint and checkpoint.name} is used instead" for line in damaged
        ]
        warnings += [
            f"{path}: has no manifest, as a kill leaves a checkpoint: ignored"
            for path in partial
            if path not in of_the_original
        ]
        warnings += [
            f"{path}: is a link, and a checkpoint is a directory: ignored; copy there what"
            " it points to"
            for path in sorted(run.checkpoints_dir.glob("*-iteration-*"))
            if path.is_symlink()
        ]
    else:
        checkpoint = checkpointing.find_checkpoint(run.checkpoints_dir, options.checkpoint)
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train without naming one")
    return [checkpoint.name if checkpoint else "", *warnings]


def check_resume_point(run: Run, name: str, data: RunData, *, thoroughly: bool) -> Checkpoint:
    """Open a checkpoint that rank 0 has found whole, and check that it belongs to the run.

    One process of each machine reads every byte of it: the machine may have its own copy.
    """
    try:
        checkpoint = checkpointing.open_checkpoint(
            run.checkpoints_dir / name, thoroughly=thoroughly
        )
    except UserError as error:
        raise UserError(
            f"{error}, on {socket.gethostname()}; copy the checkpoint there from"
            " another machine of the run"
        ) from None
    check_same_run(checkpoint, run, data.fingerprints)
    # With another global batch, data would be read twice, or skipped.
    plan, num_steps = data.plan, checkpoint.meta.global_step + 1
    if checkpoint.meta.tokens != num_steps * plan.tokens_per_step:
        before = checkpoint.meta.tokens // num_steps
        raise UserError(
            f"{checkpoint.path}: was trained with {before} tokens per step, this launch"
            f" has {plan.tokens_per_step}; change gradient_accumulation_steps or the"
            " number of processes, or set global_batch_size to"
            f" {before // plan.context_length}; or use --fresh"
        )
    return checkpoint


def check_same_run(checkpoint: Checkpoint, run: Run, data: dict[str, str]) -> None:
    """Refuse to resume with another model, seed or data; data as in `RunData.fingerprints`."""
    meta, model_path = checkpoint.meta, run.run_dir / "model.json"
    was = meta.model.model_dump(exclude=FREE_TO_CHANGE)
    compared = [(model_path, key, getattr(run.model, key), was[key]) for key in was]
    compared += [
        (run.train_path, "optimizer", run.config.optimizer, meta.optimizer),
        (run.train_path, "random_seed", run.config.random_seed, meta.random_seed),
    ]
    # Another start would read data twice. A file may be used for the first time.
    files = {
        split: f"the {split} file of {run.config.dataset}" for split in ("train", "validation")
    }
    compared += [
        (run.train_path, files.get(key, key), data[key], meta.data[key])
        for key in sorted(data.keys() & meta.data.keys() - {"validation_sequences"})
    ]
    for path, key, found, before in compared:
        if found != before:
            original = copied_from(run)
            copy = f"; the checkpoint was copied from {original}" if original else ""
            raise UserError(
                f"{path}: {key} is {found}, {checkpoint.name} was trained with"
                f" {before}{copy}; set it back, or start over with --fresh"
            )


def copied_from(run: Run) -> Path | None:
    """Return the run directory that this one was copied from, checkpoints included, and not since
    trained; None if it is no copy. A directory that was only renamed is none.

    A copy's summary still has the name of the other run, and both have the same identity.
    """
    name = read_summary(run).get("run")
    if not isinstance(name, str) or name == run.name or not RUN_NAME.fullmatch(name):
        return None
    other = run.run_dir.with_name(name)
    try:
        found, own = read_identity(other), read_identity(run.run_dir)
    except UserError:  # one of the files is damaged; of its own `run_identity` says so
        return None
    return other if found is not None and found == own else None


def open_run_dir(
    prepared: PreparedRun, process: Process, clock: PhaseClock
) -> tuple[Identity, Path | None]:
    """Remove from a run directory what this launch does not go on from, once all agree. Rank 0.

    In this order, so that a kill leaves no other run's records or checkpoints to go on from.
    Returned are the identity of what is saved from now on, and where others' checkpoints are now.
    """
    if not process.is_main:
        return Identity(), None  # they save nothing
    run, identity = prepared.run, prepared.run_identity()
    write_identity(run.run_dir, identity)
    for path in (run.metrics_path, run.samples_path, run.evaluations_path):
        remove_metrics_from(path, prepared.first_step, lacks_validation=prepared.lacks_validation)
    write_status(
        run,
        clock,
        status="running",
        reason=None,
        num_steps=prepared.plan.num_steps,
        tokenizer=prepared.data.tokenizer_name,
    )
    return identity, checkpointing.clean_up(run.run_dir, from_step=prepared.first_step)


def build_state(prepared: PreparedRun, process: Process) -> TrainingState:
    """Build the model and its optimizer; load what the run resumes from, or starts from."""
    run = prepared.run
    state = build_training_state(run.model, prepared.config, process)
    if prepared.resume_from is not None:
        checkpointing.load_checkpoint(prepared.resume_from, state)
    elif run.config.init_from:
        initial = initial_model(
            run, prepared.options.runs_dir, tokenizer_name=prepared.data.tokenizer_name
        )
        state.model.load_state_dict(initial.state_dict())
    return state


def check_room(run: Run, clock: PhaseClock, process: Process) -> None:
    """Refuse to train without budget or without disk space for a checkpoint. Raises: UserError."""
    seconds_left, spent = nearest_limit(run.config, clock)
    if seconds_left <= 0:
        raise UserError(f"{run.train_path}: {spent}; raise it to go on")
    disk = shutil.disk_usage(existing(run.checkpoints_dir))
    needed = checkpoint_bytes(run.model, run.config)
    if process.is_main and disk.free < needed and disk.total:  # object stores may have no size
        raise UserError(
            f"{run.run_dir}: a checkpoint takes {gb(needed)}, and the disk has"
            f" {gb(disk.free)} free; free some, or set --runs-dir"
        )
