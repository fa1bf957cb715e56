"""Mix prepared datasets by weight: their documents are interleaved.

Training is mixed from their training files, validation from their validation files. So a dataset
that starts over never brings a validation document into training.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from basics.errors import UserError, writing_to
from basics.text import counted
from preparation.card import Portion, Prepared
from preparation.journal import Journal
from preparation.pipeline import write_headers
from preparation.sources import Request, printable
from preparation.token_stream import CHUNK_NUMBERS, Counts, TokenFileWriter, digest_of
from settings.data import SPLITS, token_file_name
from tokens.token_file import TokenFile
from tokens.tokenizer import Tokenizer, file_beside, load_tokenizer, short_name

MAX_DATASETS = 10  # each has an entry in the metadata of a token file, which have 4 KiB
DATASET = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,23})=(?P<path>.+)"
    r":(?P<weight>[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
)


class Weighted(NamedTuple):
    """A dataset of a mix, as the command line names it."""

    name: str
    path: str
    weight: str


def parse_mix(texts: Sequence[str]) -> list[Weighted]:
    """Read NAME=DATASET:WEIGHT of each dataset. Raises: UserError."""
    found: dict[str, Weighted] = {}
    for text in texts:
        parts = DATASET.fullmatch(text)
        if not parts or not float(parts["weight"]):
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
    datasets: Sequence[Weighted], output_dir: Path, *, repeat: bool, replace: bool = False
) -> Prepared:
    """Write a dataset of several ones, whose shares of its tokens are as their weights.

    After a kill it begins again. Raises: UserError: they are no datasets of one tokenizer.
    """
    journal = Journal(output_dir, replace=replace)
    for each in datasets:
        if Path(each.path).resolve() == journal.output.path:
            raise UserError(f"{output_dir}: is one of the datasets; name another output")
    tokenizer, files = _open(datasets)
    label = ", ".join(f"{each.name}={printable(each.path)}:{each.weight}" for each in datasets)
    title = "a mix of " + ", ".join(each.name for each in datasets)
    request = Request(source=label, title=title, tokenizer=tokenizer.name)
    dataset = Prepared(request, dict.fromkeys(SPLITS, Counts()))
    weights = [float(each.weight) for each in datasets]
    with writing_to(output_dir), journal.locked():
        journal.begin(request, tokenizer)
        validation: Counter[int] = Counter()  # digests of its documents, but empty ones
        for split in reversed(SPLITS):  # the training documents are looked for among the others
            found = [Counts()] * len(datasets)
            mixed = interleaved(files[split], weights, tokenizer.eot_token, repeat=repeat)
            with closing(TokenFileWriter(journal.dataset_dir / token_file_name(split))) as writer:
                for number, document in mixed:
                    writer.add(document)
                    found[number] += Counts(1, document.size)
                    if split == "train":
                        dataset.num_repeated += validation.pop(digest_of(document), 0)
                    elif document.size > 1:
                        validation[digest_of(document)] += 1
            dataset.splits[split] = sum(found, Counts())
            dataset.portions[split] = {
                each.name: Portion(each.weight, counts, counts.num_tokens / file.num_tokens)
                for each, counts, file in zip(datasets, found, files[split], strict=True)
            }
        write_headers(journal.dataset_dir, dataset)
        journal.publish()
    return dataset


def interleaved(
    files: Sequence[TokenFile], weights: Sequence[float], end_of_text: int, *, repeat: bool
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield documents, (n,) uint16, with the numbers of their files.

    The place of a document is the number of tokens before it in its file, divided by the file's
    weight, and documents follow in the order of their places. So no file ever has more than its
    share by more than one document. The end is where the first file ends; with `repeat` a file
    starts over, and the end is where each has been used whole.
    """
    ends = [file.num_tokens / weight for file, weight in zip(files, weights, strict=True)]
    end = max(ends) if repeat else min(ends)
    documents = [documents_of(file, end_of_text) for file in files]
    num_tokens = [0] * len(files)
    places = [0.0] * len(files)
    while min(places) < end:
        number = places.index(min(places))
        document = next(documents[number])
        yield number, document
        num_tokens[number] += document.size
        places[number] = num_tokens[number] / weights[number]


def documents_of(file: TokenFile, end_of_text: int) -> Iterator[np.ndarray]:
    """Yield the documents of a file, each with its end-of-text token, over and over."""
    rest = np.empty(0, dtype=np.uint16)
    for start in itertools.cycle(range(0, file.num_tokens, CHUNK_NUMBERS)):
        chunk = file.read(start, min(start + CHUNK_NUMBERS, file.num_tokens))
        tokens = np.concatenate([rest, chunk])
        *documents, rest = np.split(tokens, np.flatnonzero(tokens == end_of_text) + 1)
        yield from documents


def _open(datasets: Sequence[Weighted]) -> tuple[Tokenizer, dict[str, list[TokenFile]]]:
    """Return the tokenizer of the first dataset, and the token files of each split.

    Raises: UserError: one has another tokenizer, or no ends of documents.
    """
    files = {
        split: [TokenFile(Path(each.path) / token_file_name(split)) for each in datasets]
        for split in SPLITS
    }
    name = files["train"][0].metadata.get("tokenizer", "gpt2")
    tokenizer = load_tokenizer(name, file_beside(Path(datasets[0].path), name))
    for file in files["train"] + files["validation"]:
        last = file.read(max(file.num_tokens - 1, 0), file.num_tokens)
        of_file = file.metadata.get("tokenizer", "gpt2")
        if of_file != name or last.tolist() != [tokenizer.eot_token]:
            raise UserError(
                f"{file.path}: wanted documents in tokens of the first dataset's tokenizer"
                f" ({short_name(name)}), an end-of-text token last; it has tokens of"
                f" {short_name(of_file)}; prepare its text with that one"
            )
    return tokenizer, files
