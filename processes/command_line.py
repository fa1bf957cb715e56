"""The command line of ddp_train.py. Needs no torch, so that --help is fast."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from basics.errors import UserError
from basics.option_types import ABOVE_0, USD_PER_HOUR


@dataclass(frozen=True)
class Options:
    """The arguments and options of one launch."""

    run: str
    checkpoint: str | None = None
    datasets_dir: Path = Path("datasets")
    runs_dir: Path = Path("runs")
    nproc_per_node: int | None = None
    max_steps: int | None = None
    fresh: bool = False
    usd_per_hour: float | None = None
    sync_to: Path | None = None
    find_max_microbatch: bool = False
    find_learning_rate: bool = False
    save: bool = False
    memory_limit_gib: float | None = None
    json: bool = False
    prefetch: bool = False
    when_done: str | None = None
    began_at: int | None = None  # after a restart by torchrun: the step at which the launch began

    def check(self) -> None:
        """Refuse options that contradict each other. Raises: UserError."""
        if self.fresh and self.checkpoint:
            raise UserError(f"--fresh starts over and CHECKPOINT {self.checkpoint} resumes;"
                            " use one of the two")
        if self.when_done is not None and not self.when_done.strip():
            raise UserError("--when-done is empty; name a command, or leave it out")
        self._check_searches()
        if self.prefetch:
            self._check_prefetch()

    def after_restart(self, began_at: int | None) -> Options:
        """Return the options of processes that torchrun has started again: they resume.

        Args:
            began_at: the step at which the launch began to train; None if it had not.
        """
        if began_at is None:
            return self
        return replace(self, fresh=False, checkpoint=None, began_at=began_at)

    def _check_prefetch(self) -> None:
        _refuse({"CHECKPOINT": self.checkpoint, "--max-steps": self.max_steps,
                 "--fresh": self.fresh, "--when-done": self.when_done, "--sync-to": self.sync_to},
                "cannot be used with --prefetch")
        if "RANK" in os.environ:
            raise UserError("--prefetch needs no torchrun; start it with python ddp_train.py")

    def _check_searches(self) -> None:
        microbatch, rate = "--find-max-microbatch", "--find-learning-rate"
        search = microbatch if self.find_max_microbatch else rate
        no_search = {"CHECKPOINT": self.checkpoint, "--max-steps": self.max_steps,
                     "--fresh": self.fresh, "--sync-to": self.sync_to, "--prefetch": self.prefetch,
                     "--when-done": self.when_done}
        if search == microbatch:
            no_search[rate] = self.find_learning_rate
        if self.find_max_microbatch or self.find_learning_rate:
            _refuse(no_search, f"cannot be used with {search}")
        if not self.find_max_microbatch:
            _refuse({"--save": self.save, "--memory-limit-gib": self.memory_limit_gib,
                     "--json": self.json},
                    f"needs {microbatch}")


def _refuse(options: dict[str, Any], reason: str) -> None:
    for name, value in options.items():
        if value:
            raise UserError(f"{name} {reason}; see --help")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.argument("checkpoint", required=False)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True, help="Directory of the token datasets; created if missing.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True, help="Directory of the run directories.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N",
              help="Number of processes, without torchrun.  [default: one per GPU]")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N",
              help="Save a checkpoint and stop after N global steps of this launch.")
@click.option("--fresh", is_flag=True,
              help="Start over; earlier checkpoints are moved to set-aside/, never deleted.")
@click.option("--usd-per-hour", type=USD_PER_HOUR, metavar="USD",
              help="Price of the machine; overrides usd_per_hour in train.json.")
@click.option("--sync-to", type=click.Path(path_type=Path), metavar="DIR",
              help="Copy each checkpoint and the records to DIR/RUN while training goes on, and"
                   " fetch them from there where RUN lacks them.")
@click.option("--find-max-microbatch", is_flag=True,
              help="Find the largest and the fastest microbatch size that fits; no training.")
@click.option("--find-learning-rate", is_flag=True,
              help="Train some hundred steps with a growing learning rate and suggest one; nothing"
                   " is saved.")
@click.option("--prefetch", is_flag=True,
              help="Fetch and verify all that a launch needs, and compile; no training.")
@click.option("--when-done", metavar="COMMAND",
              help="Run COMMAND by sh -c after the end of the run or of its budget; not after a"
                   " failure, a signal or --max-steps.")
@click.option("--save", is_flag=True,
              help="With --find-max-microbatch: write the result into train.json.")
@click.option("--memory-limit-gib", type=ABOVE_0, metavar="GIB",
              help="With --find-max-microbatch: memory limit of a process; required on CPU.")
@click.option("--json", is_flag=True,
              help="With --find-max-microbatch: print the result as one JSON document.")
def command_line(**options: Any) -> Options:
    """Train RUN, a directory in --runs-dir with a model.json and a train.json.

    A run that has checkpoints resumes from its latest one, or from CHECKPOINT: latest, best or the
    name of a checkpoint directory. Without torchrun, the script starts torchrun itself.
    """
    return Options(**options)


def read_command_line() -> Options:
    """Parse the command line; exit after --help. Raises: UserError."""
    try:
        options = command_line.main(standalone_mode=False)
    except click.ClickException as error:
        raise UserError(f"{error.format_message()} See --help.") from None
    if not isinstance(options, Options):  # --help, which click has printed
        sys.exit(0)
    options.check()
    return options
