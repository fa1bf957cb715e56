"""Turn documents into the token files that a run trains on."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from basics.errors import UserError, drop_unwritable_output, print_error, print_line

if TYPE_CHECKING:
    from preparation.documents import Source
    from preparation.journal import Progress

MOST_WORKERS = 16  # unless more are asked for: so many stay below 1 GiB
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class Options:
    """The command line."""

    source: str
    output: Path
    subset: str
    tokenizer: str
    text_column: str
    validation_fraction: float
    max_documents: int | None
    workers: int | None
    skip_bad_shards: bool
    keep_raw: Path | None
    is_import: bool


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--subset", default="", metavar="DIRECTORY",
              help="The directory of a dataset on the hub that holds the documents: sample/10BT.")
@click.option("--tokenizer", default="gpt2", show_default=True, metavar="gpt2|bytes",
              help="gpt2 has 50,257 ids, bytes has 257.")
@click.option("--text-column", default="text", show_default=True,
              help="The parquet column or JSON key that holds the text.")
@click.option("--validation-fraction", default=0.01, show_default=True,
              type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="The share of the documents, the last ones, that is kept for validation.")
@click.option("--max-documents", type=click.IntRange(2), help="Take the first N documents only.")
@click.option("--workers", type=click.IntRange(1), default=None,
              help="Processes that tokenise.  [default: one for each core, up to 16, which take"
                   " less than 1 GiB]")
@click.option("--skip-bad-shards", is_flag=True,
              help="Leave out files that are damaged, and count them.")
@click.option("--keep-raw", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep what is fetched from the hub there.")
@click.option("--import", "is_import", is_flag=True,
              help="SOURCE holds tokens already: nanoGPT's train.bin and val.bin, or llm.c's"
                   " .bin shards.")
def main(**options: Any) -> None:
    """Tokenise the documents in SOURCE into OUTPUT/train.safetensors (the first 99%) and
    OUTPUT/validation.safetensors (the rest), an end-of-text token after each.

    SOURCE is a directory, a file or a quoted pattern: parquet, JSON lines (.jsonl, .jsonl.gz,
    .jsonl.zst) or .txt files; or a dataset on the Hugging Face hub (HuggingFaceFW/fineweb); or the
    word python-stdlib for the source and documentation of Python's own library.

    Killed at any moment, it goes on when the same command is typed again.
    """
    asked = Options(**options)
    try:
        progress = import_tokens_of(asked) if asked.is_import else prepare(asked)
        from preparation.progress_display import summary

        print_line(summary(asked.output, progress))
    except UserError as error:
        stop_with(error.line(), status=error.status)
    except OSError as error:  # of the source's or the output's place
        unread = UserError(f"{error.filename or asked.source}: {error.strerror or error}")
        stop_with(unread.line(), status=2)
    except KeyboardInterrupt:
        left = "nothing is left of it" if asked.is_import else "the same command goes on from there"
        stop_with(f"\nInterrupted; {left}", status=130)
    finally:
        drop_unwritable_output()


def import_tokens_of(asked: Options) -> Progress:
    """Take over tokens that are there. Raises: UserError."""
    if (asked.subset or asked.max_documents or asked.workers or asked.skip_bad_shards
            or asked.keep_raw or asked.text_column != "text" or asked.validation_fraction != 0.01):
        raise UserError("--import takes the tokens as they are; of the other options only"
                        " --tokenizer has a meaning with it")
    # Imported here, and below, so that --help does not wait for it.
    from preparation.import_bin import import_tokens

    return import_tokens(Path(asked.source), asked.output, asked.tokenizer)


def prepare(asked: Options) -> Progress:
    """Find the documents and tokenise them. Raises: UserError."""
    start_fork_server(asked.tokenizer)
    from preparation.pipeline import prepare_dataset
    from preparation.planning import PrepareOptions, free_output

    documents = find_source(asked, free_output(asked.output))
    return prepare_dataset(documents, asked.output, PrepareOptions(
        tokenizer=asked.tokenizer, validation_fraction=asked.validation_fraction,
        max_documents=asked.max_documents, num_workers=asked.workers or default_num_workers(),
        skip_bad_shards=asked.skip_bad_shards,
    ))


def stop_with(line: str, *, status: int) -> NoReturn:
    print_error(line)
    sys.exit(status)


def find_source(asked: Options, output: Path) -> Source:
    """Find the documents that SOURCE stands for. Raises: UserError."""
    from preparation.documents import find_documents, kind_of, python_stdlib
    from preparation.journal import Journal, unfinished_request

    source, subset, keep_raw = asked.source, asked.subset.strip("/"), asked.keep_raw
    if HUB_NAME.fullmatch(source) and not kind_of(source) and not Path(source).exists():
        from preparation.hub import RawFiles, hub_source

        unfinished = unfinished_request(output)  # goes on with the commit that it began with
        is_same = unfinished is not None and unfinished.source == f"{source} {subset}".strip()
        try:
            return hub_source(
                source, subset, text_column=asked.text_column,
                raw_files=RawFiles(keep_raw or Journal(output).raw_dir, keep_raw is not None),
                revision=unfinished.revision if is_same else None,
            )
        except UserError as error:
            raise UserError(f"{error} (nor is there a file {source} here)") from None
    if subset or keep_raw:
        raise UserError(f"{source}: --subset and --keep-raw are for a dataset on the hub, named as"
                        " owner/name")
    if source == "python-stdlib":
        return python_stdlib()
    return find_documents(source, text_column=asked.text_column)


def start_fork_server(tokenizer: str) -> None:
    """Start the process that workers are forked from: it imports while this one does."""
    multiprocessing.set_forkserver_preload(
        ["preparation.gpt2_workers" if tokenizer == "gpt2" else "preparation.encoding"])
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it inherits that: Ctrl-C is ours
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, on_interrupt)


def default_num_workers() -> int:
    """Give one worker for each core that this process may use, within its bounds of memory."""
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(num_cores, MOST_WORKERS)


if __name__ == "__main__":
    main()
