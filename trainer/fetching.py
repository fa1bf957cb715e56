"""What a launch fetches from the second copy of its run, `--sync-to DIR`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from basics.checkpoint_names import (
    BEST,
    LATEST,
    move_directory,
    named_as_checkpoints,
    partial_files,
    step_of,
)
from basics.errors import (
    BAD_INPUT,
    DISK_FULL,
    FAILED,
    TRANSIENT,
    UserError,
    cannot_be_written,
    no_answer,
    no_directory,
    print_line,
)
from basics.manifest import find_damage, read_manifest
from basics.time_limit import within
from basics.verified_copy import copy_record, copy_whole
from checkpointing import (
    Checkpoint,
    best_of,
    find_oversized,
    list_checkpoints,
    newest_whole,
    open_checkpoint,
)
from processes.command_line import Options
from processes.deadlines import Deadlines
from reporting.metrics_file import check_records
from run_config import Run, check_inside
from trainer.copy_process import MAX_RECORD_BYTES, OWN, RECORDS, read_own
from trainer.resuming import check_identity
from trainer.stale_copies import stale_from

FETCHED = [name for name in RECORDS if name not in ("model.json", "train.json")]


@dataclass(frozen=True)
class Found:
    """What a second copy holds.

    Attributes:
        checkpoints: those whose sizes are right, by global step.
        lost: the others that were copied, by name: what is wrong with them.
        is_out_of_reach: whether some of these cannot be read at this moment.
    """

    checkpoints: list[Checkpoint]
    lost: dict[str, str]
    is_out_of_reach: bool


def fetch(run: Run, options: Options, data: dict[str, str]) -> list[str]:
    """Fetch the newest whole checkpoint from the second copy, if the run has none as new. Rank 0.

    The records come with it, and the best checkpoint. Nothing is fetched for a run that starts
    over, nor what the run has left behind and the copy has not set aside yet.

    Args:
        data: the fingerprints of the token files.

    Returns:
        Warnings.

    Raises:
        UserError: the place cannot be used, does not answer, holds another run, or has checkpoints
            of which none can be read, and the run has none either.
    """
    place, seconds = options.sync_to / run.name, Deadlines.read()
    found = _answer(options.sync_to, seconds.fetch, lambda: _look(place, options.sync_to, run))
    stale = stale_from(run.run_dir, place.absolute())
    theirs = [checkpoint for checkpoint in found.checkpoints
              if stale is None or checkpoint.meta.global_step < stale]
    if theirs:
        _check_same_run(theirs[-1], run, data)
    warnings = [] if run.train.keep_checkpoints != 1 else [
        "keep_checkpoints is 1: of the second copy, too, only one checkpoint and the best one are"
        " kept; 2 leave another one where one is damaged"]
    if options.fresh or options.began_at is not None:
        return warnings
    ours = _newest_of(run)
    named = found.checkpoints if options.checkpoint not in (None, LATEST, BEST) else theirs
    candidates = _candidates(named, run, ours, options.checkpoint)
    if candidates:
        _answer(options.sync_to, seconds.fetch_stall,
                lambda: _fetch_one(candidates, theirs, run, place),
                progress=lambda: _progress(run.checkpoints_dir))
    elif ours is None:
        _refuse_to_start_over(place, found, stale)
    return warnings


def _answer(root: Path, seconds: float, work: Callable[[], Any], *,
            progress: Callable[[], Any] = lambda: None) -> Any:
    """Do something with the place; an error line and status 1 if it does not answer."""
    try:
        return within(seconds, work, progress=progress)
    except TimeoutError:
        raise no_answer(root, seconds) from None
    except OSError as error:
        raise cannot_be_written(root, error) from None


def _look(place: Path, root: Path, run: Run) -> Found:
    """Return what the place holds. Raises: OSError or UserError: it cannot be used."""
    _check_place(place, root)
    directory = place / "checkpoints"
    if directory.exists():
        os.scandir(directory).close()  # an error is not the same as no checkpoints
    whole, named = list_checkpoints(directory), named_as_checkpoints(directory)
    names = {checkpoint.name for checkpoint in whole}
    damaged = [path for path in named if path.name not in names]
    lost = {name: f"{name} is not there" for name in read_own(place).whole}
    lost |= {path.name: f"{path.name} is damaged: {find_damage(path)}" for path in damaged}
    return Found(whole, {name: what for name, what in lost.items() if name not in names},
                 any(map(_is_out_of_reach, damaged)))


def _check_place(place: Path, root: Path) -> None:
    """Refuse a place that cannot be written to, or that is no second copy."""
    if not root.is_dir():
        raise no_directory(root)
    if not os.access(place if place.is_dir() else root, os.W_OK | os.X_OK):
        raise UserError(f"{root}: --sync-to cannot be written to; name another directory")
    for path in (place, place / "checkpoints", place / "set-aside"):
        check_inside(path, root, "--sync-to")
    is_in_use = (place / "checkpoints" / LATEST).exists() or any(
        (place / name).exists() for name in RECORDS)
    if is_in_use and not (place / OWN).is_file():
        raise UserError(f"{place}: is no second copy that --sync-to has made: it has no {OWN};"
                        " name another directory with --sync-to")


def _check_same_run(theirs: Checkpoint, run: Run, data: dict[str, str]) -> None:
    try:
        check_identity(theirs, run, data)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{theirs.path.parents[1]}: is the copy of another run: {reason}; name"
                        " another --sync-to") from None


def _newest_of(run: Run) -> Checkpoint | None:
    """Return the run's own newest whole checkpoint."""
    try:
        return newest_whole(run.checkpoints_dir, run.model)[0]
    except UserError:  # all of them are damaged
        return None


