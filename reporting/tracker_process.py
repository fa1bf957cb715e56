"""Sends a run's records to a tracker while it trains, in a process that needs no torch.

It reads `metrics.jsonl` as it grows, so a tracker that fails, hangs or is slow loses nothing and
holds nothing up: another start, the next launch, or `lab export-metrics` sends what is missing.
"""

from __future__ import annotations

import importlib.util
import math
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
from basics.files import check_inside
from processes.helper_process import failure_of, kill, start_module
from processes.run_lock import end_with_parent
from reporting.chart_process import LOWEST
from reporting.metric_names import final_figures
from reporting.metrics_file import check_records
from reporting.summary import read_summary
from reporting.tracked_run import STATE_NAME, Feed, Sent, Start, TrackedRun
from reporting.tracker_backends import Place, open_tracker, wandb_mode
from run_config import Run, load_run

WAIT_SECONDS = 2.0  # between two looks for new records
POLL_SECONDS = 0.25  # between two heartbeats while the tracker is waited for
LAG_SECONDS = 600.0  # without taking a record, before a warning
RESTART_SECONDS = 600.0  # from a failure to the next start
MAX_NOTES_BYTES = 2**14  # of lines for the user that are read at once


class TrackerProcess:
    """Starts a run's tracker and waits for it at the end; does nothing if it has none. Rank 0.

    One that fails is started again after a while. Failures are returned as text, each of them
    once. On Linux the process ends with this one.

    Args:
        heartbeat: called while the tracker is waited for.
    """

    def __init__(self, run: Run, *, heartbeat: Callable[[], None] = lambda: None) -> None:
        self._run, self._heartbeat = run, heartbeat
        self._process: subprocess.Popen[bytes] | None = None
        self._told_at, self._has_warned = 0.0, False
        self._progress, self._progress_at = 0, 0.0
        self._said, self._failure, self._restart_at = "", "", math.inf
        self._start: Start | None = None  # of this launch, until it is saved
        self._starts_over = False

    def start(self, first_step: int, *, starts_over: bool) -> str:
        """Start the tracker, before the first record of this launch is written.

        Args:
            starts_over: begin a new tracked run.
        """
        if self._run.train.tracker == "none":
            return ""
        path, self._starts_over = self._run.metrics_path, starts_over
        self._start = Start(path.stat().st_size if path.exists() else 0, first_step)
        return self._try_to_start()

    def _try_to_start(self) -> str:
        run_dir, kind = self._run.run_dir, self._run.train.tracker
        try:
            failpoint("tracker")
            if self._start is not None:
                tracked = TrackedRun.load(run_dir, starts_over=self._starts_over)
                tracked = tracked.at_launch(kind, self._start)
                tracked.save(run_dir, kind, tracked.sent_to(kind))
                self._start = None
            self._process = start_module(
                "reporting.tracker_process", str(run_dir.absolute()), str(os.getpid()),
                stdin=subprocess.PIPE)
        except Exception as error:
            return self._failed(describe(error))
        self._progress_at, self._restart_at = time.monotonic(), math.inf
        return ""

    def _failed(self, failure: str) -> str:
        """Let the tracker be started again later; return what the user should know."""
        self._restart_at = time.monotonic() + RESTART_SECONDS
        is_known, self._failure = failure == self._failure, failure
        minutes = RESTART_SECONDS / 60
        return "" if is_known else (f"{failure}; {self._remedy()}; until the launch ends, the"
                                    f" tracker is started again every {minutes:.0f} minutes")

    def take_failure(self) -> str:
        """Return what the user should know of the tracker since the last call, or nothing."""
        if self._process is None:
            is_due = time.monotonic() >= self._restart_at and not self._told_at
            return self._try_to_start() if is_due else ""
        if self._process.poll() is None:
            # Told at the next call: these may be its last words, which belong to its end.
            said, self._said = self._said, self._note()
            return said or self._lag()
        said, self._said = "; ".join(filter(None, (self._said, self._note()))), ""
        process, self._process = self._process, None
        process.stdin.close()
        failure = failure_of(process, "tracker")
        if not self._told_at:
            return self._failed(said or failure or "it has ended")
        return f"{said or failure}; {self._remedy()}" if failure else said

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
    summary = read_summary(run)
    figures = final_figures(summary)
    return (visible(str(summary.get("status")))[:20], figures) if figures else ("", {})


def wait_for_word() -> bool:
    """Wait a while for word from the trainer that no more records come; return whether it came."""
    ready, _, _ = select.select([sys.stdin], [], [], WAIT_SECONDS)
    if ready and not os.read(sys.stdin.fileno(), 16):
        os._exit(1)  # the trainer has ended without it
    return bool(ready)


def main(run_dir: Path, parent: int) -> None:
    """Be the process that sends records. What the user should know goes to stderr."""
    os.nice(LOWEST)
    end_with_parent()
    if os.getppid() != parent:  # it has ended before
        return
    notes = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # of the packages: not read
    warnings.simplefilter("ignore")
    try:
        failpoint("track")
        track(load_run(run_dir.parent, run_dir.name), note=lambda line: _say(notes, line))
    except Exception as error:
        _say(notes, describe(error))
        os._exit(1)  # packages may wait at the end, for what does not come


def track(run: Run, *, note: Callable[[str], None]) -> None:
    """Send all records, then the figures of the end."""
    tracked = TrackedRun.load(run.run_dir)
    feed = open_feed(run, tracked, place_of(run, tracked, note=note))
    feed.begin()
    while not wait_for_word():
        feed.send_new()
    feed.finish(*read_end(run))


def open_feed(run: Run, tracked: TrackedRun, place: Place) -> Feed:
    """Open a run's tracker for its records."""
    kind, sent = run.train.tracker, tracked.sent_to(run.train.tracker)
    save = partial(tracked.save, run.run_dir, kind)
    if place.output_dir:  # the tracked run of training is another one
        save = _keep_nothing
    save(sent)  # the id must be known before anything appears under it
    return Feed(run.metrics_path, open_tracker(kind, place), sent, save=save)


def _keep_nothing(sent: Sent) -> None:
    pass


def _say(notes: Any, line: str) -> None:
    with suppress(OSError):
        notes.write(one_line(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
