"""Passes a run's records on to a tracker while it trains, in a process that needs no torch.

It reads `metrics.jsonl` as it grows, so a tracker that fails, hangs or is slow loses nothing and
holds nothing up: the next launch, or `lab export-metrics`, passes on what is missing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from basics.errors import UserError, describe, one_line, visible
from basics.failpoints import failpoint
from basics.files import read_regular_file
from processes.helper_process import failure_of, kill, start_module
from processes.run_lock import end_with_parent
from reporting.chart_process import LOWEST
from reporting.metric_names import final_figures
from reporting.metrics_file import check_records
from reporting.tracked_run import STATE_NAME, Feed, Start, TrackedRun
from reporting.tracker_backends import Place, open_tracker, wandb_mode
from run_config import Run, check_inside, load_run

WAIT_SECONDS = 2.0  # between two looks for new records
POLL_SECONDS = 0.25  # between two heartbeats while the tracker is waited for
LAG_SECONDS = 600.0  # without taking a record, before a warning
MAX_NOTES_BYTES = 2**14  # of lines for the user that are read at once


class TrackerProcess:
    """Starts a run's tracker and waits for it at the end; does nothing if it has none. Rank 0.

    Failures are returned as text, each of them once. On Linux the process ends with this one.

    Args:
        heartbeat: called while the tracker is waited for.
    """

    def __init__(self, run: Run, *, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._run, self._heartbeat = run, heartbeat
        self._process: subprocess.Popen[bytes] | None = None
        self._told_at, self._has_warned = 0.0, False
        self._progress, self._progress_at = 0, 0.0

    def start(self, first_step: int, *, starts_over: bool) -> str:
        """Start the tracker, before the first record of this launch is written.

        Args:
            starts_over: begin a new tracked run.
        """
        run_dir, train = self._run.run_dir, self._run.train
        if train.tracker == "none":
            return ""
        try:
            failpoint("tracker")
            tracked, kind = TrackedRun.load(run_dir, starts_over=starts_over), train.tracker
            tracked.save(run_dir, kind, tracked.num_logged.get(kind, 0))  # so the id stays
            self._process = start_module(
                "reporting.tracker_process", str(run_dir.absolute()),
                json.dumps(dataclasses.asdict(self._start(first_step))), str(os.getpid()),
                stdin=subprocess.PIPE)
        except Exception as error:
            return describe(error)
        self._progress_at = time.monotonic()
        return ""

    def _start(self, first_step: int) -> Start:
        path = self._run.metrics_path
        return Start(num_bytes=path.stat().st_size if path.exists() else 0, first_step=first_step)

    def take_failure(self) -> str:
        """Return what the user should know of the tracker since the last call, or nothing."""
        if self._process is None:
            return ""
        if self._process.poll() is None:
            return self._note() or self._lag()
        said, process, self._process = self._note(), self._process, None
        process.stdin.close()
        failure = failure_of(process, "tracker")
        if failure or not self._told_at:
            return f"{said or failure or 'it has ended'}; {self._remedy()}"
        return said

    def _note(self) -> str:
        lines = (self._process.stderr.read(MAX_NOTES_BYTES) or b"").decode(errors="replace")
        return one_line(lines.strip().replace("\n", "; "))

    def _remedy(self) -> str:
        return (f"`lab export-metrics {self._run.name} --to {self._run.train.tracker}` adds what"
                " is missing")

    def _lag(self) -> str:
        """Return a warning, once, if no record has been taken for a while. Call it at reports."""
        with suppress(OSError):
            progress = (self._run.run_dir / STATE_NAME).stat().st_mtime_ns
            if progress != self._progress:
                self._progress, self._progress_at = progress, time.monotonic()
        waited = time.monotonic() - self._progress_at
        if waited < LAG_SECONDS or self._has_warned:
            return ""
        self._has_warned = True
        return f"it has taken no records for {waited:.0f} s"

    def end(self) -> None:
        """Tell the tracker that no more records come."""
        self._told_at = time.monotonic()
        if self._process is not None:
            with suppress(OSError):
                self._process.stdin.write(b"end\n")

    def finish(self, limit_seconds: Callable[[], float]) -> str:
        """Wait until the tracker has all records; end one that takes longer than the limit.

        Args:
            limit_seconds: counted from `end`.
        """
        while self._process is not None and self._process.poll() is None:
            self._heartbeat()
            if time.monotonic() - self._told_at >= (limit := limit_seconds()):
                process, self._process = self._process, None
                process.stdin.close()
                kill(process)
                return f"it had not taken all records after {limit:.0f} s; {self._remedy()}"
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)
        return self.take_failure()


def check_tracker(run: Run, *, asked_by: str | None = None) -> list[str]:
    """Check, without importing it, that a run's tracker can be used.

    Args:
        asked_by: what names the tracker, if it is not the run's `train.json`.

    Returns:
        What the user should know.

    Raises:
        UserError: its package is missing, or something else is where its files go.
    """
    kind = run.train.tracker
    if kind == "none":
        return []
    require_package(kind, asked_by or f'{run.train_path}: tracker "{kind}"')
    check_records(run.run_dir / STATE_NAME)
    check_inside(run.run_dir / kind, run.run_dir, "--runs-dir")
    if kind == "wandb" and wandb_mode() == "offline":
        return ["wandb has no API key, so it records offline, in the run's directory wandb; to"
                " upload, run `wandb login` or set WANDB_API_KEY (WANDB_MODE=offline hides this)"]
    return []


def require_package(kind: str, what: str) -> None:
    """Refuse a tracker whose package is missing.

    Args:
        what: what needs it, for the error's line.

    Raises:
        UserError: says how to install it.
    """
    found = importlib.util.find_spec(kind)
    if found is None or found.origin is None:  # a directory of that name is no package
        raise UserError(f"{what} needs the package {kind}: run `uv sync --extra {kind}` (or pip"
                        f" install {kind})")


def place_of(run: Run, tracked: TrackedRun, *, output_dir: Path | None = None,
             note: Callable[[str], None]) -> Place:
    """Return where and as what a run is tracked."""
    config = {"model": run.model.model_dump(), "train": run.train.model_dump()}
    return Place(id=tracked.id, name=tracked.name_of(run.name), run_name=run.name, config=config,
                 run_dir=run.run_dir, output_dir=output_dir, note=note)


def read_end(run: Run) -> tuple[str, dict[str, float]]:
    """Return the status and figures of a run's summary; no figures if it has not ended."""
    with suppress(OSError, ValueError, RecursionError):
        summary = json.loads(read_regular_file(run.summary_path))
        if isinstance(summary, dict) and (figures := final_figures(summary)):
            return visible(str(summary.get("status")))[:20], figures
    return "", {}


