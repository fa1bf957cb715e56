"""What can be typed behind `ddp_train.py`, read without torch, so that it is answered at once."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from basics.errors import UserError


@dataclass(frozen=True)
class Options:
    """The command line."""

    run: str
    checkpoint: str | None = None
    datasets_dir: Path = Path("datasets")
    runs_dir: Path = Path("runs")
    nproc_per_node: int | None = None
    max_steps: int | None = None
    fresh: bool = False
    usd_per_hour: float | None = None
    find_max_microbatch: bool = False
    save: bool = False
    memory_limit_gib: float | None = None

    def check(self) -> None:
        """Refuse options that contradict each other. Raises: UserError."""
        for name, number in (("--usd-per-hour", self.usd_per_hour),
                             ("--memory-limit-gib", self.memory_limit_gib)):
            if number is not None and not math.isfinite(number):
                raise UserError(f"{name} is {number}; wanted a number")
        if self.fresh and self.checkpoint:
            raise UserError(f"--fresh starts over, {self.checkpoint} goes on: name one of the two")
        searches_only = {"--save": self.save, "--memory-limit-gib": self.memory_limit_gib}
        trains_only = {"CHECKPOINT": self.checkpoint, "--max-steps": self.max_steps,
                       "--fresh": self.fresh}
        misplaced = trains_only if self.find_max_microbatch else searches_only
        for name, value in misplaced.items():
            if value:
                does = "does not go with" if self.find_max_microbatch else "goes only with"
                raise UserError(f"{name} {does} --find-max-microbatch; drop one, see --help")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.argument("checkpoint", required=False)
@click.option("--datasets-dir", type=click.Path(path_type=Path), default=Path("datasets"),
              show_default=True, help="Where token datasets lie; made if missing.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True, help="Where the run directories lie.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N",
              help="Processes to start, when not started by torchrun.  [default: one a GPU]")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N",
              help="Stop after N global steps of this start, leaving a checkpoint.")
@click.option("--fresh", is_flag=True,
              help="Start over; earlier checkpoints are set aside, never deleted.")
@click.option("--usd-per-hour", type=click.FloatRange(min=0, min_open=True), metavar="USD",
              help="What the machine costs; goes before usd_per_hour in train.json.")
@click.option("--find-max-microbatch", is_flag=True,
              help="Find the largest microbatch that fits in memory, and the fastest; no training.")
@click.option("--save", is_flag=True,
              help="With --find-max-microbatch: write what was found into train.json.")
@click.option("--memory-limit-gib", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
              help="With --find-max-microbatch: what a process may take; needed without a GPU.")
def command_line(**options: Any) -> Options:
    """Train RUN, a directory in --runs-dir with a model.json and a train.json.

    A run that has a checkpoint goes on from its latest one; CHECKPOINT names another one to go
    on from: latest, best or a checkpoint directory's name. Started without torchrun, the script
    starts torchrun itself.
    """
    return Options(**options)


def read_command_line() -> Options:
    """Parse the command line. Raises: UserError; after --help it exits."""
    try:
        options = command_line.main(standalone_mode=False)
    except click.ClickException as error:
        raise UserError(f"{error.format_message()} See --help.") from None
    if not isinstance(options, Options):  # --help was asked for, and has been printed
        sys.exit(0)
    options.check()
    return options
