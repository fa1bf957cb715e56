"""`lab tokenizer`: a tokenizer of one's own, trained on the documents that it is for."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from basics.cli import PLACE
from basics.errors import UserError, cannot_be_written, one_line, print_error, visible
from preparation.choosing import SourceOptions, source_options
from preparation.cutting import BadShard, Piece

if TYPE_CHECKING:
    from preparation.sources import Source

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
@click.option(
    "--max-megabytes",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Read only the first N megabytes of text; memory grows with them.",
)
@source_options
def command(source: str, output: Path, **options: Any) -> None:
    """Train a tokenizer on SOURCE: byte pair encoding of bytes, as GPT-2's.

    SOURCE is what prepare_dataset.py takes: files, a dataset on the Hugging Face hub, or
    python-stdlib. `prepare_dataset.py --tokenizer DIR` then uses the tokenizer, and so does all
    that is trained on its dataset. The same source gives the same file.
    """
    # Imported here so that --help is fast.
    from lab.publish.formats import write_own_tokenizer
    from preparation.find_source import find_source
    from preparation.journal import check_output_dir

    vocab_size = options.pop("vocab_size")
    max_bytes = options.pop("max_megabytes") * 10**6
    output_dir = check_output_dir(output)
    partial_dir = output_dir.with_name(f".{output_dir.name}.tokenizer-partial")
    shutil.rmtree(partial_dir, ignore_errors=True)  # of a command that was killed
    found = find_source(SourceOptions(source, **options), raw_dir=partial_dir / "raw")
    try:
        pieces, num_bytes = first_pieces(found, max_bytes=max_bytes)
        texts = [piece.text for piece in pieces]
        warn_of(found, pieces, num_bytes)
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
        new_dir.rename(output_dir)  # replaces an empty directory
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


def first_pieces(source: "Source", *, max_bytes: int) -> tuple[list[Piece], int]:
    """Read the first texts of a source, up to `max_bytes`, but damaged files; and their bytes.

    Raises: UserError: all of them are damaged.
    """
    from preparation.reading import Reading, Task

    pieces = []
    num_bytes = 0
    errors = []
    for shard in source.shards:
        shard.fetch()
        try:
            for task in shard.tasks("any"):
                assert isinstance(task, Task), "only a part has tokens instead"
                reading = Reading("any", [])
                for piece in task.read(reading):
                    pieces.append(piece)
                    num_bytes += len(piece.text.encode("utf-8", "replace"))
                    if num_bytes >= max_bytes:
                        return pieces, num_bytes
                for file in reading.bad_files:
                    print_error(one_line(f"warning: left out: {file.reason}"))
        except BadShard as error:  # what could be read of it has been
            errors.append(error)
            print_error(one_line(f"warning: left out: {error}"))
        shard.release()
    if errors and not pieces:
        raise errors[0]
    return pieces, num_bytes


def warn_of(source: "Source", pieces: list[Piece], num_bytes: int) -> None:
    """Print a line each if the text may have another encoding, or markers between documents."""
    from preparation.findings import Findings, markers_in
    from preparation.token_stream import Counts

    replaced = [piece.num_replaced for piece in pieces]
    found = Findings(num_damaged=sum(map(bool, replaced)), num_replaced=sum(replaced))
    counts = Counts(sum(piece.ends_document for piece in pieces), num_text_bytes=num_bytes)
    for line in (
        source.about_damage(found, counts),
        source.about_markers(markers_in(piece.text for piece in pieces)),
    ):
        if line:
            print_error(one_line(line))


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
