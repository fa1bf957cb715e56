"""A preparation that several machines share: the parts, and what is known of each."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from basics.errors import UserError
from basics.files import write_atomically
from preparation.documents import Source
from preparation.journal import Origin, Progress, Request

PART_FILE = "part.json"
TOKENS, TABLE = DIGESTED = "tokens.safetensors", "documents.bin"


@dataclass(frozen=True)
class Part:
    """The part `number` (from 1) of `total`."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read I/N. Raises: UserError."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise UserError(f"--part {text}: wanted I/N with I from 1 to N, such as 2/4")
        return cls(int(found[1]), int(found[2]))


class PartFile(BaseModel):
    """What a part's directory says about it, besides its tokens and the table of its documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: Request  # without its shards
    progress: Progress
    origin: Origin
    listing: str  # digest of the names and sizes of all files of the source
    max_bad_files: int = Field(ge=0)  # of all parts together
    digests: dict[str, str]  # SHA-256 of DIGESTED

    @model_validator(mode="after")
    def check(self) -> PartFile:
        """Refuse numbers that no preparation writes: a part comes from another machine."""
        request, progress = self.request, self.progress
        if not 0 < request.validation_fraction < 1:  # nor NaN
            raise ValueError("validation_fraction")
        if request.max_documents is not None and request.max_documents < 2:
            raise ValueError("max_documents")
        counts = (progress.num_documents, progress.train.num_tokens,
                  progress.num_bad_files - len(progress.bad_files))
        if min(counts) < 0:
            raise ValueError("progress")
        return self

    @property
    def part(self) -> Part:
        return Part.parse(self.request.part)


def share_of(source: Source, part: Part) -> Source:
    """Return the shards of one part: in all parts about the same number of bytes.

    Raises:
        UserError: there are more parts than shards.
    """
    if part.total > len(source.shards):
        raise UserError(f"--part {part}: {source.name} has only {len(source.shards)} shards, which"
                        " are files or groups of 1,000 text files; use fewer parts")
    cuts = _cuts([shard.num_bytes for shard in source.shards], part.total)
    return replace(source, shards=source.shards[cuts[part.number - 1]:cuts[part.number]],
                   whole=source)


def write_part(part_dir: Path, source: Source, request: Request, progress: Progress) -> None:
    """Write part.json next to the tokens, which must be complete."""
    assert source.whole is not None
    files = [(shard.name, shard.num_bytes, shard.num_files) for shard in source.whole.shards]
    content = PartFile(
        request=request.model_copy(update={"shards": []}), progress=progress,
        origin=source.origin(), listing=hashlib.sha256(repr(files).encode()).hexdigest(),
        max_bad_files=source.max_bad_files(), digests=digests_of(part_dir))
    write_atomically(part_dir / PART_FILE, content.model_dump_json(indent=1) + "\n", durable=True)


def digests_of(part_dir: Path) -> dict[str, str]:
    """Read the files of a part; return their digests by name. Takes about a second per GB."""
    found = {}
    for name in DIGESTED:
        with (part_dir / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _cuts(sizes: Sequence[int], num_parts: int) -> list[int]:
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
