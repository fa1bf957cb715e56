"""A preparation that several machines share: its parts, and their join to one dataset."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from basics.errors import UserError, cannot_be_written
from basics.files import read_regular_file, write_atomically
from preparation.card import token_metadata, write_card
from preparation.journal import (
    PART_FILE,
    TABLE,
    TOKENS,
    Journal,
    Line,
    Origin,
    Progress,
    Request,
    check_output_dir,
)
from preparation.sources import Source
from preparation.token_stream import (
    TokenFileWriter,
    TokenStream,
    check_documents,
    copy_documents,
    num_training_documents,
)
from tokens.tokenizer import file_beside, read_named_tokenizer


class PartFile(Line):
    """What a part's directory says about it, besides its tokens and the table of its documents."""

    request: Request
    progress: Progress
    origin: Origin
    listing: str  # digest of the names and sizes of all files of the source
    max_bad_files: int  # of all parts together
    digests: dict[str, str]  # SHA-256 of TOKENS and TABLE


def parse_part(text: str) -> tuple[int, int]:
    """Read I/N, a part (from 1) and how many there are. Raises: UserError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text}: wanted I/N with I from 1 to N, such as 2/4")
    return int(found[1]), int(found[2])


def share_of(source: Source, part: str) -> Source:
    """Return the shards of one part: in all parts about the same number of bytes.

    Raises:
        UserError: there are more parts than shards.
    """
    number, total = parse_part(part)
    if total > len(source.shards):
        raise UserError(f"--part {part}: {source.name} has only {len(source.shards)} shards, which"
                        " are files or groups of text files; use fewer parts")
    cuts = part_cuts([shard.num_bytes for shard in source.shards], total)
    return replace(source, shards=source.shards[cuts[number - 1]:cuts[number]], whole=source)


def part_cuts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return where each part begins, and the end; no part is empty."""
    sums = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for number in range(1, num_parts):
        wanted = sums[-1] * number // num_parts
        cut = bisect.bisect_left(sums, wanted)
        if cut and wanted - sums[cut - 1] < sums[cut] - wanted:
            cut -= 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(sizes) - num_parts + number))
    return [*cuts, len(sizes)]


def write_part(part_dir: Path, source: Source, request: Request, progress: Progress) -> None:
    """Write part.json next to the tokens, which must be complete."""
    assert source.whole is not None
    files = [(shard.name, shard.num_bytes, shard.num_files) for shard in source.whole.shards]
    content = PartFile(
        request=request, progress=progress, origin=source.origin,
        listing=hashlib.sha256(repr(files).encode()).hexdigest(),
        max_bad_files=source.max_bad_files(), digests=_digests_of(part_dir))
    write_atomically(part_dir / PART_FILE, content.model_dump_json(indent=1) + "\n", durable=True)


def _digests_of(part_dir: Path) -> dict[str, str]:
    """Read the files of a part; return their digests by name. Takes about a second per GB."""
    found = {}
    for name in (TOKENS, TABLE):
        with (part_dir / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def join_parts(part_dirs: Sequence[Path], output_dir: Path, *,
               skip_bad_shards: bool = False) -> Progress:
    """Write the dataset of all parts; they are left as they are. May be repeated after a kill.

    Raises:
        UserError: a part is missing, damaged, or of another preparation; `output_dir` is not
            empty; the disk is full.
    """
    output_dir = check_output_dir(output_dir)
    parts = _read_parts(part_dirs)
    first_dir, first = parts[0]
    streams, progress = [], Progress()
    for part_dir, part in parts:
        streams.append(TokenStream(part_dir / TOKENS, part_dir / TABLE))
        counts = part.progress
        progress = progress.without(*counts.bad_files).changed(
            num_bad_files=progress.num_bad_files + counts.num_bad_files,
            num_characters=progress.num_characters + counts.num_characters,
            num_empty=progress.num_empty + counts.num_empty)
    if progress.num_bad_files > first.max_bad_files and not skip_bad_shards:
        raise UserError(f"{progress.num_bad_files} files of all parts could not be read, more than"
                        f" {first.max_bad_files}; replace them, or skip them with"
                        " --skip-bad-shards")
    request = first.request
    num_documents = sum(stream.num_documents for stream in streams)
    check_documents(progress, num_documents, request.source)
    num_train = num_training_documents(num_documents, request.validation_fraction)
    try:
        journal = Journal(output_dir)
        with journal.locked():  # a join is not resumed
            journal.begin_anew(2 * sum(part.progress.total.num_tokens for _, part in parts))
            dataset_dir = journal.dataset_dir
            if path := file_beside(dataset_dir, request.tokenizer):
                content = read_named_tokenizer(first_dir / path.name, request.tokenizer)
                write_atomically(path, content, durable=True)
            train, validation = (TokenFileWriter(dataset_dir / f"{split}.safetensors")
                                 for split in ("train", "validation"))
            progress = progress.changed(
                train=copy_documents(streams, 0, num_train, train),
                validation=copy_documents(streams, num_train, num_documents, validation))
            metadata = token_metadata(request, progress)
            train.finish(progress.train.metadata() | metadata)
            validation.finish(progress.validation.metadata() | metadata)
            write_card(dataset_dir, first.origin, request, progress)
            journal.publish()
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    return progress


def _read_parts(part_dirs: Sequence[Path]) -> list[tuple[Path, PartFile]]:
    """Read all parts, in their order. Raises: UserError."""
    found = {}
    for path in part_dirs:
        part = _read(path)
        number, total = parse_part(part.request.part)
        for other_path, other in list(found.values())[:1]:
            pair = f"{other_path} and {path} do not belong together"
            own = part.request.model_copy(update={"part": "", "asked_revision": ""})
            if changes := own.difference(other.request.model_copy(update={"part": ""})):
                raise UserError(f"{pair}: {changes}")
            if parse_part(other.request.part)[1] != total:
                raise UserError(f"{pair}: they are parts {other.request.part} and"
                                f" {part.request.part}")
            if other.listing != part.listing:
                raise UserError(f"{pair}: the names or sizes of the source's files differed")
        if number in found:
            raise UserError(f"{found[number][0]} and {path} are both part {part.request.part};"
                            " name each part once")
        found[number] = path, part
    missing = [str(number) for number in range(1, total + 1) if number not in found]
    if missing:
        more = f" and {len(missing) - 5} more" * (len(missing) > 5)
        raise UserError(f"part {', '.join(missing[:5])}{more} of {total} missing; prepare it with"
                        f" --part {missing[0]}/{total}, or name its directory")
    return [found[number] for number in sorted(found)]


def _read(path: Path) -> PartFile:
    try:
        part = PartFile.model_validate_json(read_regular_file(path / PART_FILE))
        parse_part(part.request.part)
        is_whole = _digests_of(path) == part.digests
    except FileNotFoundError as error:
        if Path(error.filename).name != PART_FILE:
            raise UserError(f"{error.filename}: is missing; copy or prepare the part again"
                            ) from None
        raise UserError(f"{path}: is not a part, or an unfinished one (it has no {PART_FILE}); name"
                        " an OUTPUT of --part, or run its command again") from None
    except (OSError, ValidationError, UserError):
        raise UserError(f"{path / PART_FILE}: cannot be read, or is damaged; copy or prepare the"
                        " part again") from None
    if not is_whole:
        raise UserError(f"{path}: {TOKENS} or {TABLE} is not whole; copy or prepare the part again")
    return part
