"""The command line of ddp_train.py, and what is checked before torch is imported, for seconds."""

import gc
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import click

from basics.checkpoint_files import BEST, CHECKPOINT_NAME, LATEST
from basics.cli import ABOVE_0, RUNS, USD_PER_HOUR, exit_with, run_command
from basics.errors import UserError, print_line
from processes.run_lock import LockedError, lock_run
from processes.signals import end_with_torchrun
from run_config import find_run, load_run, make_run_dir
from tokens.batch_plan import divided


@dataclass(frozen=True)
class Options:
    """The arguments and options of one launch."""

    run: str
    checkpoint: str | None = None
    datasets_dir: Path = Path("datasets")
    runs_dir: Path = RUNS
    nproc_per_node: int | None = None
    max_steps: int | None = None
    fresh: bool = False
    usd_per_hour: float | None = None
    reference: str | None = None
    after_checkpoint: str | None = None
    find_max_microbatch: bool = False
    save: bool = False
    memory_limit_gib: float | None = None
    prefetch: bool = False
    when_done: str | None = None
    began_at: int | None = None  # after a restart by torchrun: the step at which the launch began

    def check(self) -> None:
        """Refuse options that contradict each other. Raises: UserError."""

        def given(*names: str) -> list[str]:
            return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]

        if self.fresh and self.checkpoint:
            raise UserError(
                f"--fresh starts over and CHECKPOINT {self.checkpoint} resumes; use one of the two"
            )
        for name, command in (
            ("--after-checkpoint", self.after_checkpoint),
            ("--when-done", self.when_done),
        ):
            if command is not None and not command.strip():
                raise UserError(f"{name} is empty; name a command, or leave it out")
        instead = given("find_max_microbatch", "prefetch")  # of training
        of_training = ["CHECKPOINT"] * bool(self.checkpoint) + given(
            "max_steps", "fresh", "after_checkpoint", "when_done"
        )
        of_search = given("save", "memory_limit_gib")
        if of_search and not self.find_max_microbatch:
            raise UserError(f"{of_search[0]} needs --find-max-microbatch; see --help")
        if instead and (others := of_training + instead[1:]):
            raise UserError(f"{others[0]} cannot be used with {instead[0]}; see --help")
        if self.prefetch and "RANK" in os.environ and "DDP_TRAIN_TRIAL" not in os.environ:
            raise UserError("--prefetch needs no torchrun; start it with python ddp_train.py")

    def after_restart(self, began_at: int | None) -> Self:
        """Return the options of processes that torchrun has started again: they resume.

        Args:
            began_at: the step at which the launch began to train; None if it had not.
        """
        return (
            self
            if began_at is None
            else replace(self, fresh=False, checkpoint=None, began_at=began_at)
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run")
@click.argument("places", nargs=-1, metavar="[DATASETS_DIR] [CHECKPOINT]")
@click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path),
    help="Directory of the token datasets; created if missing.  [default: datasets]",
)
@click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=RUNS,
    show_default=True,
    help="Directory of the run directories.",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes, without torchrun.  [default: one per GPU]",
)
@click.option(
    "--max-steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Save a checkpoint and stop after N global steps of this launch.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Start over; earlier checkpoints are moved to set-aside/, never deleted.",
)
@click.option(
    "--usd-per-hour",
    type=USD_PER_HOUR,
    metavar="USD",
    help="Price of the machine; overrides usd_per_hour in train.json.",
)
@click.option(
    "--reference",
    metavar="NAME",
    help="Compare the losses with this curve; overrides reference in train.json.",
)
@click.option(
    "-f",
    "--find-max-microbatch",
    "--find-max-microbatch-size",
    "find_max_microbatch",
    is_flag=True,
    help="Find the largest and the fastest microbatch size that fits; no training.",
)
@click.option(
    "--prefetch",
    is_flag=True,
    help="Fetch and verify all that a launch needs, and compile; no training.",
)
@click.option(
    "--after-checkpoint",
    metavar="COMMAND",
    help="Run COMMAND by sh -c beside training after each checkpoint, to copy {run_dir};"
    " {run}, {checkpoint} and {identity} are known too.",
)
@click.option(
    "--when-done",
    metavar="COMMAND",
    help="Run COMMAND by sh -c after the end of the run or of its budget; not after a"
    " failure, a signal or --max-steps.",
)
@click.option(
    "--save", is_flag=True, help="With --find-max-microbatch: write the result into train.json."
)
@click.option("--local-rank", "--local_rank", hidden=True, expose_value=False)  # LOCAL_RANK has it
@click.option(
    "--memory-limit-gib",
    type=ABOVE_0,
    metavar="GIB",
    help="With --find-max-microbatch: memory limit of a process; required on CPU.",
)
def command_line(
    *, run: str, places: tuple[str, ...], datasets_dir: Path | None, **options: Any
) -> Options:
    """Train RUN, a directory in --runs-dir with a model.json and a train.json.

    A run that has checkpoints resumes from its latest one, or from CHECKPOINT: latest, best or the
    name of a checkpoint directory; RUN@CHECKPOINT says the same. Without torchrun, the script
    starts torchrun itself. DATASETS_DIR is the same as --datasets-dir.
    """
    named = find_run(options["runs_dir"], run)
    run, checkpoint = named or (run, "")  # of another, `load_run` says what is wrong
    for place in places:
        if not checkpoint and _names_checkpoint(place):
            checkpoint = place
        elif (
            datasets_dir is None
            and os.path.isdir(place)
            and (not _names_checkpoint(Path(place).name))
        ):
            datasets_dir = Path(place)
        else:
            load_run(options["runs_dir"], run)  # the first word may be the wrong one
            what = (
                "is a second CHECKPOINT or DATASETS_DIR"
                if checkpoint or datasets_dir
                else ("is neither a directory of datasets nor the name of a checkpoint")
            )
            raise UserError(
                f"{place[:60]!r} {what}; wanted RUN [CHECKPOINT] [DATASETS_DIR], where"
                " CHECKPOINT is latest, best or the name of a directory in"
                f" runs/{run[:60]}/checkpoints"
            )
    return Options(
        run=run,
        checkpoint=checkpoint or None,
        datasets_dir=datasets_dir or Path("datasets"),
        **options,
    )


