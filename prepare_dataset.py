"""Turn documents into the token files that a run trains on: the command."""

if __name__ == "__main__":
    from basics.entry_points import begin_command

    begin_command()

import os
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from basics.cli import FiniteRange, run_and_exit
from basics.entry_points import INTERRUPTED
from basics.errors import UserError, print_error, print_line
from basics.machine import num_cpu_cores
from preparation.sources import SourceOptions, source_options

if TYPE_CHECKING:
    from preparation.card import Prepared

MAX_DEFAULT_WORKERS = 16  # they need less than 512 MiB of memory


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sources", metavar="SOURCE", nargs=-1)
@click.argument("output", type=click.Path(path_type=Path))
@source_options
@click.option(
    "--tokenizer",
    default="gpt2",
    show_default=True,
    metavar="gpt2|bytes|DIR",
    help="DIR holds a tokenizer.json.",
)
@click.option(
    "--validation-fraction",
    default=0.01,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    metavar="F",
    help="Of the documents, from the end.",
)
@click.option(
    "--max-documents", type=click.IntRange(2), metavar="N", help="Use only the first N documents."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Tokenising processes.  [default: one per core, at most 16]",
)
@click.option(
    "--import",
    "is_import",
    is_flag=True,
    help="SOURCE has tokens of nanoGPT, llm.c, NumPy or datatrove.",
)
@click.option(
    "--mix",
    "weighted",
    metavar="NAME=DATASET:WEIGHT",
    multiple=True,
    help="Instead of SOURCE, twice or more: mix prepared datasets.",
)
@click.option("--repeat", is_flag=True, help="With --mix: a dataset that is too small starts over.")
@click.option("--replace", is_flag=True, help="Replace a dataset that is in OUTPUT already.")
def main(
    sources: tuple[str, ...],
    output: Path,
    is_import: bool,
    weighted: tuple[str, ...],
    repeat: bool,
    replace: bool,
    **options: Any,
) -> None:
    """Tokenise the documents in SOURCE into OUTPUT/train.safetensors (the first 99%) and
    OUTPUT/validation.safetensors (the rest).

    SOURCE is a directory, a file or a quoted pattern of text files or of what Hugging Face's
    datasets reads; a dataset on its hub (HuggingFaceFW/fineweb); or python-stdlib, the code of
    Python's library. If the command is killed, run it again: it continues where it stopped.
    """
    try:
        if not sources and not weighted:
            raise click.MissingParameter(
                ctx=click.get_current_context(), param_hint="'SOURCE'", param_type="argument"
            )
        check_name(output)
        if repeat and not weighted:
            raise UserError("--repeat: is for a mix; name its datasets with --mix")
        if weighted and sources:
            raise UserError(f"{sources[-1]}: is a SOURCE; with --mix wanted only OUTPUT")
        if len(sources) > 1:
            raise UserError(
                f"{sources[1]}: is a second SOURCE; wanted one SOURCE and one OUTPUT, and quotes"
                " around a pattern of files"
            )
        if weighted:  # imported here, and below, so that --help does not wait for it
            check_options("--mix", "weighted", "repeat", "replace")
            from preparation.mixing import mix_datasets, parse_mix

            dataset = mix_datasets(parse_mix(weighted), output, repeat=repeat, replace=replace)
        elif is_import:
            check_options("--import", "is_import", "tokenizer", "replace")
            from preparation.import_bin import import_tokens

            dataset = import_tokens(Path(sources[0]), output, options["tokenizer"], replace=replace)
        else:
            dataset = prepare(sources[0], output, replace=replace, **options)
        print_line(dataset.summary(output))
        print_line(f"make a run for it: uv run lab new RUN {dataset_options(output)}")
    except OSError as error:  # while reading the source or examining the output directory
        place = error.filename or next(iter(sources), output)
        raise UserError(f"{place}: {error.strerror or error}") from None
    except KeyboardInterrupt:
        print_error(f"\n{INTERRUPTED}; run the same command again to continue")
        sys.exit(128 + signal.SIGINT)


def dataset_options(output: Path) -> str:
    """Return the options of `lab new` that name a dataset."""
    dataset_dir = Path(os.path.abspath(output))
    if dataset_dir.parent == Path("datasets").absolute():
        return f"--dataset {dataset_dir.name}"
    return f"--dataset {dataset_dir.name} --datasets-dir {output.parent}"


def check_name(output: Path) -> None:
    """Refuse a directory that train.json could not name. Raises: UserError."""
    from settings.data import DATASET_NAME

    name = Path(os.path.abspath(output)).name
    if name and not re.fullmatch(DATASET_NAME, name):
        raise UserError(
            f"{output}: its name may have only a-z, A-Z, 0-9, '.', '-' and '_', a"
            " letter or digit first: train.json must be able to name it"
        )


def check_options(mode: str, *accepted: str) -> None:
    """Refuse options on the command line that `mode` would ignore. Raises: UserError."""
    context = click.get_current_context()
    for option in context.command.params:
        if isinstance(option, click.Argument) or option.name in accepted:
            continue
        if context.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
            raise UserError(f"{option.opts[0]}: is not for {mode}, whose documents are tokens")


def prepare(source: str, output: Path, *, workers: int | None, **options: Any) -> "Prepared":
    """Find the documents and tokenise them. Raises: UserError."""
    # Before pyarrow is imported: its own allocator keeps 200 MB that large row groups have used.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from preparation.find_source import find_source
    from preparation.pipeline import PrepareOptions, prepare_dataset

    reading = {each.name: options.pop(each.name) for each in fields(SourceOptions)[1:]}
    found = find_source(SourceOptions(source, **reading))
    num_workers = workers or min(num_cpu_cores(), MAX_DEFAULT_WORKERS)
    return prepare_dataset(found, output, PrepareOptions(**options, num_workers=num_workers))


def run(arguments: list[str] | None = None) -> NoReturn:
    run_and_exit(main, arguments, smaller="--workers")


if __name__ == "__main__":
    run()
