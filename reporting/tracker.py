"""Sends a run's records to a tracker while it trains, in a process of its own.

It reads `metrics.jsonl` as it grows, so a tracker that fails, hangs or is slow loses nothing and
holds nothing up: another start, the next launch, or `lab export-metrics` sends what is missing.
Each tracker's package is imported where a run uses it, and its errors are raised as they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from basics.errors import UserError, describe, visible
from basics.failpoints import failpoint
from basics.files import read_regular_file, write_atomically
from processes import beside
from processes.beside import Beside, serve
from reporting.metrics_file import STEP, metrics_of, read_metrics, valid_records
from reporting.summary import final_figures, read_summary
from run_config import Run, load_run

STATE_NAME = "tracker.json"  # in the run directory
WAIT_SECONDS = 1.0  # between two looks for new records
PROJECT = "ddp-train"  # where runs appear in wandb and Trackio
MAX_NAME_LENGTH = 80  # of a run, in the names that trackers have for it
REMOTE_TRACKIO = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # set by who wants it to use a network
NO_REPORTS = {"WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False",
              "HF_HUB_DISABLE_TELEMETRY": "1"}


class TrackedRun(BaseModel):
    """`tracker.json`: under which id trackers know a run, and how many records each of them has."""

    model_config = ConfigDict(extra="forbid", strict=True)

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
    tracked.sent = {kind: min(sent, left) for kind, sent in tracked.sent.items()}
    tracked.save(run.run_dir)


def tracker_process(run: Run) -> Beside:
    """Return the process of a run's tracker, with nothing to run if it has none."""
    launch = None if run.train.tracker == "none" else (
        lambda: beside.start_module("reporting.tracker", run.run_dir))
    return Beside("tracker", launch, advice=(
        f"; `lab export-metrics {run.name} --to {run.train.tracker}` adds what is missing"))


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


def send_records(run: Run, tracked: TrackedRun, *, note: Callable[[str], None],
                 is_over: Callable[[], bool] = lambda: True) -> int:
    """Send the records that a run's tracker lacks, and new ones as they come; return their number.

    At last the figures of the summary, if the run has ended.

    Args:
        note: called with a line for the user.
        is_over: waits a while; returns whether no more records come.
    """
    kind, path = run.train.tracker, run.metrics_path
    records, offset = _read_from(path, 0)
    num_before = num_sent = min(len(records), tracked.sent.get(kind, 0))
    last_step = records[num_sent - 1]["global_step"] + 1 if num_sent else 0

    def save() -> None:
        tracked.sent[kind] = num_sent
        tracked.save(run.run_dir)

    save()  # the id must be known before anything appears under it
    tracker = open_tracker(run, tracked.id, last_step, note)
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
                tracker.log(record["global_step"] + 1, metrics_of(record))
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


def open_tracker(run: Run, id: str, last_step: int,
                 note: Callable[[str], None]) -> TensorBoard | Online:
    """Return the tracker of a run, ready to take records.

    Args:
        id: of the tracked run.
        last_step: the last one that it has; what it shows of later ones is taken back.
        note: called with a line that the user should see.
    """
    os.environ.update({key: os.environ.get(key, value) for key, value in NO_REPORTS.items()})
    config = {"model": run.model.model_dump(), "train": run.train.model_dump()}
    if run.train.tracker == "tensorboard":
        return TensorBoard(run.run_dir / "tensorboard" / id, config, last_step)
    name = f"{run.name[:MAX_NAME_LENGTH]}-{id}"  # no other tracked run has it
    if run.train.tracker == "trackio":
        return _open_trackio(name, config)
    place = os.environ.get("WANDB_DIR") or run.run_dir
    return _open_wandb({"id": name, "name": run.name, "config": config, "dir": place}, note)


class TensorBoard:
    """Event files in a directory, by TensorBoard's own writer: PyTorch's needs 540 MiB more."""

    def __init__(self, place: Path, config: dict[str, Any], last_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = Event, Summary, text_pb
        self._writer, self._last_step = EventFileWriter(str(place)), last_step
        # At a start, TensorBoard forgets what it has read of this step and later ones.
        self._add(last_step + 1, session_log=SessionLog(status=SessionLog.START))
        text = json.dumps(config, indent=2).replace("\n", "\n    ")  # Markdown's code
        self._add(0, summary=text_pb("config", f"    {text}"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._last_step = step
        self._add(step, summary=self._summary(value=[
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Take the figures of the end, if there are any; write all."""
        if figures:
            self._add(self._last_step, summary=self._text("final/status", status))
            self.log(self._last_step, figures)
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))


class Online:
    """A run of wandb or Trackio. Where steps come again, as after a kill, both values are kept.

    Args:
        problems: what the package has only warned of is put there.
    """

    def __init__(self, package: Any, run: Any, problems: list[str]) -> None:
        self._package, self._run, self._problems = package, run, problems
        self._takes_step = package.__name__ == "trackio"
        self._last_step = 0

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._last_step = step
        if metrics and self._takes_step:
            self._run.log(metrics, step=step)
        elif metrics:  # wandb refuses steps that go back: they are a metric there
            self._run.log(metrics | {STEP: step})

    def flush(self) -> None:
        """Raise what was only a warning. Its own threads or processes send all at once."""
        if self._problems:
            raise RuntimeError(self._problems[0])

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Take the figures of the end, if there are any; wait until all has been sent."""
        if figures and self._takes_step:
            self.log(self._last_step, figures | {"final/status": status})
        elif figures:
            self._run.summary.update(figures | {"final/status": status})
        self._package.finish()  # the run's own would be called again, and print, at the exit
        self.flush()


def _open_trackio(name: str, config: dict[str, Any]) -> Online:
    problems: list[str] = []

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        if "trackio" in str(message).lower():
            problems.append(str(message))

    warnings.simplefilter("always", UserWarning)  # its errors are only warnings
    warnings.showwarning = keep
    if not any(map(os.environ.get, REMOTE_TRACKIO)):
        os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks whose the token is, if there is one
    import trackio

    run = trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False,
                       auto_log_gpu=False, auto_log_cpu=False)
    return Online(trackio, run, problems)


def _open_wandb(settings: dict[str, Any], note: Callable[[str], None]) -> Online:
    """Nothing is sent beside the records and configs: no code, no git state, no machine."""
    os.environ["WANDB_SILENT"] = "true"  # else, without a key, it asks for one in a terminal
    import wandb

    settings |= {
        "project": os.environ.get("WANDB_PROJECT") or PROJECT, "resume": "allow",
        "allow_val_change": True, "settings": wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, label_disable=True, x_disable_meta=True,
            x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False)}
    try:
        run = wandb.init(**settings)
    except wandb.Error as error:  # no network, no key, or one that is not accepted
        note(f"wandb cannot be used online, so it records offline: {describe(error)}")
        wandb.teardown()  # its own process still has a run of this id
        run = wandb.init(mode="offline", **settings)
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return Online(wandb, run, problems=[])


def track(run_dir: Path, say: Callable[[str], None]) -> None:
    """Send all records until the summary says that the launch has ended."""
    failpoint("track")
    run = load_run(run_dir.parent, run_dir.name)

    def is_over() -> bool:
        time.sleep(WAIT_SECONDS)
        return read_summary(run).get("status") != "running"

    send_records(run, TrackedRun.load(run_dir), note=say, is_over=is_over)


if __name__ == "__main__":
    serve(track)