def wait_for_word() -> bool:
    """Wait a while for word from the trainer that no more records come; return whether it came."""
    ready, _, _ = select.select([sys.stdin], [], [], WAIT_SECONDS)
    if ready and not os.read(sys.stdin.fileno(), 16):
        os._exit(1)  # the trainer has ended without it
    return bool(ready)


def main(run_dir: Path, start: Start, parent: int) -> None:
    """Be the process that passes records on. What the user should know goes to stderr."""
    os.nice(LOWEST)
    end_with_parent()
    if os.getppid() != parent:  # it has ended before
        return
    notes = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # of the packages: not read
    warnings.simplefilter("ignore")
    try:
        failpoint("track")
        track(load_run(run_dir.parent, run_dir.name), start, note=lambda line: _say(notes, line))
    except Exception as error:
        _say(notes, describe(error))
        os._exit(1)  # packages may wait at the end, for what does not come


def track(run: Run, start: Start, *, note: Callable[[str], None]) -> None:
    """Pass all records on, then the figures of the end."""
    tracked = TrackedRun.load(run.run_dir)
    feed = open_feed(run, tracked, place_of(run, tracked, note=note))
    feed.begin(start)
    while not wait_for_word():
        feed.pass_on_new()
    feed.finish(*read_end(run))


def open_feed(run: Run, tracked: TrackedRun, place: Place) -> Feed:
    """Open a run's tracker for its records."""
    kind, num_known = run.train.tracker, tracked.num_logged.get(run.train.tracker, 0)
    save = partial(tracked.save, run.run_dir, kind)
    if place.output_dir:  # the tracked run of training is another one
        save = _keep_nothing
    save(num_known)  # the id must be known before anything appears under it
    return Feed(run.metrics_path, open_tracker(kind, place), num_known=num_known, save=save)


def _keep_nothing(num_logged: int) -> None:
    pass


def _say(notes: Any, line: str) -> None:
    with suppress(OSError):
        notes.write(one_line(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Start(**json.loads(sys.argv[2])), int(sys.argv[3]))
