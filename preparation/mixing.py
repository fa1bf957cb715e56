"""Mix sources by weight: each is tokenised on its own, then their documents are interleaved.

Training is mixed from the first documents of each source, validation from its last ones. So a
source that starts over never brings a validation document into training.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from basics.errors import UserError, one_line, print_error, writing_to
from basics.text import counted
from preparation.card import Portion, Prepared
from preparation.choosing import SourceOptions
from preparation.ensure_dataset import SPLITS, is_complete
from preparation.find_source import find_source
from preparation.journal import TOKENS, Journal, check_output_dir
from preparation.pipeline import PrepareOptions, check_documents, encode_documents, write_headers
from preparation.reading import printable
from preparation.sources import Request, Source
from preparation.token_stream import (
    CHUNK_NUMBERS,
    Counts,
    TokenFileWriter,
    num_text_bytes,
    num_training_documents,
    read_tokens,
    start_of_last,
)
from tokens.token_file import TokenFile
from tokens.tokenizer import Tokenizer, choose_tokenizer, short_name

MAX_SOURCES = 10  # each has an entry in the metadata of a token file, which have 4 KiB
SOURCE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,23})=(?P<path>.+)"
    r":(?P<weight>[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
)
LEFT_OVER = 0.01  # of a source's training tokens: what an end at the first source's end may cost


@dataclass(frozen=True)
class WeightedSource:
    """A source of a mix, as the command line names it."""

    name: str
    path: str  # whatever a source may be, or the directory of a prepared dataset
    weight: str

    @property
    def is_prepared(self) -> bool:
        return is_complete(Path(self.path))


@dataclass(frozen=True)
class Documents:
    """The documents of a source for one split."""

    read: Callable[[], Iterator[np.ndarray]]  # in their order, each (n,) uint16 with its end
    num_tokens: int
    text_bytes: Callable[[int], int] | None  # of so many documents in a row; None if it is unknown


class Supply:
    """What a split has of a source so far."""

    def __init__(self, source: WeightedSource, documents: Documents) -> None:
        self.source = source
        self.documents = documents
        self.weight = int(Fraction(source.weight) * 10**9)  # has at most nine decimal places
        self.num_documents = 0
        self.num_tokens = 0
        self.num_ends = 0  # how often all documents have been taken
        self.left = documents.read()

    def num_passes(self) -> float:
        return self.num_tokens / self.documents.num_tokens


def parse_sources(texts: Sequence[str]) -> list[WeightedSource]:
    """Read NAME=PATH:WEIGHT of each source. Raises: UserError."""
    sources: dict[str, WeightedSource] = {}
    for text in texts:
        found = SOURCE.fullmatch(text)
        if not found or not Fraction(found["weight"]):
            raise UserError(
                f"--source {text}: wanted NAME=PATH:WEIGHT, such as code=my-code:0.3, with a weight"
                " above 0 and a name of at most 24 letters, digits, '.', '-' and '_'"
            )
        if found["name"] in sources:
            raise UserError(f"--source {text}: is the second of this name; wanted another name")
        sources[found["name"]] = WeightedSource(**found.groupdict())
    if not 2 <= len(sources) <= MAX_SOURCES:
        raise UserError(
            f"--source: is given {counted(len(sources), 'time')}; wanted 2 to {MAX_SOURCES} sources"
            " to mix, or one as SOURCE, without a name and a weight"
        )
    return list(sources.values())


def mix_sources(
    sources: Sequence[WeightedSource],
    reading: SourceOptions,
    output_dir: Path,
    options: PrepareOptions,
    *,
    repeat: bool,
) -> Prepared:
    """Write a dataset of several sources, whose shares of its tokens are as their weights.

    `reading` says how those are read that are not prepared datasets. They are tokenised one after
    the other. After a kill or an error the same call continues, also with other weights, a lower
    `max_documents` or `repeat`; only the interleaving begins again.

    Raises: UserError: for the reasons of `prepare_dataset`, or there is too little of a source.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = choose_tokenizer(options.tokenizer)
    journal = Journal(output_dir)
    found = {}
    for source in sources:
        if not source.is_prepared:
            raw_dir = Journal(journal.sources_dir / source.name).raw_dir
            documents = find_source(replace(reading, source=source.path), raw_dir=raw_dir)
            request = documents.request.changed(
                tokenizer=tokenizer.name, max_documents=options.max_documents
            )
            found[source.name] = replace(documents, request=request)
    with writing_to(output_dir), journal.locked():
        if journal.lines:
            raise UserError(
                f"{journal.dir}: an unfinished preparation of one source; repeat its command, or"
                " delete it"
            )
        for name, documents in found.items():  # all, before hours are spent on the first
            if documents.is_one_text:
                raise UserError(
                    f"{name}: is one text file, and so one document; divide it into several files,"
                    " or name what stands between its documents with --document-separator"
                )
            check_documents(documents, journal.sources_dir / name, options)
        splits = []
        bad_files = []
        for source in sources:
            if source.is_prepared:
                splits.append(_prepared(source, tokenizer))
                continue
            print_error(one_line(f"{source.name}: {source.path}"))
            place = journal.sources_dir / source.name
            encoded = encode_documents(found[source.name], place, tokenizer, options)
            bad_files += [f"{source.name}: {name}" for name in encoded.bad_files]
            splits.append(_divided(source, encoded, tokenizer, options))
        print_error(f"mixing {len(sources)} sources")
        shutil.rmtree(journal.dataset_dir, ignore_errors=True)  # of an earlier launch
        journal.begin_dataset(tokenizer)
        dataset = Prepared(_request(sources, found, tokenizer), {}, bad_files=bad_files)
        for split, limit in _limits(options).items():
            supplies = []
            for source, documents_of in zip(sources, splits, strict=True):
                supplies.append(Supply(source, documents_of[split]))
            writer = TokenFileWriter(journal.dataset_dir / f"{split}.safetensors")
            for document in interleaved(supplies, max_documents=limit, repeat=repeat):
                writer.add(document)
            writer.sync()
            writer.close()
            if split == "train" and not repeat:
                _check_amounts(supplies, limit, options)
            elif not repeat:
                _warn_of_rest(supplies, limit)
            dataset.splits[split], dataset.portions[split] = _counts(supplies)
        write_headers(journal.dataset_dir, dataset)
        journal.publish()
    return dataset


