"""Sends a run's records to a tracker while it trains, in a process of its own.

It reads `metrics.jsonl` as it grows, so a tracker that fails, hangs or is slow loses nothing and
holds nothing up: another start, the next launch, or `lab export-metrics` sends what is missing.
"""

import importlib.util
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from basics.errors import UserError, describe, visible
from basics.failpoints import failpoint
from basics.files import read_regular_file, write_atomically
from processes import background
from processes.background import BackgroundProcess, serve
from reporting.metrics_file import metrics_of, read_metrics, valid_records, whole_lines
from reporting.summary import final_figures, read_summary
from run_config import Run, load_run

STATE_NAME = "tracker.json"  # in the run directory
WAIT_SECONDS = 1.0  # between two looks for new records
PROJECT = "ddp-train"  # where runs appear in wandb and Trackio
STEP = "step"  # the x axis of wandb, whose own steps cannot go back
MAX_NAME_LENGTH = 80  # of a run, in the names that trackers have for it
NO_REPORTS = {
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

Points = list[tuple[int, dict[str, Any]]]  # steps, counted from 1, and metrics by name


class TrackedRun(BaseModel):
    """`tracker.json`: under which id trackers know a run, and how many records each of them has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(pattern=r"^[0-9a-f-]{1,40}$")
    sent: dict[str, NonNegativeInt] = {}

    @classmethod
    def load(cls, run_dir: Path, *, starts_over: bool = False) -> Self:
        """Return the tracked run of a run directory; a new one if there is none to go on with."""
        with suppress(OSError, ValidationError):  # none yet, or damaged
            if not starts_over:
                return cls.model_validate_json(read_regular_file(run_dir / STATE_NAME))
        return cls(id=time.strftime(f"%Y%m%d-%H%M%S-{secrets.token_hex(2)}", time.gmtime()))

    def save(self, run_dir: Path) -> None:
        write_atomically(run_dir / STATE_NAME, self.model_dump_json() + "\n")


def begin_tracking(run: Run, *, starts_over: bool) -> None:
    """Note how many of the records that are left trackers have; `starts_over`: none of them.

    Rank 0, before it adds any. Raises: OSError.
    """
    tracked = TrackedRun.load(run.run_dir, starts_over=starts_over)
    left = len(read_metrics(run.metrics_path))
    tracked.sent = {kind: min(sent, left) for kind, sent in tracked.sent.items()}
    tracked.save(run.run_dir)


def tracker_process(run: Run) -> BackgroundProcess:
    """Return the process of a run's tracker, which it has."""
    launch = partial(background.start_module, "reporting.tracker", run.run_dir)
    advice = f"; `lab export-metrics {run.name} --to {run.config.tracker}` adds what is missing"
    return BackgroundProcess("tracker", launch, advice=advice)


def check_tracker(kind: str) -> None:
    """Check, without importing it, that a tracker can be used. Raises: UserError."""
    if kind == "none":
        return
    found = importlib.util.find_spec(kind)
    if found is None or found.origin is None:  # a directory is no package
        raise UserError(
            f'tracker "{kind}" needs the package {kind}: run `uv sync --extra {kind}`'
            f" (or pip install {kind})"
        )


def send_records(
    run: Run,
    tracked: TrackedRun,
    *,
    note: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: True,
) -> int:
    """Send the records that a run's tracker lacks, and new ones as they come; return their number.

    At last the figures of the summary, if the run has ended. `is_over` waits a while, and returns
    whether no more records come. `note` takes a line for the user.
    """
    kind = run.config.tracker
    lines = whole_lines(run.metrics_path, 0)
    offset = len(lines)
    records = valid_records(lines.decode(errors="replace"))
    num_before = num_sent = min(len(records), tracked.sent.get(kind, 0))
    last_step = records[num_sent - 1]["global_step"] + 1 if num_sent else 0

    def save() -> None:
        tracked.sent[kind] = num_sent
        tracked.save(run.run_dir)

    save()  # the id must be known before anything appears under it
    tracker = open_tracker(run, tracked.id, last_step, note)
    new = records[num_sent:]
    ends = False
    while not ends:
        ends = is_over()
        lines = whole_lines(run.metrics_path, offset)
        offset += len(lines)
        new += valid_records(lines.decode(errors="replace"))
        if new:
            # What came before these has arrived a while ago: after a kill, a tracker rather gets
            # records twice than not at all.
            save()
            tracker.send([(record["global_step"] + 1, metrics_of(record)) for record in new])
            last_step = new[-1]["global_step"] + 1
            num_sent += len(new)
            new = []
    summary = read_summary(run)
    figures: dict[str, Any] = final_figures(summary)
    if figures:
        figures["final/status"] = visible(str(summary.get("status")))[:20]
    tracker.finish(last_step, figures)
    save()
    return num_sent - num_before


class TensorBoard:
    """Event files in a directory."""

    def __init__(self, place: Path, config: dict[str, Any], last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard forgets what it has read of the step of a purge and later ones.
        self._writer = SummaryWriter(str(place), purge_step=last_step + 1)
        text = json.dumps(config, indent=2).replace("\n", "\n    ")  # Markdown's code
        self._writer.add_text("config", f"    {text}")

    def send(self, points: Points) -> None:
        for step, metrics in points:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, step: int, figures: dict[str, Any]) -> None:
        if figures:
            self._writer.add_text("final/status", figures.pop("final/status"), step)
            self.send([(step, figures)])
        self._writer.close()


class Trackio:
    """A run of Trackio. Where steps come again, as after a kill, both values are kept."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._problems: list[str] = []
        warnings.simplefilter("always", UserWarning)  # its errors are only warnings
        warnings.showwarning = lambda message, *_, **__: self._problems.append(str(message))
        if not os.environ.get("TRACKIO_SPACE_ID") and not os.environ.get("TRACKIO_SERVER_URL"):
            os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks whose the token is, if there is one
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=name,
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._finish = trackio.finish  # the run's own would be called again, and print, at the exit

    def send(self, points: Points) -> None:
        """Pass them to its threads, which send them at once; raise what was only a warning."""
        for step, metrics in points:
            if metrics:
                self._run.log(metrics, step=step)
        if found := [text for text in self._problems if "trackio" in text.lower()]:
            raise RuntimeError(found[0])

    def finish(self, step: int, figures: dict[str, Any]) -> None:
        self.send([(step, figures)])
        self._finish()
        self.send([])


class Wandb:
    """A run of wandb: records and configs, no code, no git state, no facts of the machine.

    Where steps come again, as after a kill, both values are kept.
    """

    def __init__(
        self, run: Run, name: str, config: dict[str, Any], note: Callable[[str], None]
    ) -> None:
        os.environ["WANDB_SILENT"] = "true"  # else, without a key, it asks for one in a terminal
        import wandb

        options: dict[str, Any] = {
            "id": name,
            "name": run.name,
            "config": config,
            "resume": "allow",
            "dir": os.environ.get("WANDB_DIR") or run.run_dir,
            "allow_val_change": True,
            "project": os.environ.get("WANDB_PROJECT") or PROJECT,
            "settings": wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                save_code=False,
                disable_job_creation=True,
                label_disable=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        }
        try:
            self._run = wandb.init(**options)
        except wandb.Error as error:  # no network, no key, or one that is not accepted
            note(f"wandb cannot be used online, so it records offline: {describe(error)}")
            wandb.teardown()  # its own process still has a run of this id
            self._run = wandb.init(mode="offline", **options)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def send(self, points: Points) -> None:
        for step, metrics in points:
            if metrics:
                self._run.log(metrics | {STEP: step})

    def finish(self, step: int, figures: dict[str, Any]) -> None:
        self._run.summary.update(figures)
        self._run.finish()


def open_tracker(
    run: Run, id: str, last_step: int, note: Callable[[str], None]
) -> TensorBoard | Trackio | Wandb:
    """Return the tracker of a run, which knows it by this id.

    What it shows of steps after `last_step` is taken back, if it can do that.
    """
    for variable, value in NO_REPORTS.items():
        os.environ.setdefault(variable, value)
    config = {"model": run.model.model_dump(), "train": run.config.model_dump()}
    name = f"{run.name[:MAX_NAME_LENGTH]}-{id}"  # no other tracked run has it
    if run.config.tracker == "tensorboard":
        return TensorBoard(run.run_dir / "tensorboard" / id, config, last_step)
    if run.config.tracker == "trackio":
        return Trackio(name, config)
    return Wandb(run, name, config, note)


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
