"""Starts the command of `--after-checkpoint` for each checkpoint, beside training."""

import subprocess

from basics.errors import UserError
from processes.background import LOWEST, BackgroundProcess
from reporting.run_log import RunLog
from trainer.background_observer import BackgroundObserver
from trainer.launch import Launch
from trainer.startup import OpenedDir
from trainer.user_commands import command_failed, facts_of, start_command

OPTION = "--after-checkpoint"
LEAST_SECONDS = 60.0  # for the last command where the budget is spent
LOG = "after-checkpoint.log"  # in the run directory: what the last command printed


class AfterCheckpoint(BackgroundObserver):
    """The process of the command; the last one is waited for, and its failure is the launch's."""

    def __init__(self, launch: Launch, log: RunLog, command: str) -> None:
        run = launch.run

        def start() -> subprocess.Popen[bytes]:
            with (run.run_dir / LOG).open("w") as output:
                return start_command(command, facts_of(run), output, priority=LOWEST)

        advice = f"; {run.run_dir / LOG} has its output"
        super().__init__(
            launch, log, BackgroundProcess("after-checkpoint", start, advice=advice), OPTION
        )

    def start(self, opened: OpenedDir) -> None:
        """Copy what was set aside, before there are new checkpoints to copy."""
        if opened.aside_dir is not None:
            self.background.start()

    def written(self) -> None:
        self.background.start()

    def finish(self) -> UserError | None:
        """Wait for the command, of which one more is started; after a stop signal it is first."""
        watchdog, deadlines = self.launch.watchdog, self.launch.watchdog.deadlines
        until = self.until(deadlines.after_checkpoint, least=LEAST_SECONDS)
        self.background.start()
        failure = self.wait(
            lambda: watchdog.stop_by - deadlines.after_command if watchdog.stop_signal else until()
        )
        if watchdog.stop_signal:
            self.warn(failure)
            return None
        return command_failed(OPTION, failure) if failure else None
