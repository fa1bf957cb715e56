"""Mix prepared datasets by weight: their documents are interleaved.

Training is mixed from their training files, validation from their validation files. So a dataset
that starts over never brings a validation document into training.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from basics.errors import UserError, print_error, writing_to
from basics.text import counted
from preparation.card import Portion, Prepared
from preparation.ensure_dataset import SPLITS
from preparation.journal import Journal, check_output_dir
from preparation.pipeline import write_headers
from preparation.sources import Request, printable
from preparation.token_stream import (
    CHUNK_NUMBERS,
    Counts,
    TokenFileWriter,
    digest_of,
    num_training_documents,
)
from tokens.token_file import TokenFile
from tokens.tokenizer import Tokenizer, file_beside, load_tokenizer, short_name

MAX_DATASETS = 10  # each has an entry in the metadata of a token file, which have 4 KiB
DATASET = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,23})=(?P<path>.+)"
    r":(?P<weight>[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
)
LEFT_OVER = 0.01  # of a dataset's training tokens: what an end at the first one's end may cost
VALIDATION_FRACTION = 0.01  # of the documents, where their number is limited


class Weighted(NamedTuple):
    """A dataset of a mix, as the command line names it."""

    name: str
    path: str
    weight: str


class Supply:
    """What a split of a mix has of a dataset so far."""

    def __init__(
        self, dataset: Weighted, read: Callable[[], Iterator[np.ndarray]], num_tokens: int
    ) -> None:
        """`read` yields its documents in their order, each (n,) uint16 with its end; together they
        have `num_tokens`."""
        self.dataset = dataset
        self.read = read
        self.weight = int(Fraction(dataset.weight) * 10**9)  # has at most nine decimal places
        self.counts = Counts()
        self.num_ends = 0  # how often all documents have been taken
        self.left = read()
        self._num_tokens = num_tokens

    def num_passes(self) -> float:
        return self.counts.num_tokens / self._num_tokens

    def portion(self) -> Portion:
        return Portion(self.dataset.weight, self.counts, self.num_passes())


def parse_mix(texts: Sequence[str]) -> list[Weighted]:
    """Read NAME=DATASET:WEIGHT of each dataset. Raises: UserError."""
    found: dict[str, Weighted] = {}
    for text in texts:
        parts = DATASET.fullmatch(text)
        if not parts or not Fraction(parts["weight"]):
            raise UserError(
                f"--mix {text}: wanted NAME=DATASET:WEIGHT, such as code=datasets/code:0.3, with a"
                " weight above 0 and a name of at most 24 letters, digits, '.', '-' and '_'"
            )
        if parts["name"] in found:
            raise UserError(f"--mix {text}: is the second of this name; wanted another name")
        found[parts["name"]] = Weighted(**parts.groupdict())
    if not 2 <= len(found) <= MAX_DATASETS:
        raise UserError(
            f"--mix: is given {counted(len(found), 'time')}; wanted 2 to {MAX_DATASETS} datasets"
        )
    return list(found.values())


def mix_datasets(
    datasets: Sequence[Weighted], output_dir: Path, max_documents: int | None, *, repeat: bool
) -> Prepared:
    """Write a dataset of several ones, whose shares of its tokens are as their weights.

    After a kill it begins again. Raises: UserError: they are no datasets of one tokenizer, or there
    is too little of one.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = _tokenizer_of(datasets)
    files = {split: [_opened(each, split, tokenizer) for each in datasets] for split in SPLITS}
    label = ", ".join(f"{each.name}={printable(each.path)}:{each.weight}" for each in datasets)
    title = "a mix of " + ", ".join(each.name for each in datasets)
    dataset = Prepared(Request(source=label, title=title, tokenizer=tokenizer.name), {})
    limits = dict.fromkeys(SPLITS, sys.maxsize)
    if max_documents is not None:
        limits["train"] = num_training_documents(max_documents, VALIDATION_FRACTION)
        limits["validation"] = max_documents - limits["train"]
    journal = Journal(output_dir)
    with writing_to(output_dir), journal.locked():
        journal.begin(dataset.request, tokenizer)
        validation: Counter[int] = Counter()  # digests of its documents, but empty ones
        for split in reversed(SPLITS):  # the training documents are looked for among the others
            supplies = []
            for each, file in zip(datasets, files[split], strict=True):
                read = partial(_documents_of, file, tokenizer.eot_token)
                supplies.append(Supply(each, read, file.num_tokens))
            writer = TokenFileWriter(journal.dataset_dir / f"{split}.safetensors")
            with closing(writer):
                for document in interleaved(supplies, limits[split], repeat=repeat):
                    writer.add(document)
                    if split == "train":
                        dataset.num_repeated += validation.pop(digest_of(document), 0)
                    elif document.size > 1:
                        validation[digest_of(document)] += 1
                writer.sync()
            if not repeat:
                _check_end(supplies, split, limits[split])
            dataset.portions[split] = {one.dataset.name: one.portion() for one in supplies}
        for split in SPLITS:
            counts = (portion.counts for portion in dataset.portions[split].values())
            dataset.splits[split] = sum(counts, Counts())
        write_headers(journal.dataset_dir, dataset)
        journal.publish()
    return dataset