def _names_checkpoint(word: str) -> bool:
    return word in (LATEST, BEST) or CHECKPOINT_NAME.fullmatch(word) is not None


def read_command_line() -> Options:
    """Parse the command line; exit after --help. Raises: UserError."""
    try:
        options = run_command(command_line)
    except click.ClickException as error:
        raise UserError(f"{error.format_message()} See --help.") from None
    if not isinstance(options, Options):  # --help, which click has printed
        sys.exit(0)
    options.check()
    return options


def check_before_torch() -> None:
    """Answer --help, mistakes on the command line and a locked run at once; lock the run.

    Under torchrun only rank 0 checks, and only a locked run ends it here: all ranks find the
    other errors again later, together, so that one line reports them.
    """
    gc.disable()  # collecting while modules are imported takes a tenth of the start-up time
    rank = os.environ.get("RANK")
    if rank is not None:
        if "WORLD_SIZE" not in os.environ:
            exit_with(
                UserError(
                    "RANK is set in the environment, but not WORLD_SIZE: start with"
                    " torchrun, or unset RANK"
                )
            )
        end_with_torchrun()
    if rank not in (None, "0"):
        return
    try:
        options = read_command_line()
        run = load_run(options.runs_dir, options.run)
        if not (options.find_max_microbatch or options.prefetch):
            if num_processes := os.environ.get("WORLD_SIZE") or options.nproc_per_node:
                divided(run, world_size=int(num_processes))  # or an error: nothing is written
            make_run_dir(run)
            lock_run(run.run_dir)
        if rank is None and sys.stdout.isatty():  # a person waits for the first line
            print_line(f"{run.name}: loading PyTorch")
    except Exception as error:
        if rank is None or isinstance(error, LockedError):
            exit_with(error)
