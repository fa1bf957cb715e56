"""Join the parts of a preparation to the dataset that one machine would have made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from basics.errors import UserError, cannot_be_written
from basics.files import read_regular_file, write_atomically
from preparation.dataset_card import write_card
from preparation.document_table import TokenStream
from preparation.journal import Journal, Progress, SplitCount, shown
from preparation.outputs import check_not_empty, token_metadata
from preparation.parts import PART_FILE, TABLE, TOKENS, PartFile, digests_of
from preparation.planning import (
    check_disk_space,
    check_num_documents,
    check_output_dir,
    num_training_documents,
)
from preparation.token_file_writer import TokenFileWriter
from tokens.tokenizer import END_OF_TEXT_IDS, choose_tokenizer, end_of_text_of, file_beside

SAME = ("source", "revision", "text_column", "tokenizer", "validation_fraction", "max_documents")


@dataclass(frozen=True)
class _PartDir:
    """One part, and the number of documents in the parts before it."""

    dir: Path
    file: PartFile
    stream: TokenStream
    first: int = 0

    @property
    def stop(self) -> int:
        return self.first + self.file.progress.num_documents


def join_parts(part_dirs: Sequence[Path], output_dir: Path, *,
               skip_bad_shards: bool = False) -> Progress:
    """Write the dataset of all parts; they are left as they are. May be repeated after a kill.

    Raises:
        UserError: a part is missing, damaged, or of another preparation; `output_dir` is not
            empty; the disk is full.
    """
    output_dir = check_output_dir(output_dir)
    parts = _read_parts(part_dirs)
    request, num_documents = parts[0].file.request, parts[-1].stop
    if request.max_documents is not None:
        num_documents = min(num_documents, request.max_documents)
    check_num_documents(num_documents, request.source)
    progress = _left_out(parts, skip_bad_shards=skip_bad_shards)
    try:
        with Journal(output_dir) as journal:  # used as a lock: a join is not resumed
            journal.begin_anew()
            check_disk_space(journal.dir, 2 * sum(
                part.file.progress.train.num_tokens for part in parts), "tokens")
            progress = _write(parts, journal.dataset_dir, progress, num_documents)
            journal.publish(output_dir)
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    return progress


def _read_parts(part_dirs: Sequence[Path]) -> list[_PartDir]:
    """Read all parts, in their order. Raises: UserError."""
    found = sorted(((path, _read(path)) for path in part_dirs),
                   key=lambda item: item[1].part.number)
    total = found[0][1].part.total
    for path, file in found[1:]:
        _check_same(found[0], (path, file))
    for (path, file), (other, other_file) in itertools.pairwise(found):
        if file.part == other_file.part:
            raise UserError(f"{path} and {other} are both part {file.part}; name each part once")
    numbers = {file.part.number for _, file in found}
    if missing := [str(number) for number in range(1, total + 1) if number not in numbers]:
        more = f" and {len(missing) - 5} more" * (len(missing) > 5)
        raise UserError(f"part {', '.join(missing[:5])}{more} of {total} missing; prepare it with"
                        f" --part {missing[0]}/{total}, or name its directory")
    parts: list[_PartDir] = []
    for path, file in found:
        stream = _checked_stream(path, file)
        parts.append(_PartDir(path, file, stream, parts[-1].stop if parts else 0))
    return parts


def _read(path: Path) -> PartFile:
    try:
        file = PartFile.model_validate_json(read_regular_file(path / PART_FILE))
        file.part  # noqa: B018  (raises if it is not I/N)
    except FileNotFoundError:
        unfinished = path.resolve()
        unfinished = unfinished.parent / f".{unfinished.name}.partial"
        raise UserError(f"{path}: is an unfinished part; run its command again" if
                        unfinished.exists() else f"{path}: is not a part (it has no {PART_FILE});"
                        " name an OUTPUT of --part") from None
    except (OSError, ValidationError, UserError):
        raise UserError(f"{path / PART_FILE}: cannot be read, or is damaged; copy or prepare the"
                        " part again") from None
    return file


def _check_same(one: tuple[Path, PartFile], other: tuple[Path, PartFile]) -> None:
    """Refuse parts of different preparations. Raises: UserError."""
    (path, file), (other_path, other_file) = one, other
    for key in SAME:
        value, other_value = getattr(file.request, key), getattr(other_file.request, key)
        if value != other_value:
            raise UserError(f"{path} and {other_path} do not belong together:"
                            f" {key.replace('_', ' ')} is {shown(value)}, and {shown(other_value)}")
    if file.part.total != other_file.part.total:
        raise UserError(f"{path} and {other_path} do not belong together: they are parts"
                        f" {file.part} and {other_file.part}")
    if file.listing != other_file.listing:
        raise UserError(f"{path} and {other_path} do not belong together: the names or sizes of"
                        " the source's files differed")


def _checked_stream(path: Path, file: PartFile) -> TokenStream:
    """Open the tokens of a part. Raises: UserError, if they are damaged."""
    name = file.request.tokenizer
    if (beside := file_beside(path, name)) is None and name not in END_OF_TEXT_IDS:
        raise UserError(f"{path / PART_FILE}: its tokenizer {name[:60]!r} is unknown; copy or"
                        " prepare the part again")
    end_of_text = end_of_text_of(name, beside)
    try:
        stream = TokenStream(path / TOKENS, path / TABLE)
        if stream.num_documents == file.progress.num_documents and stream.ends_with(
                end_of_text, file.progress.train.num_tokens) and digests_of(path) == file.digests:
            return stream
    except (OSError, ValueError):
        pass
    raise UserError(f"{path}: {TOKENS} or {TABLE} is not whole; copy or prepare the part again")


def _left_out(parts: Sequence[_PartDir], *, skip_bad_shards: bool) -> Progress:
    """Return a progress with the files that one machine would have left out. Raises: UserError."""
    progress, limit = Progress(), parts[0].file.request.max_documents
    for part in parts:
        bad = part.file.progress
        if limit is not None and part.stop >= limit and part.first and bad.num_bad_files:
            if part.first >= limit:  # not reached
                break
            raise UserError(f"{part.dir}: --max-documents ends in this part, which has files that"
                            " could not be read: replace them, or prepare all on one machine")
        progress = progress.without(*bad.bad_files)
        progress = progress.model_copy(update={"num_bad_files": progress.num_bad_files
                                               + bad.num_bad_files - len(bad.bad_files)})
    allowed = parts[0].file.max_bad_files
    if progress.num_bad_files > allowed and not skip_bad_shards:
        raise UserError(f"{progress.num_bad_files} files of all parts could not be read, more than"
                        f" {allowed}; replace them, or skip them with --skip-bad-shards")
    return progress


def _write(parts: Sequence[_PartDir], dataset_dir: Path, progress: Progress,
           num_documents: int) -> Progress:
    """Write the files of the dataset; return the counts."""
    request = parts[0].file.request
    num_train = num_training_documents(num_documents, request.validation_fraction)
    if path := file_beside(dataset_dir, request.tokenizer):
        write_atomically(path, choose_tokenizer(str(parts[0].dir)).content, durable=True)
    writers = {split: TokenFileWriter(dataset_dir / f"{split}.safetensors")
               for split in ("train", "validation")}
    ranges = {"train": (0, num_train), "validation": (num_train, num_documents)}
    progress = progress.model_copy(update={
        split: _copy(parts, ranges[split], writer) for split, writer in writers.items()})
    ends = [part.stream.end(min(part.stop, num_documents) - part.first) for part in parts
            if part.first < num_documents]
    progress = progress.model_copy(update={"num_documents": num_documents,
                                           "num_bytes": sum(end[1] for end in ends),
                                           "num_characters": sum(end[2] for end in ends)})
    check_not_empty(progress, request.source)
    for split, writer in writers.items():
        writer.finish(progress.of(split).metadata() | token_metadata(request, progress))
    write_card(dataset_dir, parts[0].file.origin, request, progress)
    return progress


def _copy(parts: Sequence[_PartDir], documents: tuple[int, int],
          writer: TokenFileWriter) -> SplitCount:
    count = SplitCount(num_text_bytes=0)
    for part in parts:
        first, stop = max(documents[0], part.first), min(documents[1], part.stop)
        if first < stop:
            count = part.stream.copy(first - part.first, stop - part.first, count, writer)
    return count
