"""What a preparation will do, and what speaks against it, before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

from basics.errors import UserError, cannot_be_written
from preparation.cutting import BadShard
from preparation.documents import Shard, Source
from preparation.journal import Journal, Request, ShardFacts

# Text of which a token stands for more bytes than this is rare: the least room that is asked for.
MOST_BYTES_A_TOKEN = {"gpt2": 5.0, "bytes": 1.0}


@dataclass(frozen=True)
class PrepareOptions:
    """What a dataset is made with, beside its source."""

    tokenizer: str = "gpt2"
    validation_fraction: float = 0.01
    max_documents: int | None = None
    num_workers: int = 1
    skip_bad_shards: bool = False


def free_output(output_dir: Path) -> Path:
    """Give the directory, links followed, that a dataset can take the place of.

    Raises:
        UserError: something is there already, or it can not be replaced.
    """
    try:
        output_dir = output_dir.resolve()
    except RuntimeError:  # so does Python 3.11 say it
        raise UserError(f"{output_dir}: links that lead in a circle; name another output") from None
    if output_dir.is_mount() or output_dir == Path.cwd():
        raise UserError(f"{output_dir}: is a mount point, or where you are; name a directory in it")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir}: is not empty; name another output, or remove it yourself")
    return output_dir


def num_training_documents(num_documents: int, validation_fraction: float) -> int:
    """Say where validation begins; both parts have a document at least.

    Source: what `train[:99%]` means to Hugging Face's datasets: rounded, half to even.
    """
    share = 1 - Fraction(str(validation_fraction))
    return min(max(round(num_documents * share), 1), num_documents - 1)


def plan_request(source: Source, options: PrepareOptions, journal: Journal) -> Request:
    """Count what there is, as far as an earlier start has not. Raises: UserError."""
    before = journal.request if (
        journal.request and journal.request.text_column == source.text_column) else None
    known = {(facts.name, facts.identity): facts
             for facts in [*(before.shards if before else []), *journal.counted]
             if options.skip_bad_shards or not facts.is_bad}
    shards: list[ShardFacts] = []
    num_documents = 0
    for shard in tqdm(source.shards, desc="counting documents", unit=" files", leave=False,
                      disable=None, delay=1):
        facts = known.get((shard.name, shard.identity))
        if facts is None:
            facts = _facts(shard, options)
            if facts.num_text_bytes is None and not facts.is_bad:  # all of it had to be read
                journal.note_count(facts)
        shards.append(facts)
        num_documents += facts.num_documents
        if options.max_documents is not None and num_documents >= options.max_documents:
            num_documents = options.max_documents
            break
    if num_documents < 2:
        raise UserError(f"{source.name}: {num_documents} document in all; wanted at least 2, for"
                        " training and validation (.jsonl holds one a line)")
    return Request(source=source.name, revision=source.revision, text_column=source.text_column,
                   tokenizer=options.tokenizer, validation_fraction=options.validation_fraction,
                   max_documents=options.max_documents, num_documents=num_documents, shards=shards)


def _facts(shard: Shard, options: PrepareOptions) -> ShardFacts:
    try:
        return shard.facts()
    except BadShard as error:
        if not options.skip_bad_shards:
            raise with_advice(error) from None
        return ShardFacts(name=shard.name, identity=shard.identity, num_documents=0,
                          is_bad=True)


def with_advice(error: BadShard) -> UserError:
    return UserError(f"{error}; mend it, or go on without it: --skip-bad-shards")


def check_disk(request: Request, journal: Journal, source: Source) -> None:
    """Refuse a disk that is too small, as far as the text's size is known."""
    num_text_bytes = sum(facts.num_text_bytes or 0 for facts in request.shards)
    wanted = 2 * num_text_bytes / MOST_BYTES_A_TOKEN[request.tokenizer]
    if request.max_documents is not None:
        wanted *= request.num_documents / sum(facts.num_documents for facts in request.shards)
    wanted -= sum(path.stat().st_size for path in journal.dataset_dir.glob("*.safetensors"))
    raw = sorted(shard.missing_bytes() for shard in
                 source.shards[journal.progress.num_shards:len(request.shards)])
    num_raw_bytes = sum(raw if source.keeps_raw else raw[-2:])  # one is fetched ahead
    if source.raw_dir is not None:
        try:
            source.raw_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(source.raw_dir, error) from None
        if source.raw_dir.stat().st_dev == journal.dir.stat().st_dev:
            wanted += num_raw_bytes
        else:
            check_room(source.raw_dir, num_raw_bytes, "files from the hub")
    check_room(journal.dir, wanted, "tokens" if source.raw_dir is None else
                "tokens and files from the hub")


def check_room(directory: Path, num_bytes: float, what: str) -> None:
    """Raise UserError if a disk has not so much room."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(f"{directory.parent}: {free / 1e9:.1f} GB free; {what} will take"
                        f" {num_bytes / 1e9:.1f} GB or more: make room, or name an output on"
                        " another disk")
