"""Which checkpoint a launch resumes from, and whether it is one of the run as it is now."""

import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import checkpointing
from basics.checkpoint_files import (
    LATEST,
    OPTIMIZER_OF_THE_ORIGINAL,
    Identity,
    copied_links,
    named_as_checkpoints,
    of_the_original,
    read_identity,
)
from basics.errors import UserError
from checkpointing import Checkpoint
from processes.command_line import Options
from processes.distributed import Process
from processes.startup_agreement import Agreement
from reporting.setting_changes import Changes, find_changes, settings_of
from reporting.summary import FINISHED, read_summary
from run_config import RUN_NAME, Run, Stage
from tokens.batch_plan import BatchPlan
from tokens.batches import RunData


@dataclass(frozen=True)
class ResumePoint:
    """Where a launch goes on: after a checkpoint, or at the first step of the run."""

    checkpoint: Checkpoint | None = None
    has_no_step_left: bool = False
    lacks_validation: bool = False  # an earlier launch ended before the checkpoint's validation
    is_finished: bool = False  # nothing is left to do
    changes: Changes = field(default_factory=dict)  # of settings since the checkpoint

    @property
    def first_step(self) -> int:
        return self.checkpoint.meta.global_step + 1 if self.checkpoint else 0


def stages_left(run: Run, plan: BatchPlan, resume: ResumePoint) -> list[Stage]:
    """Return the stages of a run from where a launch resumes on.

    A checkpoint that has all layers keeps them. One with few may be at the growth, or after it.
    """
    first_step, checkpoint = resume.first_step, resume.checkpoint
    if checkpoint is not None and resume.has_no_step_left:
        return [Stage(checkpoint.meta.model, range(first_step, first_step))]
    has_all = checkpoint is not None and checkpoint.meta.model.n_layers >= run.model.n_layers
    return run.stages(plan.num_steps, first_step=first_step, has_all_layers=has_all)


def agree_on_checkpoint(
    run: Run, options: Options, agreement: Agreement
) -> tuple[str | None, list[str]]:
    """Return what rank 0 chooses, as `choose_checkpoint` does. Every rank.

    Raises: AgreedError: the run cannot go on from its checkpoints.
    """
    chosen = agreement.from_rank_0(
        "checkpoint", lambda: json.dumps(choose_checkpoint(run, options))
    )
    name, warnings = json.loads(chosen)
    return name, warnings


def find_resume_point(
    run: Run, data: RunData, name: str | None, process: Process, agreement: Agreement
) -> tuple[ResumePoint, str]:
    """Return where the launch goes on, and a warning or an empty string. Every rank.

    `name` is of the checkpoint, if there is one: every process checks that it belongs to the run.

    Raises: AgreedError: the run cannot go on from it.
    """
    # Rank 0 has read all files on its machine; on each other machine one process does.
    thoroughly = process.is_main_of_node and not process.is_main
    checkpoint = None
    if name is not None:  # it is the same in all processes
        checkpoint = agreement.do(
            "resuming", check_resume_point, run, name, data, thoroughly=thoroughly
        )
    # A kill may come between the last step and the end of a run.
    says_finished = agreement.from_rank_0("status", lambda: str(read_summary(run).get("status")))
    if checkpoint is None:
        return ResumePoint(), ""
    global_step, num_steps = checkpoint.meta.global_step, data.plan.num_steps
    has_no_step_left = data.plan.has_no_step_after(global_step)
    lacks_validation = checkpoint.validation is None and run.config.is_validation_due(
        global_step, num_steps=num_steps
    )
    warning = ""
    if process.is_main and (original := copied_from(run)):
        warning = (
            f"{run.run_dir} is a copy of {original} with its checkpoints, and goes"
            " on from there; --fresh starts it over"
        )
    return (
        ResumePoint(
            checkpoint,
            has_no_step_left=has_no_step_left,
            lacks_validation=lacks_validation,
            is_finished=has_no_step_left and not lacks_validation and says_finished == FINISHED,
            changes=find_changes(checkpoint.meta.settings, settings_of(run)),
        ),
        warning,
    )


