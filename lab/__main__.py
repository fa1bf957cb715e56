"""The `lab` command. Each verb is a module of this package, loaded when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import time

import click

from basics.errors import UserError, print_error

VERBS = {
    "compare": "lab.compare.compare",
    "evaluate": "lab.evaluate.evaluate",
    "generate": "lab.generate",
    "judge": "lab.instruct.judge",
    "plan": "lab.plan.plan",
    "publish": "lab.publish.publish",
    "tune": "lab.instruct.tune",
}


class VerbGroup(click.Group):
    """A group whose commands are the modules named in `VERBS`, each with a `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(VERBS[cmd_name]).command


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Work with trained runs."""


def main() -> None:
    try:
        cli(prog_name="lab")
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(5)  # by then torchrun ends this process, where rank 0 has said the same
        print_error(error.line())
        sys.exit(error.status)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        print_error(UserError("out of memory; set a smaller --microbatch-size, --batch-size or"
                              " --samples").line())
        sys.exit(2)


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Recognise it on a GPU and on a CPU, without importing torch."""
    return (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            or "can't allocate memory" in str(error))


if __name__ == "__main__":
    main()