def interleaved(
    supplies: Sequence[Supply], max_documents: int, *, repeat: bool
) -> Iterator[np.ndarray]:
    """Yield documents of all supplies, the next one always of the one that is furthest behind.

    A dataset's share of all tokens so far, by its weight, minus the tokens taken from it is how far
    it is behind. So it never has more than its share by more than one document. The end is where a
    dataset has no more documents; with `repeat` it starts over, and the end is where each has
    reached its end.
    """
    total_weight = sum(supply.weight for supply in supplies)
    total = Counts()

    def behind(supply: Supply) -> int:  # tokens, times the total weight: whole numbers are exact
        return supply.weight * total.num_tokens - total_weight * supply.counts.num_tokens

    while total.num_documents < max_documents:
        supply = max(supplies, key=behind)  # the first one of equals
        document = next(supply.left, None)
        if document is None:
            supply.num_ends += 1
            if not repeat or all(each.num_ends for each in supplies):
                break
            supply.left = supply.read()
            continue
        yield document
        one = Counts(1, document.size)
        supply.counts += one
        total += one


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


def _documents_of(file: TokenFile, end_of_text: int) -> Iterator[np.ndarray]:
    starts = range(0, file.num_tokens, CHUNK_NUMBERS)
    chunks = (file.read(start, min(start + CHUNK_NUMBERS, file.num_tokens)) for start in starts)
    return documents_in(chunks, end_of_text)


def _tokenizer_of(datasets: Sequence[Weighted]) -> Tokenizer:
    """Return the tokenizer of the first dataset. Raises: UserError."""
    path = Path(datasets[0].path)
    name = TokenFile(path / "train.safetensors").metadata.get("tokenizer", "gpt2")
    return load_tokenizer(name, file_beside(path, name))


def _opened(dataset: Weighted, split: str, tokenizer: Tokenizer) -> TokenFile:
    """Open a token file. Raises: UserError: it has another tokenizer, or no ends of documents."""
    file = TokenFile(Path(dataset.path) / f"{split}.safetensors")
    name = file.metadata.get("tokenizer", "gpt2")
    if name != tokenizer.name:
        raise UserError(
            f"{dataset.name}: {file.path} has tokens of the tokenizer {short_name(name)}, the first"
            f" dataset those of {short_name(tokenizer.name)}; prepare its text with that one"
        )
    last = file.read(max(file.num_tokens - 1, 0), file.num_tokens)
    if last.tolist() != [tokenizer.eot_token]:
        raise UserError(
            f"{dataset.name}: {file.path} does not end with an end-of-text token, so where its"
            " documents end is unknown; prepare their text instead"
        )
    return file


def _check_end(supplies: Sequence[Supply], split: str, limit: int) -> None:
    """Refuse a training split that ends early, and so leaves text out; warn of a validation split.

    The latter has few documents, whose lengths differ. Raises: UserError.
    """
    most_left = min(supplies, key=Supply.num_passes)
    left = 1 - most_left.num_passes()
    num_documents = sum(supply.counts.num_documents for supply in supplies)
    if num_documents == limit or left <= LEFT_OVER:
        return
    name = next(supply.dataset.name for supply in supplies if supply.num_ends)
    rest = f"{left:.0%} of {most_left.dataset.name}"
    if split == "validation":
        print_error(
            f"warning: the validation split ends with the text of {name}, and leaves {rest}"
        )
        return
    reached = int(num_documents / (1 - Fraction(str(VALIDATION_FRACTION))))
    raise UserError(
        f"{name}: too little text for its weight: all of it is used after {num_documents:,}"
        f" training documents of the mix, and {rest} is left; --max-documents {reached} ends"
        f" there, --repeat starts {name} over; or change the weights"
    )