def interleaved(
    supplies: Sequence[Supply], *, max_documents: int, repeat: bool
) -> Iterator[np.ndarray]:
    """Yield documents of all sources, the next one always of the source that is furthest behind.

    A source's share of all tokens so far, by its weight, minus the tokens taken from it is how far
    it is behind. So it never has more than its share by more than one document. The end is where a
    source has no more documents; with `repeat` it starts over, and the end is where each has
    reached its end.
    """
    total_weight = sum(supply.weight for supply in supplies)
    num_documents = 0
    num_tokens = 0

    def behind(supply: Supply) -> int:  # tokens, times the total weight: whole numbers are exact
        return supply.weight * num_tokens - total_weight * supply.num_tokens

    while num_documents < max_documents:
        supply = max(supplies, key=behind)  # the first one of equals
        document = next(supply.left, None)
        if document is None:
            supply.num_ends += 1
            if not repeat or all(each.num_ends for each in supplies):
                break
            supply.left = supply.documents.read()
            continue
        yield document
        supply.num_documents += 1
        supply.num_tokens += document.size
        num_documents += 1
        num_tokens += document.size


def documents_in(chunks: Iterable[np.ndarray], end_of_text: int) -> Iterator[np.ndarray]:
    """Divide tokens in chunks into documents, each with its end-of-text token."""
    rest = np.empty(0, dtype=np.uint16)
    for chunk in chunks:
        tokens = np.concatenate([rest, chunk])
        start = 0
        for stop in (np.flatnonzero(tokens == end_of_text) + 1).tolist():
            yield tokens[start:stop]
            start = stop
        rest = tokens[start:]


def _prepared(source: WeightedSource, tokenizer: Tokenizer) -> dict[str, Documents]:
    """Return the documents of a prepared dataset, by split.

    Raises: UserError: it has another tokenizer, or no ends of documents.
    """
    splits = {}
    for split in SPLITS:
        file = TokenFile(Path(source.path) / f"{split}.safetensors")
        name = file.metadata.get("tokenizer", "gpt2")
        if name != tokenizer.name:
            raise UserError(
                f"{source.name}: {file.path} has tokens of the tokenizer {short_name(name)}, not of"
                f" {short_name(tokenizer.name)}; name its tokenizer with --tokenizer"
            )
        last = file.read(max(file.num_tokens - 1, 0), file.num_tokens)
        if last.tolist() != [tokenizer.eot_token]:
            raise UserError(
                f"{source.name}: {file.path} does not end with an end-of-text token, so where its"
                " documents end is unknown; prepare their text instead"
            )
        read = partial(_documents_of_file, file, tokenizer.eot_token)
        splits[split] = Documents(read, file.num_tokens, None)
    return splits


def _documents_of_file(file: TokenFile, end_of_text: int) -> Iterator[np.ndarray]:
    starts = range(0, file.num_tokens, CHUNK_NUMBERS)
    chunks = (file.read(start, min(start + CHUNK_NUMBERS, file.num_tokens)) for start in starts)
    return documents_in(chunks, end_of_text)


def _divided(
    source: WeightedSource, encoded: Journal, tokenizer: Tokenizer, options: PrepareOptions
) -> dict[str, Documents]:
    """Return the documents of a source that was encoded, by split.

    Raises: UserError: they cannot fill both splits.
    """
    counts = encoded.last.counts
    num_documents = min(counts.num_documents, options.max_documents or sys.maxsize)
    if num_documents < 2 or not counts.num_text_bytes:
        shutil.rmtree(encoded.dir)  # its files may be replaced
        raise UserError(
            f"{source.name}: {counted(counts.num_documents, 'document')} with"
            f" {counts.num_text_bytes} bytes of text found in {source.path}; wanted at least 2, one"
            " of them for the validation split"
        )
    path = encoded.dataset_dir / TOKENS
    end_of_text = tokenizer.eot_token
    num_tokens = counts.num_tokens
    if num_documents < counts.num_documents:
        num_left_out = counts.num_documents - num_documents
        num_tokens = start_of_last(path, num_tokens, num_left_out, end_of_text)
    num_train = num_training_documents(num_documents, options.validation_fraction)
    cut = start_of_last(path, num_tokens, num_documents - num_train, end_of_text)
    splits = {}
    for split, start, stop, first, last in (
        ("train", 0, cut, 0, num_train),
        ("validation", cut, num_tokens, num_train, num_documents),
    ):
        splits[split] = Documents(
            partial(_documents_of_tokens, path, start, stop, end_of_text),
            stop - start,
            partial(_text_bytes, encoded.ends_path, first, last),
        )
    return splits


