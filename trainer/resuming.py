"""Which checkpoint a launch resumes from, and whether it belongs to the run."""

import socket
from typing import Any

from basics.checkpoint_files import BEST, IDENTITY, LATEST, named_as_checkpoints, read_identity
from basics.errors import UserError
from checkpointing import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
)
from optim import learning_rate_at, schedule_of
from processes.command_line import Options
from run_config import Run
from tokens.batches import RunData

FREE_TO_CHANGE = {"drop_rate", "init"}  # keys of model.json that may change in mid-run
RAISED = 1.1  # ratio of two learning rates


def choose_checkpoint(run: Run, options: Options) -> list[str]:
    """Return the name of the checkpoint to resume from, or "", then warnings of others. Rank 0.

    Raises: UserError: there is none, or it is not known which ones belong to the run.
    """
    if options.fresh:
        return [""]
    warnings = []
    if options.checkpoint in (None, LATEST, BEST):
        if foreign := list_checkpoints(run.checkpoints_dir, foreign=True):
            others = f" and {len(foreign) - 1:,} more are" if len(foreign) > 1 else " is"
            warnings.append(f"{foreign[-1].path}{others} not of the present run ({IDENTITY}):"
                            " ignored, and moved to set-aside/")
        names = {each.meta.identity for each in list_checkpoints(run.checkpoints_dir)}
        if len(names) > 1 and read_identity(run.run_dir) is None:
            raise UserError(f"{run.checkpoints_dir}: has checkpoints of {len(names)} runs; restore"
                            f" {IDENTITY} in {run.run_dir}, or name a checkpoint")
    if options.checkpoint in (None, LATEST):
        checkpoint, damaged = newest_whole(run.checkpoints_dir)
        instead = f"{checkpoint.name} is used instead" if checkpoint else ""
        warnings += [f"{line}; {instead}" for line in damaged]
        warnings += [f"{path}: has no manifest, as a kill leaves a checkpoint: ignored"
                     for path in named_as_checkpoints(run.checkpoints_dir, partial=True)]
    else:
        checkpoint = find_checkpoint(run.checkpoints_dir, options.checkpoint)
    if checkpoint is None and options.checkpoint:
        raise UserError(f"{run.checkpoints_dir}: no checkpoint yet; train without naming one")
    return [checkpoint.name if checkpoint else "", *warnings]


def check_resume_point(run: Run, name: str, data: RunData, *, thoroughly: bool) -> Checkpoint:
    """Open a checkpoint that rank 0 has found whole, and check that it belongs to the run.

    Args:
        thoroughly: read every byte, as one process of each machine does: it may have its own copy.
    """
    try:
        checkpoint = open_checkpoint(run.checkpoints_dir / name, thoroughly=thoroughly)
    except UserError as error:
        raise UserError(f"{error}, on {socket.gethostname()}; copy the checkpoint there from"
                        " another machine of the run") from None
    check_same_run(checkpoint, run, data.fingerprints)
    # With another global batch, data would be read twice, or skipped.
    plan, num_steps = data.plan, checkpoint.meta.global_step + 1
    if checkpoint.meta.tokens != num_steps * plan.tokens_per_step:
        before = checkpoint.meta.tokens // num_steps
        raise UserError(
            f"{checkpoint.path}: was trained with {before} tokens per step, this launch has"
            f" {plan.tokens_per_step}; change gradient_accumulation_steps or the number of"
            f" processes, or set global_batch_size to {before // plan.context_length}; or use"
            " --fresh")
    return checkpoint


def check_same_run(checkpoint: Checkpoint, run: Run, data: dict[str, str]) -> None:
    """Refuse to resume with another model, seed or data: it would be another run.

    Args:
        data: the fingerprints of the token files.

    Raises: UserError: names the change and how to undo it.
    """
    meta, train, model_path = checkpoint.meta, run.train, run.run_dir / "model.json"
    was = meta.model.model_dump(exclude=FREE_TO_CHANGE)
    compared = [(model_path, key, getattr(run.model, key), was[key]) for key in was]
    compared += [(run.train_path, "optimizer", train.optimizer, meta.optimizer),
                 (run.train_path, "random_seed", train.random_seed, meta.random_seed)]
    # Another start would read data twice. A file may be used for the first time.
    files = {split: f"the {split} file of {train.dataset}" for split in ("train", "validation")}
    compared += [(run.train_path, files.get(key, key), data[key], meta.data[key])
                 for key in sorted(data.keys() & meta.data.keys() - {"validation_sequences"})]
    for path, key, found, before in compared:
        if found != before:
            raise UserError(f"{path}: {key} is {found}, {checkpoint.name} was trained with"
                            f" {before}; set it back, or start over with --fresh")


def resume_warnings(checkpoint: Checkpoint, run: Run, records: list[dict[str, Any]], *,
                    data: dict[str, str], num_steps: int) -> list[str]:
    """Return what is no error, but differs from the launches that trained the checkpoint.

    Args:
        records: of `metrics.jsonl`; each checkpoint has one of its last steps.
        data: as of `check_same_run`.
    """
    warnings, last_step = [], checkpoint.meta.global_step
    found = data.get("validation_sequences")
    was = checkpoint.meta.data.get("validation_sequences", found)
    if was != found:  # as another split can cause
        warnings.append(f"a validation has {found} sequences now, up to {checkpoint.name} it had"
                        f" {was}: best compares losses of both lengths")
    last_rate = next((record.get("learning_rate") or 0.0 for record in records
                      if "train_loss" in record and record["global_step"] == last_step), None)
    rate, next_rate = (learning_rate_at(run.train, step, num_steps=num_steps)
                       for step in (last_step, last_step + 1))
    if last_step + 1 < num_steps and last_rate is not None and rate > RAISED * last_rate:
        warnings.append(f"{run.train_path}: the schedule ({schedule_of(run.train)}, now"
                        f" {num_steps:,} steps) raises the learning rate from {last_rate:.2g} to"
                        f" {next_rate:.2g}; README.md says how to train on")
    return warnings
