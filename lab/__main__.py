"""The `lab` command. The module of a subcommand is imported only when it is needed."""

if __name__ == "__main__":
    from basics.entry_points import begin_command

    begin_command()

import importlib
import sys

import click

from basics.cli import run_and_exit

MODULES = {
    "compare": "lab.compare.compare",
    "doctor": "lab.doctor.doctor",
    "evaluate": "lab.evaluate.evaluate",
    "export-metrics": "lab.export_metrics",
    "generate": "lab.generate",
    "judge": "lab.instruct.judge",
    "list": "lab.list_runs",
    "new": "lab.new_run",
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each subcommand whole; click would cut it."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, self.get_command(ctx, name).get_short_help_str(limit=200))
                    for name in MODULES
                ]
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Make runs and tokenizers; check, plan, sweep, watch, evaluate, compare, tune, publish."""


def main() -> None:
    run_and_exit(
        cli,
        sys.argv[1:] or ["--help"],
        name="lab",
        smaller="--microbatch-size, --batch-size or --samples",
    )


if __name__ == "__main__":
    main()
