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
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from basics.cli import FiniteRange, run_and_exit
from basics.entry_points import INTERRUPTED
from basics.errors import UserError, print_error, print_line
from basics.machine import num_cpu_cores
from preparation.choosing import SourceOptions, source_options

MAX_DEFAULT_WORKERS = 16  # 16 worker processes together need less than 1 GiB of memory


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sources", metavar="SOURCE", nargs=-1)
@click.argument("output", type=click.Path(path_type=Path))
@source_options
@click.option(
    "--tokenizer",
    default="gpt2",
    show_default=True,
    metavar="gpt2|bytes|DIR",
    help="gpt2 has a vocabulary of 50,257, bytes of 257. DIR holds a tokenizer.json, as"
    " lab tokenizer writes it.",
)
@click.option(
    "--validation-fraction",
    default=0.01,
    show_default=True,
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    help="Fraction of the documents, taken from the end, to use for validation.",
)
@click.option("--max-documents", type=click.IntRange(2), help="Use only the first N documents.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=None,
    help="Number of tokenising processes.  [default: one per core, at most 16; 16 need"
    " less than 1 GiB of memory]",
)
@click.option(
    "--skip-bad-shards",
    is_flag=True,
    help="Leave out any number of files that cannot be read.  [default: one in a hundred,"
    " of text files at least one]",
)
@click.option(
    "--keep-raw",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Download files from the hub to DIR and keep them.",
)
@click.option(
    "--import",
    "is_import",
    is_flag=True,
    help="SOURCE already holds tokens: train.bin and val.bin of nanoGPT, .bin shards of"
    " llm.c, the same as .npy files, or a single such file.",
)
@click.option(
    "--source",
    "weighted",
    metavar="NAME=PATH:WEIGHT",
    multiple=True,
    help="Instead of SOURCE, two or more times: mix sources in the shares of their weights, in"
    " tokens. PATH is a SOURCE or the directory of a prepared dataset.",
)
@click.option(
    "--repeat",
    is_flag=True,
    help="With --source: a source with too little text starts over.",
)
@click.option(
    "--part",
    metavar="I/N",
    default="",
    help="Prepare only part I of N, on one of several machines, for --join.",
)
@click.option(
    "--join",
    "is_join",
    is_flag=True,
    help="Each SOURCE is a part: join all of them to the dataset that one machine would have made.",
)
def main(
    sources: tuple[str, ...],
    output: Path,
    is_import: bool,
    is_join: bool,
    weighted: tuple[str, ...],
    repeat: bool,
    **options: Any,
) -> None:
    """Tokenise the documents in SOURCE into OUTPUT/train.safetensors (the first 99%) and
    OUTPUT/validation.safetensors (the rest), with an end-of-text token after each document.

    SOURCE is a directory, a file or a quoted pattern of .parquet, JSON lines (.jsonl, .ndjson),
    .json (an array of objects), .csv or .txt files, all but parquet also packed (.gz, .zst, .bz2,
    .xz); or a dataset on the Hugging Face hub (HuggingFaceFW/fineweb); or python-stdlib, the source
    code and documentation of Python's standard library. A single .txt file is divided by its
    tokens.

    With --source NAME=PATH:WEIGHT, given for each of several sources, their documents are mixed.

    If the command is killed, run it again: it continues where it stopped.

    On several machines, run the same command everywhere with --part 1/N to N/N, and then once:
    prepare_dataset.py --join PART... OUTPUT.
    """
    try:
        if not sources and not weighted:
            raise click.MissingParameter(
                ctx=click.get_current_context(), param_hint="'SOURCE'", param_type="argument"
            )
        if not options["part"]:
            check_name(output)
        if repeat and not weighted:
            raise UserError("--repeat: is for a mix; name its sources with --source")
        if weighted:
            summary = mix(sources, weighted, output, repeat=repeat, **options)
        elif is_join:  # imported here, and below, so that --help does not wait for it
            check_options("--join", "is_join", "skip_bad_shards")
            from preparation.pipeline import join_parts

            summary = join_parts(
                [Path(part) for part in sources], output, skip_bad_shards=options["skip_bad_shards"]
            ).summary(output)
        elif len(sources) > 1:
            raise UserError(
                f"{sources[1]}: wanted one SOURCE and one OUTPUT; put quotes"
                " around a pattern of files, or join parts with --join"
            )
        elif is_import:
            check_options("--import", "is_import", "tokenizer")
            from preparation.import_bin import import_tokens

            summary = import_tokens(Path(sources[0]), output, options["tokenizer"]).summary(output)
        else:
            summary = prepare(sources[0], output, **options)
        print_line(summary)
        if not options["part"]:
            print_line(f"make a run for it: uv run lab new RUN {dataset_options(output)}")
    except OSError as error:  # while reading the source or examining the output directory
        place = error.filename or sources[0]
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
    from run_config import DATASET_NAME

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
            raise UserError(
                f"{option.opts[0]}: is not for {mode}, which takes everything from its SOURCE"
            )


def prepare(source: str, output: Path, *, workers: int | None, **options: Any) -> str:
    """Find the documents and tokenise them; return a summary. Raises: UserError."""
    from preparation.find_source import find_source
    from preparation.journal import Journal, check_output_dir
    from preparation.pipeline import PrepareOptions, prepare_dataset

    named = SourceOptions(source, **taken_from(options))
    preparation = PrepareOptions(**options, num_workers=workers or default_workers())
    documents = find_source(named, raw_dir=Journal(check_output_dir(output)).raw_dir)
    if preparation.part and documents.request.revision != named.revision:
        print_line(f"use --revision {documents.request.revision} on the other machines")
    return prepare_dataset(documents, output, preparation).summary(output)


def mix(
    sources: tuple[str, ...],
    weighted: tuple[str, ...],
    output: Path,
    *,
    workers: int | None,
    repeat: bool,
    **options: Any,
) -> str:
    """Tokenise several sources and mix them; return a summary. Raises: UserError."""
    from preparation.mixing import mix_sources, parse_sources
    from preparation.pipeline import PrepareOptions

    if sources:
        raise UserError(f"{sources[0]}: is not for --source; give this SOURCE a name and a weight")
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
        if is_given and option.name in ("is_import", "is_join", "part", "revision", "keep_raw"):
            raise UserError(
                f"{option.opts[0]}: is not for --source; prepare that source on its own with it,"
                " and name the directory of its dataset as PATH"
            )
    parsed = parse_sources(weighted)
    if all(source.is_prepared for source in parsed):
        check_options(
            "a mix of prepared datasets",
            "weighted",
            "repeat",
            "tokenizer",
            "max_documents",
            "validation_fraction",
            "workers",
        )
    reading = SourceOptions("", **taken_from(options))
    preparation = PrepareOptions(**options, num_workers=workers or default_workers())
    return mix_sources(parsed, reading, output, preparation, repeat=repeat).summary(output)


def taken_from(options: dict[str, Any]) -> dict[str, Any]:
    """Take those of `SourceOptions` but its source out of the options of the command."""
    return {field.name: options.pop(field.name) for field in fields(SourceOptions)[1:]}


def default_workers() -> int:
    return min(num_cpu_cores(), MAX_DEFAULT_WORKERS)


def run(arguments: list[str] | None = None) -> NoReturn:
    run_and_exit(main, arguments, smaller="--workers")


if __name__ == "__main__":
    run()
