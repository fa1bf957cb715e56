"""Plan a preparation: count the documents and check the output and the disk, before it starts."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

from basics.errors import UserError, cannot_be_written, one_line
from preparation.cutting import BadShard
from preparation.documents import Shard, Source
from preparation.journal import MAX_BAD_NAMES, Journal, Request, ShardFacts
from preparation.parts import Part

# Text with more bytes per token is rare: used to estimate the least disk space needed.
MAX_BYTES_PER_TOKEN = {"gpt2": 5.0, "bytes": 1.0}
OWN_MAX_BYTES_PER_TOKEN = 8.0  # of a tokenizer that comes as a file


@dataclass(frozen=True)
class PrepareOptions:
    """The options of a preparation, besides its source."""

    tokenizer: str = "gpt2"  # or bytes, or the path of a tokenizer.json or of its directory
    validation_fraction: float = 0.01
    max_documents: int | None = None
    num_workers: int = 1
    skip_bad_shards: bool = False
    part: Part | None = None  # prepare only this part, for several machines


def check_output_dir(output_dir: Path) -> Path:
    """Return the output directory with links resolved; it must be empty or missing.

    Raises:
        UserError: it is not empty, or it cannot be replaced.
    """
    try:
        output_dir = output_dir.resolve()
    except RuntimeError:  # raised by Python 3.11
        raise UserError(f"{output_dir}: is a loop of links; name another output") from None
    if output_dir.is_mount() or output_dir == Path.cwd():
        raise UserError(f"{output_dir}: is a mount point or the current directory; name a directory"
                        " in it")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir}: is not empty; name another output, or delete it yourself")
    return output_dir


def num_training_documents(num_documents: int, validation_fraction: float) -> int:
    """Return the number of training documents; both splits get at least one document.

    The same of tokens, if there is one document.

    Source: the slice `train[:99%]` of Hugging Face's datasets: rounded, half to even.
    """
    share = 1 - Fraction(str(validation_fraction))
    return min(max(round(num_documents * share), 1), num_documents - 1)


def plan_request(source: Source, options: PrepareOptions, journal: Journal, *,
                 tokenizer_name: str) -> Request:
    """Count the documents of all shards that an earlier launch did not count. Raises: UserError."""
    before = journal.request if (
        journal.request and journal.request.text_column == source.text_column) else None
    num_bad = sum(facts.is_bad for facts in before.shards) if before else 0
    # A preparation that is continued leaves out the same files, even if they can be read now.
    keeps_bad = options.skip_bad_shards or (
        journal.progress.num_shards > 0 and num_bad <= source.max_bad_files())
    known = {(facts.name, facts.identity): facts
             for facts in [*(before.shards if before else []), *journal.counted]
             if keeps_bad or not facts.is_bad}
    shards: list[ShardFacts] = []
    num_documents: int | None = 0
    for shard in tqdm(source.shards, desc="counting documents", unit=" files", leave=False,
                      disable=None, delay=1):
        facts = known.get((shard.name, shard.identity))
        if facts is None:
            facts = _facts(shard, sum(facts.is_bad for facts in shards), source, options)
            if facts.num_documents is not None and facts.num_text_bytes is None and (
                    not facts.is_bad):  # counting read the whole file
                journal.note_count(facts)
        shards.append(facts)
        if facts.num_documents is None or num_documents is None:
            num_documents = None
            continue
        num_documents += facts.num_documents
        if options.max_documents is not None and num_documents >= options.max_documents:
            num_documents = options.max_documents
            break
    if num_documents is not None and options.part is None and not source.is_one_text():
        check_num_documents(num_documents, source.name)
    return Request(source=source.name, revision=source.revision, text_column=source.text_column,
                   tokenizer=tokenizer_name, validation_fraction=options.validation_fraction,
                   max_documents=options.max_documents, num_documents=num_documents, shards=shards,
                   part=str(options.part or ""), asked_revision=source.asked_revision)


def check_num_documents(num_documents: int, source: str) -> None:
    """Refuse a source that cannot fill both splits. Raises: UserError."""
    if num_documents < 2:
        found = "1 document" if num_documents else "no documents"
        raise UserError(f"{source}: {found} found; wanted at least 2, for"
                        " training and validation (JSON lines: one document per line)")


def _facts(shard: Shard, num_bad: int, source: Source, options: PrepareOptions) -> ShardFacts:
    try:
        return shard.facts()
    except BadShard as error:
        leave_out(num_bad + 1, str(error), source, options)
        return ShardFacts(name=shard.name, identity=shard.identity, num_documents=0,
                          is_bad=True)


def leave_out(num_bad: int, reason: str, source: Source, options: PrepareOptions) -> None:
    """Warn of a file that cannot be read, the `num_bad`th one. Raises: UserError; too many."""
    if not options.skip_bad_shards and num_bad > source.max_bad_files():
        if num_bad == 1:
            raise UserError(f"{reason}; replace it, or skip it with --skip-bad-shards")
        raise UserError(f"{reason}; {num_bad} files cannot be read: replace them, or skip them with"
                        " --skip-bad-shards")
    if num_bad <= MAX_BAD_NAMES:
        tqdm.write(one_line(f"left out: {reason}"), file=sys.stderr)


def check_disk(request: Request, journal: Journal, source: Source) -> None:
    """Check for enough disk space, as far as the size of the text is known. Raises: UserError."""
    num_text_bytes = sum(facts.num_text_bytes or 0 for facts in request.shards)
    bytes_per_token = MAX_BYTES_PER_TOKEN.get(request.tokenizer, OWN_MAX_BYTES_PER_TOKEN)
    wanted = 2 * num_text_bytes / bytes_per_token * (1 + request.validation_fraction)
    num_documents = sum(facts.num_documents or 0 for facts in request.shards)
    if request.max_documents is not None and request.num_documents and num_documents:
        wanted *= request.num_documents / num_documents
    wanted -= sum(path.stat().st_size for path in journal.dataset_dir.glob("*.safetensors"))
    raw = sorted(shard.missing_bytes() for shard in
                 source.shards[journal.progress.num_shards:len(request.shards)])
    num_raw_bytes = sum(raw if source.keeps_raw else raw[-2:])  # one is downloaded ahead
    if source.raw_dir is not None:
        try:
            source.raw_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(source.raw_dir, error) from None
        if source.raw_dir.stat().st_dev == journal.dir.stat().st_dev:
            wanted += num_raw_bytes
        else:
            check_disk_space(source.raw_dir, num_raw_bytes, "files from the hub")
    check_disk_space(journal.dir, wanted, "tokens" if source.raw_dir is None else
                     "tokens and files from the hub")


def check_disk_space(directory: Path, num_bytes: float, content: str) -> None:
    """Raise UserError if the disk has less free space than this."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise UserError(f"{directory.parent}: {free / 1e9:.1f} GB free; {content} need"
                        f" {num_bytes / 1e9:.1f} GB or more: free some space, or name an output"
                        " on another disk")
