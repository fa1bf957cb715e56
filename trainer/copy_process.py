"""Brings the second copy of a run up to date: `python -m trainer.copy_process JOB`.

A process beside training, with the lowest priority, which needs no torch. A kill at any moment
leaves only whole checkpoints in the copy; the next update completes it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from basics.checkpoint_names import (
    BEST,
    CHECKPOINT_NAME,
    LATEST,
    PARTIAL_PREFIX,
    linked_name,
    move_directory,
    named_as_checkpoints,
    partial_of,
    remove_directory,
    remove_partial,
    replace_link,
    step_of,
)
from basics.errors import describe
from basics.failpoints import failpoint
from basics.files import fsync, read_regular_file, recover, write_atomically
from basics.manifest import find_damage
from basics.verified_copy import copy_checkpoint, copy_record
from processes.run_lock import end_with_parent
from trainer.stale_copies import mark_stale

RECORDS = ("model.json", "train.json", "metrics.jsonl", "samples.jsonl", "evaluations.jsonl",
           "summary.json", "tracker.json")
MAX_RECORD_BYTES = 2**28
OWN = "second-copy.json"  # names the checkpoints that were copied: no other one is ever removed
MAX_OWN_BYTES = 2**24


@dataclass(frozen=True)
class Job:
    """What one update of a second copy does.

    Attributes:
        keep: of the copy's own checkpoints, how many of the newest ones; None for all.
        from_step: set aside what the copy alone has from this step on: the run has left it. None
            for nothing.
    """

    run_dir: str
    copy_dir: str
    keep: int | None = None
    from_step: int | None = None

    def text(self) -> str:
        """Return the job as the argument of the process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Own:
    """What `second-copy.json` names: the checkpoints that were begun, and those that are whole."""

    begun: list[str]
    whole: list[str]


def read_own(copy_dir: Path) -> Own:
    """Return the checkpoints that a second copy has got from here; none if that is not known."""
    try:
        recover(copy_dir / OWN)
        names = json.loads(read_regular_file(copy_dir / OWN, max_bytes=MAX_OWN_BYTES))
        return Own(*([name for name in names.get(key, []) if CHECKPOINT_NAME.fullmatch(name)]
                     for key in ("checkpoints", "whole")))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return Own([], [])  # none yet, or damaged: then nothing is removed


