"""The parts of a preparation that several machines share, and their content as a source."""

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from basics.errors import UserError
from basics.files import fsync, read_regular_file, sha256_of, write_atomically
from preparation.card import Prepared
from preparation.cutting import Cuts
from preparation.encoded import Encoded
from preparation.findings import Findings
from preparation.journal import ENDS, TOKENS
from preparation.reading import BadFile
from preparation.sources import Record, Request, Shard, Source
from preparation.token_stream import Counts, read_ends, read_tokens
from tokens.tokenizer import Tokenizer, file_beside, load_tokenizer

PART_FILE = "part.json"
MAX_PART_FILE = 2**26  # bytes


class PartFile(Record):
    """What a part's directory says about it, besides its tokens."""

    request: Request
    counts: Counts
    findings: Findings
    bad_files: list[str]
    max_bad_files: int  # of all parts together
    digest: str  # SHA-256 of TOKENS
    ends_digest: str  # of ENDS


def parse_part(text: str) -> tuple[int, int]:
    """Read I/N, a part (from 1) and how many there are. Raises: UserError."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--part {text}: wanted I/N with I from 1 to N, such as 2/4")
    return int(found[1]), int(found[2])


def share_of(source: Source, part: str) -> Source:
    """Return the shards of one part; all parts have about the same number of them.

    Raises: UserError: there are more parts than shards.
    """
    number, total = parse_part(part)
    num_shards = len(source.shards)
    if total > num_shards:
        raise UserError(
            f"--part {part}: {source.request.source} has only {num_shards} shards,"
            " which are files or groups of text files; use fewer parts"
        )
    first = (number - 1) * num_shards // total
    stop = number * num_shards // total
    return replace(source, shards=source.shards[first:stop])


def names_and_sizes(source: Source) -> str:
    """Return the digest of the names and sizes of all files, which all parts must share."""
    files = [(shard.name, shard.num_bytes, shard.num_files) for shard in source.shards]
    return hashlib.sha256(repr(files).encode()).hexdigest()


def write_part(part_dir: Path, part: Prepared, ends_path: Path, max_bad_files: int) -> None:
    """Write part.json and the ends of its documents next to the tokens, which must be complete."""
    shutil.copyfile(ends_path, part_dir / ENDS)
    fsync(part_dir / ENDS)
    content = PartFile(
        request=part.request,
        counts=part.total,
        findings=part.findings,
        bad_files=list(part.bad_files),
        max_bad_files=max_bad_files,
        digest=sha256_of(part_dir / TOKENS),
        ends_digest=sha256_of(part_dir / ENDS),
    )
    write_atomically(part_dir / PART_FILE, content.model_dump_json(indent=1) + "\n", durable=True)


def read_parts(part_dirs: Sequence[Path]) -> tuple[Source, Tokenizer]:
    """Return the documents of all parts, and their tokenizer.

    Raises: UserError: a part is missing, damaged, or of another preparation.
    """
    found: dict[int, tuple[Path, PartFile]] = {}
    for path in part_dirs:
        part = _read(path)
        number, total = parse_part(part.request.part)
        request = part.request.changed(part=f"of {total}")  # the same of all parts
        if not found:
            first_path, first, first_request = path, part, request
        if changes := request.difference(first_request):
            raise UserError(f"{first_path} and {path} do not belong together: {changes}")
        if number in found:
            raise UserError(
                f"{found[number][0]} and {path} are both part {part.request.part}; name"
                " each part once"
            )
        found[number] = path, part
    missing = [str(number) for number in range(1, total + 1) if number not in found]
    if missing:
        raise UserError(
            f"part {', '.join(missing)} of {total} missing; prepare it with --part"
            f" {missing[0]}/{total}, or name its directory"
        )
    shards = [
        Shard(
            name=str(path),
            identity=part.digest,
            num_bytes=2 * part.counts.num_tokens,
            tasks=partial(_stored, path, part),
        )
        for _, (path, part) in sorted(found.items())
    ]
    name = first.request.tokenizer
    tokenizer = load_tokenizer(name, file_beside(first_path, name))
    request = first.request.changed(part="", names_and_sizes="")
    return Source(request, shards, max_bad_files=first.max_bad_files), tokenizer


def _read(path: Path) -> PartFile:
    with suppress(OSError, ValidationError, UserError):
        content = read_regular_file(path / PART_FILE, max_bytes=MAX_PART_FILE)
        part = PartFile.model_validate_json(content)
        parse_part(part.request.part)
        if sha256_of(path / TOKENS) == part.digest and sha256_of(path / ENDS) == part.ends_digest:
            return part
    raise UserError(
        f"{path}: is not a whole part: {PART_FILE}, {TOKENS} or {ENDS} is missing or"
        " damaged; repeat its --part command, or copy it again"
    )


def _stored(path: Path, part: PartFile, _: Cuts) -> Iterator[Encoded]:
    """Yield the files that are missing first: they may be too many. Then the ends of all documents,
    and all tokens."""
    no_numbers = np.empty(0, dtype=np.int64)
    nothing = Encoded(np.empty(0, dtype=np.uint16), no_numbers, no_numbers, Findings())
    bad_files = [BadFile(name, f"{name} of {path}: could not be read") for name in part.bad_files]
    yield replace(nothing, findings=part.findings, bad_files=bad_files)
    first_byte = 0  # of the text of a chunk's documents; `Encoded` counts from it
    for chunk in read_ends(path / ENDS, 0, part.counts.num_documents):
        ends = chunk - first_byte
        yield replace(nothing, ends=ends, num_text_bytes=int(ends[-1]))
        first_byte = int(chunk[-1])
    for tokens in read_tokens(path / TOKENS, 0, part.counts.num_tokens):
        yield replace(nothing, tokens=tokens)
