"""Turn documents into the token files that a run trains on: the command."""

from __future__ import annotations

if __name__ == "__main__":
    from basics.entry_points import begin_command

    begin_command()

import multiprocessing.forkserver
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from basics.cli import FiniteRange, run_and_exit
from basics.entry_points import INTERRUPTED
from basics.errors import UserError, print_error, print_line
from basics.machine import num_cpu_cores
from preparation.source_options import source_options

if TYPE_CHECKING:
    from preparation.journal import Progress

MAX_DEFAULT_WORKERS = 16  # 16 worker processes together need less than 1 GiB of memory


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    sources: tuple[str, ...]
    output: Path
    subset: str
    split: str
    revision: str
    tokenizer: str
    text_column: str
    validation_fraction: float
    max_documents: int | None
    workers: int | None
    skip_bad_shards: bool
    keep_raw: Path | None
    is_import: bool
    part: str | None
    is_join: bool
    share: tuple[float, ...]

    @property
    def source(self) -> str:
        """The only SOURCE. Raises: UserError, if there are more."""
        if len(self.sources) > 1:
            raise UserError(f"{self.sources[1]}: wanted one SOURCE and one OUTPUT; put quotes"
                            " around a pattern of files, or join parts with --join")
        return self.sources[0]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sources", metavar="SOURCE", nargs=-1, required=True)
@click.argument("output", type=click.Path(path_type=Path))
@source_options
@click.option("--tokenizer", default="gpt2", show_default=True, metavar="gpt2|bytes|DIR",
              help="gpt2 has a vocabulary of 50,257, bytes of 257. DIR holds a tokenizer.json, as"
                   " lab tokenizer writes it.")
@click.option("--validation-fraction", default=0.01, show_default=True,
              type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="Fraction of the documents, taken from the end, to use for validation.")
@click.option("--max-documents", type=click.IntRange(2), help="Use only the first N documents.")
@click.option("--workers", type=click.IntRange(1), default=None,
              help="Number of tokenising processes.  [default: one per core, at most 16; 16 need"
                   " less than 1 GiB of memory]")
@click.option("--skip-bad-shards", is_flag=True,
              help="Leave out any number of files that cannot be read.  [default: one in a hundred,"
                   " of text files at least one]")
@click.option("--keep-raw", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Download files from the hub to DIR and keep them.")
@click.option("--import", "is_import", is_flag=True,
              help="SOURCE already holds tokens: train.bin and val.bin of nanoGPT, .bin shards of"
                   " llm.c, or with --share prepared datasets.")
@click.option("--share", type=FiniteRange(0, 100, min_open=True), multiple=True,
              help="With --import, once for each SOURCE: mix the documents of prepared datasets, in"
                   " these shares of the tokens, until one of them has no more.")
@click.option("--part", metavar="I/N",
              help="Prepare only part I of N, on one of several machines, for --join.")
@click.option("--join", "is_join", is_flag=True,
              help="Each SOURCE is a part: join all of them to the dataset that one machine would"
                   " have made.")
def main(**options: Any) -> None:
    """Tokenise the documents in SOURCE into OUTPUT/train.safetensors (the first 99%) and
    OUTPUT/validation.safetensors (the rest), with an end-of-text token after each document.

    SOURCE is a directory, a file or a quoted pattern of parquet, JSON lines (.jsonl, .jsonl.gz,
    .jsonl.zst, .json.gz) or .txt files; or a dataset on the Hugging Face hub
    (HuggingFaceFW/fineweb); or python-stdlib, the source code and documentation of Python's
    standard library. A single .txt file is divided by its tokens.

    If the command is killed, run it again: it continues where it stopped.

    On several machines, run the same command everywhere with --part 1/N to N/N, and then once:
    prepare_dataset.py --join PART... OUTPUT.
    """
    command = Options(**options)
    try:
        progress = (import_token_files(command) if command.is_import else join(command)
                    if command.is_join else prepare(command))
        from preparation.progress_display import summary

        print_line(summary(command.output, progress))
    except OSError as error:  # while reading the source or examining the output directory
        place = error.filename or command.sources[0]
        raise UserError(f"{place}: {error.strerror or error}") from None
    except KeyboardInterrupt:
        advice = ("no files were left behind" if command.is_import or command.is_join
                  else "run the same command again to continue")
        print_error(f"\n{INTERRUPTED}; {advice}")
        sys.exit(128 + signal.SIGINT)


def import_token_files(command: Options) -> Progress:
    """Convert token files of nanoGPT or llm.c. Raises: UserError."""
    if given_options() - {"is_import", "tokenizer", "share"}:
        raise UserError("--import copies tokens unchanged; the only other options that it accepts"
                        " are --tokenizer and --share")
    if command.share and len(command.sources) != len(command.share):
        raise UserError(f"{len(command.share)} times --share for {len(command.sources)} SOURCEs;"
                        " wanted one for each")
    # Imported here, and below, so that --help does not wait for it.
    from preparation.import_bin import import_tokens

    sources = command.sources if command.share else [command.source]
    return import_tokens([Path(source) for source in sources], command.output, command.tokenizer,
                         command.share)


def join(command: Options) -> Progress:
    """Join the parts of a preparation. Raises: UserError."""
    if given_options() - {"is_join", "skip_bad_shards"}:
        raise UserError("--join takes all but the parts from them; the only other option that it"
                        " accepts is --skip-bad-shards")
    from preparation.joining import join_parts

    return join_parts([Path(source) for source in command.sources], command.output,
                      skip_bad_shards=command.skip_bad_shards)


def given_options() -> set[str]:
    """Return the names of the options on the command line."""
    context = click.get_current_context()
    return {option.name for option in context.command.params if isinstance(option, click.Option)
            and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT}


def prepare(command: Options) -> Progress:
    """Find the documents and tokenise them. Raises: UserError."""
    if command.share:
        raise UserError("--share mixes datasets that are prepared already; add --import")
    source = command.source
    from preparation.parts import Part

    part = Part.parse(command.part) if command.part is not None else None
    start_fork_server(command.tokenizer)
    from preparation.journal import Journal, unfinished_request
    from preparation.pipeline import prepare_dataset
    from preparation.planning import PrepareOptions, check_output_dir
    from preparation.sources import SourceOptions, find_source

    output = check_output_dir(command.output)
    documents = find_source(
        SourceOptions(source, command.subset, command.text_column, command.keep_raw,
                      command.split, command.revision),
        raw_dir=Journal(output).raw_dir, unfinished=unfinished_request(output))
    if part is not None and documents.hub_name and documents.revision != command.revision:
        print_line(f"use --revision {documents.revision} on the other machines")
    return prepare_dataset(documents, command.output, PrepareOptions(
        tokenizer=command.tokenizer, validation_fraction=command.validation_fraction,
        max_documents=command.max_documents,
        num_workers=command.workers or min(num_cpu_cores(), MAX_DEFAULT_WORKERS),
        skip_bad_shards=command.skip_bad_shards, part=part,
    ))


def start_fork_server(tokenizer: str) -> None:
    """Start the process that workers are forked from; it imports while this process does too."""
    multiprocessing.set_forkserver_preload(
        ["preparation.fork_server", *["preparation.gpt2_workers"] * (tokenizer == "gpt2")])
    # The fork server inherits SIG_IGN: only this process handles Ctrl-C.
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, previous_handler)


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line."""
    run_and_exit(main, arguments, smaller="--workers")


if __name__ == "__main__":
    run()