class Copy:
    """The second copy of a run, in the layout of a run directory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._run_dir, self._dir = Path(job.run_dir), Path(job.copy_dir)
        self._source, self._target = (place / "checkpoints" for place in (self._run_dir, self._dir))
        self._problems: dict[str, str] = {}  # by what could not be copied

    def update(self) -> str:
        """Copy what is new, newest checkpoint first; return what could not be copied.

        What needs no room is done first, as a full place is to get some.

        Raises:
            OSError: the place cannot be written to.
        """
        self._target.mkdir(parents=True, exist_ok=True)
        own = read_own(self._dir).begun
        self._set_aside()
        self._remove_partial(own)
        self._prune(own, makes_room=True)
        self._write_own(own)
        self._copy_records()  # before the checkpoints: they never end before them
        tried: set[str] = set()
        while path := self._next(tried):
            tried.add(path.name)
            self._copy(path, own)
            self._renew_links()
        self._prune(own)
        self._renew_links()
        self._write_own(own)
        self._copy_records()  # a large checkpoint took its time
        return "; ".join(self._problems.values())

    def _remove_partial(self, own: Collection[str]) -> None:
        ours = {*own, LATEST, BEST, "probe", "renamed"}
        for partial in self._target.glob(f"{PARTIAL_PREFIX}*"):
            if partial.name.removeprefix(PARTIAL_PREFIX) in ours:
                remove_partial(partial)

    def _write_own(self, own: Collection[str]) -> None:
        """Record which checkpoints were begun, and which of them are whole, if that has changed."""
        there = {path.name for path in named_as_checkpoints(self._target)}
        whole = sorted(there.intersection(own))
        text = json.dumps({"checkpoints": sorted(own), "whole": whole}) + "\n"
        failpoint("copy.own")
        with suppress(OSError):
            if read_regular_file(self._dir / OWN, max_bytes=MAX_OWN_BYTES) == text:
                return
        write_atomically(self._dir / OWN, text, durable=True)

    def _set_aside(self) -> None:
        """Move checkpoints that the run has left behind, with --fresh or an earlier checkpoint.

        The newest goes first: of a copy that is cut off here, the next launch fetches an older one.
        """
        if self._job.from_step is None:
            return
        here = {path.name for path in named_as_checkpoints(self._source)}
        left = [path for path in named_as_checkpoints(self._target)
                if step_of(path) >= self._job.from_step and path.name not in here]
        if left:
            now = time.strftime("%Y%m%dZ%H%M%S", time.gmtime())
            aside_dir = self._dir / "set-aside" / now / "checkpoints"
            aside_dir.mkdir(parents=True, exist_ok=True)
            for link in (self._target / LATEST, self._target / BEST):
                link.unlink(missing_ok=True)
            for path in reversed(left):
                failpoint("copy.set-aside")
                move_directory(path, aside_dir / path.name)
            fsync(aside_dir)
            fsync(self._target)
        mark_stale(self._run_dir, self._dir, None)

    def _copy_records(self) -> None:
        failpoint("copy.records")
        charts = sorted(path.name for path in self._run_dir.glob("*.png") if path.name[0] != ".")
        for name in (*RECORDS, *charts):
            try:
                self._problems.pop(name, None)
                copy_record(self._run_dir / name, self._dir / name, max_bytes=MAX_RECORD_BYTES)
            except OSError as error:
                self._note(name, error)

    def _note(self, name: str, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error)[:100]
        self._problems[name] = f"{name}: {reason}"

    def _next(self, tried: Collection[str]) -> Path | None:
        """Return the newest checkpoint that was not tried yet; one may be new since the last."""
        return next((path for path in reversed(named_as_checkpoints(self._source))
                     if path.name not in tried and not find_damage(path)), None)

    def _copy(self, path: Path, own: list[str]) -> None:
        """Copy a checkpoint; its end by pruning is no problem."""
        target = self._target / path.name
        try:
            if path.name in own and target in named_as_checkpoints(self._target) and (
                    find_damage(target)):
                remove_directory(target, place="copy.replace")
            if path.name not in own and not target.exists():
                own.append(path.name)
                self._write_own(own)
            copy_checkpoint(path, self._target)
        except (OSError, ValueError) as error:
            if path in named_as_checkpoints(self._source):
                self._note(path.name, error)

    def _renew_links(self) -> None:
        failpoint("copy.links")
        there = [path.name for path in named_as_checkpoints(self._target) if not find_damage(path)]
        if there:
            best = linked_name(self._source / BEST)
            replace_link(self._target / LATEST, there[-1])
            if best in there:
                replace_link(self._target / BEST, best)

    def _prune(self, own: list[str], *, makes_room: bool = False) -> None:
        """Remove own checkpoints that neither the run keeps nor `keep` does, and forget them.

        The best of those that are there stays, also where the run has lost it.

        Args:
            makes_room: for those that are to be copied; one whole checkpoint stays in any case.
        """
        there = named_as_checkpoints(self._target)
        whole = [path for path in there if not find_damage(path)]
        if self._job.keep is None or not whole:
            return
        here = {path.name for path in named_as_checkpoints(self._source)}
        num_new = len(here - {path.name for path in whole}) if makes_room else 0
        # Of one that seems damaged, the place may just not give a file at this moment.
        newest = {*whole[-max(1, self._job.keep - num_new):],
                  *(path for path in there[-self._job.keep:] if path not in whole)}
        kept = here | {path.name for path in (*newest, min(reversed(whole), key=loss_of))}
        for path in there:
            if path.name in own and path.name not in kept | {linked_name(self._target / BEST)}:
                remove_directory(path, place="copy.prune")
        own[:] = [name for name in own if (self._target / name).is_dir()
                  or partial_of(self._target / name).exists()]


def loss_of(checkpoint: Path) -> float:
    """Return the loss of a checkpoint that decides which one is best; inf if it has none."""
    for name in ("validation.json", "meta.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            loss = json.loads(read_regular_file(checkpoint / name))["loss"]
            return math.inf if loss is None or math.isnan(loss) else float(loss)
    return math.inf


def main(job: Job, parent: int) -> None:
    """Be the process that copies. A problem is one line on stderr and exit status 1."""
    os.nice(19)
    if hasattr(psutil, "IOPRIO_CLASS_IDLE"):  # Linux: training reads its data first
        with suppress(psutil.Error, OSError):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    end_with_parent()
    if os.getppid() != parent:  # it has ended before
        return
    try:
        failpoint("copy.start")
        problem = Copy(job).update()
    except Exception as error:
        problem = describe(error)
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
