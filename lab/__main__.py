"""The `lab` command. The module of a subcommand is imported only when it is needed."""

from __future__ import annotations

import importlib
import os
import sys
import time

import click

from basics.cli import run_command
from basics.cpu_settings import limit_spinning
from basics.errors import BAD_INPUT, FAILED, UserError, print_error, print_traceback
from basics.out_of_memory import is_out_of_memory

MODULES = {
    "compare": "lab.compare.compare",
    "doctor": "lab.doctor.doctor",
    "evaluate": "lab.evaluate.evaluate",
    "export-metrics": "lab.export_metrics",
    "generate": "lab.generate",
    "judge": "lab.instruct.judge",
    "list": "lab.list_runs",
    "plan": "lab.plan.plan",
    "publish": "lab.publish.publish",
    "sweep": "lab.sweep.sweep",
    "tokenizer": "lab.tokenizer",
    "tune": "lab.instruct.tune",
    "watch": "lab.watch.watch",
}


class LazyGroup(click.Group):
    """A group whose subcommands are the `command` of each module in `MODULES`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = MODULES.get(cmd_name)
        return importlib.import_module(module).command if module else None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Train tokenizers; check, plan, sweep, watch, evaluate, compare, export, tune, publish."""


def main() -> None:
    """Run the command line; print errors that the user can correct as one line."""
    limit_spinning()
    try:
        sys.exit(run_command(cli, sys.argv[1:] or ["--help"], name="lab"))
    except click.Abort:
        print_error("Aborted!")
        sys.exit(FAILED)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # rank 0 prints the same error; torchrun then stops this process
        print_error(error.line())
        sys.exit(error.status)
    except Exception as error:
        if not is_out_of_memory(error):
            print_traceback(error)  # not Python's own: a terminal would obey what it prints
            sys.exit(FAILED)
        print_error(UserError("out of memory; set a smaller --microbatch-size, --batch-size or"
                              " --samples").line())
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
