"""TensorBoard, Weights & Biases and Trackio behind one interface, `Tracker`. Needs no torch.

Each of them imports its package when it is made, so only where a run uses it.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from basics.errors import describe
from reporting.metric_names import STEP
from reporting.tracked_run import Tracker

PROJECT = "ddp-train"  # where runs appear in wandb and Trackio
REMOTE_TRACKIO = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # set by who wants it to use a network
NO_REPORTS = {"WANDB_ERROR_REPORTING": "false", "GRADIO_ANALYTICS_ENABLED": "False",
              "HF_HUB_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True)
class Place:
    """Where and as what a run is tracked.

    Attributes:
        id: of the tracked run.
        name: of the tracked run, unlike that of all others.
        run_name: as people know it.
        config: the run's model and train configs.
        run_dir: for what trackers keep on this machine.
        output_dir: the same, if asked for; Trackio's own directory is one for all runs.
        note: called with a line that the user should see.
    """

    id: str
    name: str
    run_name: str
    config: dict[str, Any]
    run_dir: Path
    output_dir: Path | None = None
    note: Callable[[str], None] = field(default=lambda line: None)


def open_tracker(kind: str, place: Place) -> Tracker:
    """Return the tracker of this name, ready to take records."""
    os.environ.update({key: os.environ.get(key, value) for key, value in NO_REPORTS.items()})
    return {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}[kind](place)


class TensorBoard:
    """Event files in `tensorboard/<id>` of the run directory."""

    def __init__(self, place: Place) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        parent = place.output_dir or place.run_dir / "tensorboard"
        self._writer = EventFileWriter(str(parent / place.id), max_queue_size=1000)
        self._last_step = 0
        self._add_text("config", json.dumps(place.config, indent=2))

    def repeat_from(self, step: int) -> None:
        """TensorBoard drops earlier values from this step on."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._event(step, session_log=start))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._last_step = step
        self._add([self._summaries.Summary.Value(tag=name, simple_value=value)
                   for name, value in metrics.items()])

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, status: str, figures: dict[str, float]) -> None:
        if figures:
            self._add_text("final/status", status)
            self.log(self._last_step, figures)
        self._writer.close()

    def _add(self, values: list[Any]) -> None:
        self._writer.add_event(self._event(
            self._last_step, summary=self._summaries.Summary(value=values)))

    def _event(self, step: int, **content: Any) -> Any:
        return self._events.Event(wall_time=time.time(), step=step, **content)

    def _add_text(self, tag: str, text: str) -> None:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        shape = tensor_shape_pb2.TensorShapeProto(
            dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown for code
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=[indented.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add([self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


class Wandb:
    """A run of Weights & Biases; its files are in `wandb` of the run directory.

    Nothing is sent beside the records and configs: no code, no git state, no facts of the machine.
    """

    def __init__(self, place: Place) -> None:
        import wandb

        try:
            self._run = self._init(wandb, place, wandb_mode())
        except wandb.Error as error:  # no network, or a key that is not accepted
            place.note(f"wandb cannot be used online, so it records offline: {describe(error)}")
            wandb.teardown()  # its own process still has a run of this id
            self._run = self._init(wandb, place, "offline")
        # wandb refuses steps that go back, as they do when a run resumes: so they are a metric.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @staticmethod
    def _init(wandb: Any, place: Place, mode: str | None) -> Any:
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, label_disable=True, x_disable_meta=True,
            x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False)
        return wandb.init(
            id=place.name, name=place.run_name, config=place.config, resume="allow", mode=mode,
            allow_val_change=True, project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=place.output_dir or os.environ.get("WANDB_DIR") or place.run_dir,
            settings=settings)

    def repeat_from(self, step: int) -> None:
        """wandb keeps both values of a step."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {STEP: step})

    def flush(self) -> None:
        """Its own process takes all at once."""

    def finish(self, status: str, figures: dict[str, float]) -> None:
        if figures:
            self._run.summary.update(figures | {"final/status": status})
        self._run.finish()


class Trackio:
    """A run in Trackio's own directory, or where its environment variables say.

    Its errors are only warnings there; here they are raised by the next `flush`.
    """

    def __init__(self, place: Place) -> None:
        if not any(map(os.environ.get, REMOTE_TRACKIO)):
            os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks whose the token is, if there is one
        if place.output_dir:
            os.environ["TRACKIO_DIR"] = str(place.output_dir)
        self._problems: list[str] = []
        self._last_step = 0
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            import trackio

            self._stack = ExitStack()
            self._stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = self._keep_warning
            self._run = trackio.init(
                project=PROJECT, name=place.name, config=place.config, resume="allow",
                embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def _keep_warning(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        if category is UserWarning and "trackio" in str(message).lower():
            self._problems.append(str(message))

    def repeat_from(self, step: int) -> None:
        """Trackio keeps both values of a step."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._last_step = step
        self._run.log(metrics, step=step)

    def flush(self) -> None:
        if self._problems:
            raise RuntimeError(self._problems[0])

    def finish(self, status: str, figures: dict[str, float]) -> None:
        if figures:
            self._run.log(figures | {"final/status": status}, step=self._last_step)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            self._run.finish()
        self._stack.close()
        self.flush()


def wandb_mode() -> str | None:
    """Return "offline" where wandb has no account to use; None where its own settings decide."""
    return None if os.environ.get("WANDB_MODE") or _has_wandb_key() else "offline"


def _has_wandb_key() -> bool:
    """Return whether wandb finds a key in the environment or in the file `wandb login` writes."""
    import netrc
    from urllib.parse import urlsplit

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    try:
        path = os.environ.get("NETRC") or Path.home() / ".netrc"
        hosts = netrc.netrc(str(path)).hosts
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False
    return any(host == own or "wandb" in host or host.endswith("forge.coreweave.com")
               for host in hosts)
