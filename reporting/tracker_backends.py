"""TensorBoard, Weights & Biases and Trackio behind one interface.

Each package is imported where a run uses it, and its errors are raised as they are.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from basics.errors import describe
from reporting.metrics_file import STEP
from run_config import Run

PROJECT = "ddp-train"  # where runs appear in wandb and Trackio
MAX_NAME_LENGTH = 80  # of a run, in the names that trackers have for it
REMOTE_TRACKIO = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # set by who wants it to use a network
NO_REPORTS = {"WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False",
              "HF_HUB_DISABLE_TELEMETRY": "1"}


def open_tracker(run: Run, id: str, last_step: int, *, output_dir: Path | None,
                 note: Callable[[str], None]) -> TensorBoard | Online:
    """Return the tracker of a run, ready to take records.

    Args:
        id: of the tracked run.
        last_step: the last one that it has; what it shows of later ones is taken back.
        output_dir: for its files; without one, in the run directory or the tracker's own.
        note: called with a line that the user should see.
    """
    os.environ.update({key: os.environ.get(key, value) for key, value in NO_REPORTS.items()})
    config = {"model": run.model.model_dump(), "train": run.train.model_dump()}
    if run.train.tracker == "tensorboard":
        return TensorBoard((output_dir or run.run_dir / "tensorboard") / id, config, last_step)
    name = f"{run.name[:MAX_NAME_LENGTH]}-{id}"  # no other tracked run has it
    if run.train.tracker == "trackio":
        return _open_trackio(name, config, output_dir)
    place = output_dir or os.environ.get("WANDB_DIR") or run.run_dir
    return _open_wandb({"id": name, "name": run.name, "config": config, "dir": place}, note)


class TensorBoard:
    """Event files in a directory, by TensorBoard's own writer: PyTorch's needs 540 MiB more."""

    def __init__(self, place: Path, config: dict[str, Any], last_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer, self._last_step = EventFileWriter(str(place)), last_step
        # At a start, TensorBoard forgets what it has read of this step and later ones.
        self._add(last_step + 1, session_log=SessionLog(status=SessionLog.START))
        text = json.dumps(config, indent=2)
        self._add_text("config", f"    {text.replace(chr(10), chr(10) + 4 * ' ')}", step=0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last_step = step
        self._add(step, summary=Summary(value=[
            Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, status: str, figures: dict[str, float]) -> None:
        """Take the figures of the end, if there are any; write all."""
        if figures:
            self._add_text("final/status", status, step=self._last_step)
            self.log(self._last_step, figures)
        self._writer.close()

    def _add_text(self, name: str, text: str, *, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, summary=text_pb(name, text))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


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


def _open_trackio(name: str, config: dict[str, Any], output_dir: Path | None) -> Online:
    problems: list[str] = []

    def keep(message: Warning | str, *_: Any, **__: Any) -> None:
        if "trackio" in str(message).lower():
            problems.append(str(message))

    warnings.simplefilter("always", UserWarning)  # its errors are only warnings
    warnings.showwarning = keep
    if not any(map(os.environ.get, REMOTE_TRACKIO)):
        os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks whose the token is, if there is one
    if output_dir:
        os.environ["TRACKIO_DIR"] = str(output_dir)
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
