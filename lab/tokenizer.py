"""`lab tokenizer`: a tokenizer of one's own, trained on the documents that it is for."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from basics.cli import PLACE
from basics.errors import UserError, cannot_be_written, one_line, print_error, visible, writing_to
from preparation.cutting import decoded, markers_in
from preparation.sources import (
    Source,
    SourceOptions,
    first_left_out,
    limited_memory,
    source_options,
    warnings,
)

SMALLEST = 257  # entries: the 256 bytes and the end of text
MAX_ENTRIES = 2**16  # ids have 16 bits


@click.command()
@click.argument("source")
@click.option(
    "--vocab-size",
    type=click.IntRange(SMALLEST, MAX_ENTRIES),
    required=True,
    help="Number of entries: all bytes, the end of text, then merges.",
)
@click.option(
    "--output",
    type=PLACE,
    required=True,
    metavar="DIR",
    help="Write the tokenizer to this directory.",
)
@click.option("--replace", is_flag=True, help="Replace a tokenizer that is in DIR already.")
@click.option(
    "--max-megabytes",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Read only the first N megabytes of text; memory grows with them.",
)
@source_options
def command(source: str, output: Path, replace: bool, **options: Any) -> None:
    """Train a tokenizer on SOURCE: byte pair encoding of bytes, as GPT-2's.

    SOURCE is what prepare_dataset.py takes: files, a dataset on the Hugging Face hub, or
    python-stdlib. `prepare_dataset.py --tokenizer DIR` then uses the tokenizer, and so does all
    that is trained on its dataset. The same source gives the same file.
    """
    # Imported here so that --help is fast.
    from lab.publish.formats import TOKENIZER_FILES, write_own_tokenizer
    from preparation.find_source import find_source
    from preparation.output_dir import OutputDir

    vocab_size = options.pop("vocab_size")
    max_bytes = options.pop("max_megabytes") * 10**6
    with writing_to(output):
        place = OutputDir(output, made=TOKENIZER_FILES, signs=TOKENIZER_FILES, replace=replace)
    output_dir = place.path
    partial_dir = output_dir.with_name(f".{output_dir.name}.tokenizer-partial")
    shutil.rmtree(partial_dir, ignore_errors=True)  # of a command that was killed
    found = find_source(SourceOptions(source, **options))
    try:
        with limited_memory():
            texts, num_bytes = first_texts(found, max_bytes=max_bytes)
        content, num_entries = train_tokenizer(texts, vocab_size=vocab_size)
        if num_entries < vocab_size:
            more = "a larger --max-megabytes" if num_bytes >= max_bytes else "more text"
            raise UserError(
                f"{found.request.source}: {num_bytes:,} bytes of text give"
                f" {num_entries:,} entries, not {vocab_size:,}; give {more}, or a"
                f" --vocab-size of at most {num_entries:,}"
            )
        new_dir = partial_dir / "tokenizer"
        new_dir.mkdir(parents=True)
        write_own_tokenizer(new_dir, content)
        place.put(new_dir)
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)
    click.echo(
        visible(
            f"{vocab_size:,} entries, from {num_bytes:,} bytes of text, in {output}\n"
            f"prepare a dataset with it: uv run prepare_dataset.py SOURCE datasets/NAME --tokenizer"
            f" {output}"
        )
    )


def first_texts(source: Source, *, max_bytes: int) -> tuple[list[str], int]:
    """Read the first texts of a source, up to `max_bytes`, and count their bytes.

    Files that are left out are named, and warnings printed. Raises: UserError.
    """
    texts = []
    num_bytes = num_replaced = 0
    markers: set[str] = set()
    left_out = dict(source.left_out)
    for chunk in source.chunks(None, "any"):
        left_out |= chunk.left_out
        for piece in chunk.pieces:
            for part in piece.parts():
                text, num_damaged = decoded(part)
                texts.append(text)
                num_bytes += len(text.encode())
                num_replaced += num_damaged
                markers |= markers_in(text)
                if num_bytes >= max_bytes:
                    break
            if num_bytes >= max_bytes:
                break
        if num_bytes >= max_bytes:
            break
    for name, reason in first_left_out(left_out):
        print_error(one_line(f"left out: {name}: {reason}"))
    for line in warnings(source, num_replaced, num_bytes, markers):
        print_error(one_line(f"warning: {line}"))
    return texts, num_bytes


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> tuple[bytes, int]:
    """Return the content of tokenizer.json, and its number of entries, fewer if texts are short.

    Ids: 0 is the end of text, then the 256 bytes, then merges, the most frequent first; a merge
    must occur twice. Text is split into words as GPT-2 does.

    Source: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from tokens.tokenizer import END_OF_TEXT

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str(pretty=True).encode() + b"\n", tokenizer.get_vocab_size()
