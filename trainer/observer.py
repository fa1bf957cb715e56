"""The moments of a launch at which features of a run, each in a file of its own, are called."""

from basics.errors import UserError
from reporting.run_log import Report
from reporting.summary import StopReason
from trainer.startup import OpenedDir


class Observer:
    """A feature of a run: what it does at each moment, nothing here. Rank 0 alone has observers.

    Nothing that fails in one may stop training. `stop_reason` says why the launch is to end after
    this step; None: it need not.
    """

    stop_reason: StopReason | None = None

    def start(self, opened: OpenedDir) -> None:
        """The launch begins to train, with its run directory as it was opened."""

    def step(self, global_step: int, *, is_report_due: bool) -> None:
        """A step was given to the device, which may not have taken it yet."""

    def report(self, report: Report) -> None:
        """The losses of the last steps are known; what is added to `report` is recorded."""

    def validation(self, report: Report) -> None:
        """The model was validated; what is added to `report` is recorded."""

    def checkpoint(self) -> None:
        """A checkpoint was taken, and validated if that was due; training goes on now."""

    def written(self) -> None:
        """A checkpoint is whole on disk, or its validation was added. In the saver's thread."""

    def end(self) -> dict[str, object]:
        """No step is left; return what `summary.json`, which is written next, has to say of it."""
        return {}

    def finish(self) -> UserError | None:
        """Wait for what is left; return the error that the launch ends with, if any."""
        return None

    def close(self) -> None:
        """The launch is over: nothing has diverged, and all files are on disk."""