def _candidates(theirs: list[Checkpoint], run: Run, ours: Checkpoint | None,
                wanted: str | None) -> list[Checkpoint]:
    """Return the checkpoints to fetch one of, the first choice first."""
    if wanted not in (None, LATEST, BEST):
        return [found for found in theirs
                if found.name == wanted and not _is_whole(run.checkpoints_dir / wanted, run)]
    reached = ours.meta.global_step if ours else -1
    return [found for found in reversed(theirs) if found.meta.global_step > reached]


def _is_whole(path: Path, run: Run) -> bool:
    try:
        open_checkpoint(path, thoroughly=True, model=run.model)
    except UserError:
        return False
    return True


def _fetch_one(candidates: list[Checkpoint], theirs: list[Checkpoint], run: Run,
               place: Path) -> None:
    """Fetch the first checkpoint that can be, with the records, and the best one."""
    fetched, reason = None, ""
    for checkpoint in candidates:
        if reason := _try_to_fetch(checkpoint, run, lambda: _fetch_records(place, run)):
            print_line(f"warning: {checkpoint.path}: not fetched: {reason}")
        else:
            fetched = checkpoint
            break
    if fetched is None:
        raise UserError(f"{place}: no checkpoint could be fetched: {reason}; restore one, or leave"
                        " --sync-to out", FAILED)
    best = best_of(theirs) or fetched
    if best.name != fetched.name and find_damage(run.checkpoints_dir / best.name) and (
            reason := _try_to_fetch(best, run)):
        print_line(f"warning: {best.path}: the best checkpoint was not fetched: {reason}; the"
                   " second copy keeps it")
    print_line(f"{run.name}: {fetched.name} and the records were fetched from {place}")


def _try_to_fetch(checkpoint: Checkpoint, run: Run,
                  before_naming: Callable[[], None] = lambda: None) -> str:
    """Fetch a checkpoint; return why it could not be. Raises: UserError if the disk is full.

    Args:
        before_naming: called when the checkpoint is read back, before it gets its name.
    """
    try:
        if oversized := find_oversized(read_manifest(checkpoint.path), run.model):
            return oversized
        run.checkpoints_dir.mkdir(exist_ok=True)
        target = run.checkpoints_dir / checkpoint.name
        if target in named_as_checkpoints(run.checkpoints_dir):
            _set_aside(target, run)  # it is damaged
        copy_whole(checkpoint.path, target, before_naming)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            failed = cannot_be_written(run.checkpoints_dir, error)
            if failed.status == DISK_FULL:
                raise failed from None
        return getattr(error, "strerror", None) or str(error)[:80]
    return ""


def _set_aside(path: Path, run: Run) -> None:
    now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
    aside_dir = run.run_dir / "set-aside" / now / "checkpoints"
    aside_dir.mkdir(parents=True, exist_ok=True)
    move_directory(path, aside_dir / path.name)
    print_line(f"{path}: is damaged, and now in {aside_dir}")


def _fetch_records(place: Path, run: Run) -> None:
    for name in FETCHED:
        check_records(place / name)
        if name == "evaluations.jsonl" and (run.run_dir / name).exists():
            continue  # made here since
        copy_record(place / name, run.run_dir / name, max_bytes=MAX_RECORD_BYTES)


def _progress(checkpoints_dir: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that are being fetched."""
    try:
        return sorted((str(path), path.stat().st_size) for path in partial_files(checkpoints_dir))
    except OSError:  # a directory was renamed meanwhile
        return []


def _refuse_to_start_over(place: Path, found: Found, stale: int | None) -> None:
    """Refuse to train from the first step where the copy names checkpoints and has no whole one."""
    lost = [what for name, what in found.lost.items()
            if stale is None or step_of(Path(name)) < stale]
    if lost:
        raise UserError(f"{place}: {lost[-1]}; and no other checkpoint is whole: restore one, or"
                        " start over with --fresh",
                        FAILED if found.is_out_of_reach else BAD_INPUT)


def _is_out_of_reach(path: Path) -> bool:
    """Return whether a checkpoint's manifest cannot be read at this moment."""
    try:
        read_manifest(path)
    except (OSError, ValueError) as error:
        return getattr(error, "errno", None) in TRANSIENT
    return False