def choose_checkpoint(run: Run, options: Options) -> tuple[str | None, list[str]]:
    """Return the name of the checkpoint to resume from, if any, and warnings of others. Rank 0."""
    if options.fresh:
        return None, []
    if theirs := of_the_original(run.checkpoints_dir):
        newest = theirs[-1]
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
            for path in named_as_checkpoints(run.checkpoints_dir, partial=True)
            if not (path / OPTIMIZER_OF_THE_ORIGINAL).exists()
        ]
        warnings += [
            f"{path}: is a link, and a checkpoint is a directory: ignored; copy there what"
            " it points to"
            for path in sorted(run.checkpoints_dir.glob("*-iteration-*"))
            if path.is_symlink()
        ]
        refuse_unnamed(run, checkpoint)
    else:
        checkpoint = checkpointing.find_checkpoint(run.checkpoints_dir, options.checkpoint)
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train without naming one")
    warnings += [
        f"{path}: is a directory, since a copy has followed the link; it is set aside"
        for path in copied_links(run.checkpoints_dir)
    ]
    return (checkpoint.name if checkpoint else None), warnings


def refuse_unnamed(run: Run, newest: Checkpoint | None) -> None:
    """Refuse a `latest` or `best` that is a directory with a later checkpoint than the newest one.

    A copy has followed the link, and the checkpoint itself was not copied. Raises: UserError.
    """
    newest_step = newest.meta.global_step if newest else -1
    for path in copied_links(run.checkpoints_dir):
        try:
            checkpoint = checkpointing.open_checkpoint(path)
        except UserError:  # damaged: it is set aside
            continue
        global_step = checkpoint.meta.global_step
        if global_step > newest_step and checkpoint.is_of(read_identity(run.run_dir)):
            now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
            raise UserError(
                f"{path}: is a directory, since a copy has followed the link, and no checkpoint of"
                f" that step is whole under its own name; rename it to {now}-iteration-"
                f"{global_step}, or start over with --fresh"
            )


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
    # Positions in the data are counted in global batches: with another size some would be read
    # twice, or skipped.
    plan, num_steps = data.plan, checkpoint.meta.global_step + 1
    if checkpoint.meta.tokens != plan.tokens_of(num_steps):
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
    was = meta.model.shape()
    grow = run.config.grow
    if meta.model.n_layers <= run.model.n_layers:  # the others may be to come: see `grow`
        was["n_layers"] = meta.run_layers
    compared = [(model_path, key, getattr(run.model, key), was[key]) for key in was]
    compared += [
        (run.train_path, "optimizer", run.config.optimizer, meta.optimizer),
        (run.train_path, "random_seed", run.config.random_seed, meta.random_seed),
    ]
    if grow is not None and meta.model.n_layers < run.model.n_layers:
        compared += [(run.train_path, "grow.from_layers", grow.from_layers, meta.model.n_layers)]
    # With another start token, data would be read twice. Only keys that both have are compared: a
    # run may begin to use its validation file later.
    files = {
        split: f"the {split} file of {run.config.dataset}" for split in ("train", "validation")
    }
    if first := run.config.deciding_set:
        files["validation"] = f"the file of the first validation set, {first},"
    for name in run.config.validation or {}:  # sets may be added and left out
        files[f"validation/{name}"] = f"the file of validation set {name}"
    compared += [
        (run.train_path, files.get(key, key), data[key], meta.data[key])
        # The number of validated sequences may change.
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
    """Return the run directory that this one is a copy of; None if this one is no copy.

    A copy includes the checkpoints and was not trained since. A renamed directory is not a copy.

    A copy's summary still has the name of the other run, and both have the same identity.
    """
    name = read_summary(run).get("run")
    if not isinstance(name, str) or name == run.name or not RUN_NAME.fullmatch(name):
        return None
    other = run.run_dir.with_name(name)
    try:
        found, own = read_identity(other), read_identity(run.run_dir)
    except UserError:  # one of the files is damaged; of its own `identity_of_launch` says so
        return None
    return other if found is not None and found == own else None


def identity_of_launch(run: Run, checkpoint: Checkpoint | None, options: Options) -> Identity:
    """Return the identity of a launch: new if it starts over, steps back or is a copy. Rank 0."""
    found = read_identity(run.run_dir)
    if checkpoint is None:
        return Identity() if found is None or options.fresh else found
    meta = checkpoint.meta
    found = found or Identity(name=meta.identity)
    # Later checkpoints may exist elsewhere, so naming one, except `latest`, begins a new identity.
    is_named = options.checkpoint not in (None, LATEST)
    is_new = is_named or copied_from(run) is not None
    if found.includes(meta.identity, meta.global_step) and not is_new:
        return found
    return found.after_step_back(meta.identity, meta.global_step)
