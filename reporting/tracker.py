"""Sends a run's records to a tracker while it trains, in a process of its own.

It reads `metrics.jsonl` as it grows, so a tracker that fails, hangs or is slow loses nothing and
holds nothing up: another start, the next launch, or `lab export-metrics` sends what is missing.
"""

from __future__ import annotations

import importlib.util
import secrets
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from basics.errors import UserError, visible
from basics.failpoints import failpoint
from basics.files import read_regular_file, write_atomically
from processes import beside
from processes.beside import Beside, serve
from reporting.metrics_file import metrics_of, read_metrics, shown_step, valid_records
from reporting.summary import final_figures, read_summary
from reporting.tracker_backends import open_tracker
from run_config import Run, load_run

STATE_NAME = "tracker.json"  # in the run directory
WAIT_SECONDS = 2.0  # between two looks for new records


class TrackedRun(BaseModel):
    """`tracker.json`: under which id trackers know a run, and how many records each of them has."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(pattern=r"^[0-9a-f-]{1,40}$")
    sent: dict[str, NonNegativeInt] = {}

    @classmethod
    def load(cls, run_dir: Path, *, starts_over: bool = False) -> TrackedRun:
        """Return the tracked run of a run directory; a new one if there is none to go on with."""
        try:
            if not starts_over:
                return cls.model_validate_json(read_regular_file(run_dir / STATE_NAME))
        except (OSError, ValidationError):
            pass  # none yet, or damaged
        began = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        return cls(id=f"{began}-{secrets.token_hex(2)}")

    def save(self, run_dir: Path) -> None:
        """Raises: OSError."""
        write_atomically(run_dir / STATE_NAME, self.model_dump_json() + "\n")


def begin_tracking(run: Run, *, starts_over: bool) -> None:
    """Note how many of the records that are left trackers have. Rank 0, before it adds any.

    Args:
        starts_over: begin a new tracked run.

    Raises: OSError: that cannot be written.
    """
    tracked = TrackedRun.load(run.run_dir, starts_over=starts_over)
    left = len(read_metrics(run.metrics_path))
    tracked.model_copy(update={
        "sent": {kind: min(sent, left) for kind, sent in tracked.sent.items()}}).save(run.run_dir)


def tracker_process(run: Run) -> Beside:
    """Return the process of a run's tracker, with nothing to run if it has none."""
    launch = None if run.train.tracker == "none" else (
        lambda: beside.start_module("reporting.tracker", run.run_dir))
    return Beside("tracker", launch, advice=(
        f"; `lab export-metrics {run.name} --to {run.train.tracker}` adds what is missing"))


def send_records(run: Run, tracked: TrackedRun, *, output_dir: Path | None = None,
                 note: Callable[[str], None], is_over: Callable[[], bool] = lambda: True) -> int:
    """Send the records that a run's tracker lacks, and new ones as they come; return their number.

    At last the figures of the summary, if the run has ended.

    Args:
        output_dir: for a tracked run that training does not go on with.
        note: called with a line for the user.
        is_over: waits a while; returns whether no more records come.
    """
    kind, path = run.train.tracker, run.metrics_path
    records, offset = _read_from(path, 0)
    num_before = num_sent = min(len(records), tracked.sent.get(kind, 0))
    last_step = shown_step(records[num_sent - 1]) if num_sent else 0

    def save() -> None:
        if output_dir is None:
            changed = {"sent": tracked.sent | {kind: num_sent}}
            tracked.model_copy(update=changed).save(run.run_dir)

    save()  # the id must be known before anything appears under it
    tracker = open_tracker(run, tracked.id, last_step, output_dir=output_dir, note=note)
    new, ends = records[num_sent:], False
    while not ends:
        ends = is_over()
        more, offset = _read_from(path, offset)
        new += more
        if new:
            # What came before these has arrived a while ago: after a kill, a tracker rather gets
            # records twice than not at all.
            save()
            for record in new:
                tracker.log(shown_step(record), metrics_of(record))
            tracker.flush()
            num_sent, new = num_sent + len(new), []
    summary = read_summary(run)
    tracker.finish(visible(str(summary.get("status")))[:20], final_figures(summary))
    save()
    return num_sent - num_before


def _read_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records from an offset on, and the offset of the next one."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[:text.rfind(b"\n") + 1]  # without a line that is being written
    return valid_records(whole.decode(errors="replace")), offset + len(whole)


def check_tracker(run: Run, *, asked_by: str | None = None) -> None:
    """Check, without importing it, that a run's tracker can be used.

    Args:
        asked_by: what names the tracker, if it is not the run's `train.json`.

    Raises:
        UserError: its package is missing.
    """
    kind = run.train.tracker
    found = None if kind == "none" else importlib.util.find_spec(kind)
    if kind != "none" and (found is None or found.origin is None):  # a directory is no package
        what = asked_by or f'{run.train_path}: tracker "{kind}"'
        raise UserError(f"{what} needs the package {kind}: run `uv sync --extra {kind}` (or pip"
                        f" install {kind})")


def track(run_dir: Path, say: Callable[[str], None]) -> None:
    """Send all records until the trainer says that no more come."""
    failpoint("track")
    run = load_run(run_dir.parent, run_dir.name)
    send_records(run, TrackedRun.load(run_dir), note=say, is_over=_wait_for_end)


def _wait_for_end() -> bool:
    """Wait a while for word from the trainer that no more records come; return whether it came."""
    ready, _, _ = select.select([sys.stdin], [], [], WAIT_SECONDS)
    return bool(ready)


if __name__ == "__main__":
    serve(track)