def _documents_of_tokens(
    path: Path, start: int, stop: int, end_of_text: int
) -> Iterator[np.ndarray]:
    return documents_in(read_tokens(path, start, stop), end_of_text)


def _text_bytes(ends_path: Path, first: int, stop: int, num_documents: int) -> int:
    """Return the bytes of text of so many documents, from the first one on; the first one again
    follows the one before `stop`."""
    num_passes, num_more = divmod(num_documents, stop - first)
    before = num_text_bytes(ends_path, first)
    in_pass = num_text_bytes(ends_path, stop) - before
    return num_passes * in_pass + num_text_bytes(ends_path, first + num_more) - before


def _limits(options: PrepareOptions) -> dict[str, int]:
    """Return how many documents each split of the mix may have."""
    if options.max_documents is None:
        return dict.fromkeys(SPLITS, sys.maxsize)
    num_train = num_training_documents(options.max_documents, options.validation_fraction)
    return {"train": num_train, "validation": options.max_documents - num_train}


def _rest(supplies: Sequence[Supply], limit: int) -> tuple[str, float, str] | None:
    """Return where a mix ends early: the source at its end, and the share left of another one."""
    most_left = min(supplies, key=Supply.num_passes)
    left = 1 - most_left.num_passes()
    if sum(supply.num_documents for supply in supplies) == limit or left <= LEFT_OVER:
        return None
    ended = next(supply.source.name for supply in supplies if supply.num_ends)
    return ended, left, most_left.source.name


def _warn_of_rest(supplies: Sequence[Supply], limit: int) -> None:
    """Warn of a validation split that ends early. It has few documents, whose lengths differ."""
    rest = _rest(supplies, limit)
    if rest is not None:
        ended, left, other = rest
        shares = ", ".join(f"{one.source.name} {one.num_tokens:,} tokens" for one in supplies)
        print_error(
            f"warning: the validation split ends with the text of {ended}, and leaves {left:.0%} of"
            f" {other}: {shares}"
        )


def _check_amounts(supplies: Sequence[Supply], limit: int, options: PrepareOptions) -> None:
    """Refuse a mix that ends early, and so leaves text out. Raises: UserError."""
    rest = _rest(supplies, limit)
    if rest is None:
        return
    name, left, other = rest
    num_documents = sum(supply.num_documents for supply in supplies)
    reached = int(num_documents / (1 - Fraction(str(options.validation_fraction))))
    raise UserError(
        f"{name}: too little text for its weight: all of it is used after {num_documents:,}"
        f" training documents of the mix, and {left:.0%} of {other} is left;"
        f" --max-documents {reached} ends there, --repeat starts {name} over; or change the weights"
        " (nothing is tokenised again)"
    )


def _counts(supplies: Sequence[Supply]) -> tuple[Counts, dict[str, Portion]]:
    """Return what a split has, together and of each source."""
    portions = {}
    for supply in supplies:
        text_bytes = supply.documents.text_bytes
        num_text_bytes = text_bytes(supply.num_documents) if text_bytes else 0
        counts = Counts(supply.num_documents, supply.num_tokens, num_text_bytes)
        portions[supply.source.name] = Portion(supply.source.weight, counts, supply.num_passes())
    total = sum((portion.counts for portion in portions.values()), Counts())
    if any(supply.documents.text_bytes is None for supply in supplies):
        total = replace(total, num_text_bytes=0)  # unknown
    return total, portions


def _request(
    sources: Sequence[WeightedSource], found: Mapping[str, Source], tokenizer: Tokenizer
) -> Request:
    """Return what the metadata and the card say about where the documents are from."""
    labels = []
    revisions = []
    licences = []
    languages = []
    for source in sources:
        request = Request(source=printable(Path(source.path)))
        if source.name in found:
            request = found[source.name].request
        labels.append(f"{source.name}={request.source}:{source.weight}")
        revisions.append(request.revision)
        licences += [request.licence] if isinstance(request.licence, str) else request.licence
        languages += request.languages
    licences = list(dict.fromkeys(licences))
    return Request(
        source=", ".join(labels),
        revision=", ".join(filter(None, revisions)),
        tokenizer=tokenizer.name,
        title="a mix of " + ", ".join(source.name for source in sources),
        licence=licences if len(licences) > 1 else licences[0],
        languages=list(dict.fromkeys(languages)),
    )
