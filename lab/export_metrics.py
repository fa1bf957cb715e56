"""`lab export-metrics`: send a run's records to a tracker afterwards."""

import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click

from basics.cli import RUNS_DIR
from basics.errors import FAILED, UserError, describe, print_error, visible
from basics.text import counted
from processes.run_lock import lock_run, release_run
from reporting.tracker import TrackedRun, check_tracker, send_records
from run_config import TrainConfig, load_run


@click.command("export-metrics")
@click.argument("name", metavar="RUN")
@click.option(
    "--to",
    "tracker",
    type=click.Choice(get_args(TrainConfig.model_fields["tracker"].annotation)[1:]),
    required=True,
    help="Needs the extra of that name: uv run --extra wandb lab ...",
)
@click.option(
    "--fresh",
    "starts_over",
    is_flag=True,
    help="Send all records to a new tracked run, with which training then goes on."
    "  [default: only those that are missing in the tracked run of training]",
)
@RUNS_DIR
def command(name: str, tracker: str, starts_over: bool, runs_dir: Path) -> None:
    """Show the metrics of RUN in TensorBoard, Weights & Biases or Trackio.

    This is what the key "tracker" of train.json does while a run trains, under the same names. The
    same command again adds only what is new.
    """
    run = load_run(runs_dir, name)
    run = replace(run, config=run.config.model_copy(update={"tracker": tracker}))
    if not run.metrics_path.is_file():
        raise UserError(f"{run.metrics_path}: no such file; train the run first")
    check_tracker(tracker)
    lock_run(run.run_dir)  # training would send the same records
    tracked = TrackedRun.load(run.run_dir, starts_over=starts_over)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # Trackio prints
            num_sent = send_records(run, tracked, note=print_error)
    except Exception as error:
        raise UserError(
            f"{tracker} has failed: {describe(error)}; the same command goes on from there", FAILED
        ) from None
    finally:
        release_run()
    click.echo(visible(f"{tracker}: {counted(num_sent, 'record')} added"))
