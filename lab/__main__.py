"""The `lab` command. The module of a subcommand is imported only when it is needed."""

if __name__ == "__main__":
    from basics.entry_points import begin_command

    begin_command()

import importlib
import sys

import click

from basics.cli import run_and_exit
from basics.text import did_you_mean

MODULES = {  # of each verb, in the groups of `lab --help`
    "Make": {
        "new": "lab.new_run",
        "tokenizer": "lab.tokenizer",
    },
    "Train on": {
        "plan": "lab.plan.plan",
        "doctor": "lab.doctor.doctor",
        "sweep": "lab.sweep.sweep",
        "tune": "lab.instruct.tune",
    },
    "Measure": {
        "list": "lab.list_runs",
        "watch": "lab.watch.watch",
        "compare": "lab.compare.compare",
        "evaluate": "lab.evaluate.evaluate",
        "generate": "lab.generate",
        "judge": "lab.instruct.judge",
    },
    "Share": {
        "publish": "lab.publish.publish",
        "export-metrics": "lab.export_metrics",
    },
}


class LazyGroup(click.Group):
    """A group whose subcommands are the `command` of each module in `MODULES`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for verbs in MODULES.values() for name in verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        modules = {name: path for verbs in MODULES.values() for name, path in verbs.items()}
        if cmd_name not in modules and not ctx.resilient_parsing:
            ctx.fail(f"No such command {cmd_name!r}{did_you_mean(cmd_name, modules)}.")
        module = modules.get(cmd_name)
        return importlib.import_module(module).command if module else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each subcommand whole; click would cut it."""
        width = max(map(len, self.list_commands(ctx)))  # of the first column, in all groups
        for group, verbs in MODULES.items():
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (name.ljust(width), self.get_command(ctx, name).get_short_help_str(200))
                        for name in verbs
                    ]
                )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddp-train", prog_name="lab")
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
