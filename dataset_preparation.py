"""Documents to a token dataset: a pair of safetensors files that appear only when whole."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import tiktoken
from tqdm import tqdm

from documents import DocumentSource, python_stdlib
from run_config import UserError
from token_dataset import SPLITS, fetch_dataset, is_complete
from tokenizer import load_tokenizer

STDLIB_DATASET = "python-stdlib"  # text that every machine has: prepared where it is first used
TRAIN_SHARE = 0.99
HEADER_BYTES = 4096  # room for the safetensors header, which is known only at the end


@dataclass(frozen=True)
class PreparedSplit:
    """What was written into one token file."""

    name: str
    num_documents: int
    num_tokens: int


class TokenFileWriter:
    """Stream tokens into a safetensors file that could not be held in memory.

    The header is written last, into space left for it, so a file cut short is never valid.
    """

    def __init__(self, path: Path, *, tokenizer: tiktoken.Encoding, source: str) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._source = source
        self._num_tokens = 0
        self._num_documents = 0
        self._max_token_id = 0

    def __enter__(self) -> TokenFileWriter:
        self._file = self.path.open("xb")
        self._file.seek(8 + HEADER_BYTES)
        return self

    def add(self, document: str) -> None:
        """Append one document and an end-of-text token."""
        # Without special tokens, so that a literal <|endoftext|> in a document stays text.
        ids = self._tokenizer.encode_to_numpy(document, disallowed_special=())
        tokens = np.append(ids, self._tokenizer.eot_token).astype(np.uint16)
        self._file.write(tokens.tobytes())
        self._num_documents += 1
        self._num_tokens += tokens.size
        self._max_token_id = max(self._max_token_id, int(tokens.max()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._file.seek(0)
            self._file.write(self._header())
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def result(self) -> PreparedSplit:
        return PreparedSplit(self.path.stem, self._num_documents, self._num_tokens)

    def _header(self) -> bytes:
        """Source: the safetensors format, a length, JSON padded with blanks, then the data."""
        description = {
            "__metadata__": {
                "tokenizer": self._tokenizer.name,
                "source": self._source[:1000],
                "num_documents": str(self._num_documents),
                "num_tokens": str(self._num_tokens),
                "max_token_id": str(self._max_token_id),
            },
            "tokens": {
                "dtype": "U16",
                "shape": [self._num_tokens],
                "data_offsets": [0, 2 * self._num_tokens],
            },
        }
        header = json.dumps(description).encode()
        return struct.pack("<Q", HEADER_BYTES) + header.ljust(HEADER_BYTES)


def prepare_dataset(
    source: DocumentSource, output_dir: Path, *, tokenizer_name: str
) -> list[PreparedSplit]:
    """Tokenise documents: the first 99% for training, the rest for validation.

    Everything is written beside `output_dir` and takes that name when it is whole.

    Raises:
        UserError: `output_dir` holds something already, or the source cannot be used.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"{output_dir}: is not empty; name another output, or remove it yourself")
    tokenizer = load_tokenizer(tokenizer_name)
    if source.num_documents < 2:
        raise UserError(f"{source.name}: {source.num_documents} document in all; wanted at least"
                        " 2, for training and validation (.jsonl holds one a line)")
    num_train = min(max(round(source.num_documents * TRAIN_SHARE), 1), source.num_documents - 1)
    sizes = (num_train, source.num_documents - num_train)
    partial_dir = output_dir.parent / f".{output_dir.name}.partial-{os.getpid()}"
    try:
        partial_dir.mkdir(parents=True)
        with tqdm(source.documents, total=source.num_documents, unit=" documents",
                  desc=source.name, disable=None) as bar:
            documents = iter(bar)
            splits = [
                _write_split(itertools.islice(documents, size), partial_dir / f"{name}.safetensors",
                             tokenizer=tokenizer, source=source.name)
                for name, size in zip(SPLITS, sizes, strict=True)
            ]
        _publish(partial_dir, output_dir)
    except OSError as error:
        raise UserError(f"{output_dir}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)
    return splits


def provide_dataset(dataset_dir: Path, name: str) -> None:
    """Make sure that a dataset is on this machine. One process of each node.

    Raises:
        UserError: there is none, and it can be neither made nor fetched.
    """
    if is_complete(dataset_dir):
        return
    if name == STDLIB_DATASET:
        prepare_dataset(python_stdlib(), dataset_dir, tokenizer_name="bytes")
    elif "/" in name:
        fetch_dataset(dataset_dir, name)
    else:
        raise UserError(f"{dataset_dir}: no dataset there; make it with prepare_dataset.py SOURCE"
                        f" {dataset_dir}, or name one on the hub as owner/name in train.json")


def _write_split(documents: Iterable[str], path: Path, *, tokenizer: tiktoken.Encoding,
                 source: str) -> PreparedSplit:
    with TokenFileWriter(path, tokenizer=tokenizer, source=source) as writer:
        for document in documents:
            writer.add(document)
    return writer.result()


def _publish(partial_dir: Path, output_dir: Path) -> None:
    try:
        partial_dir.rename(output_dir)  # takes the place of an empty directory, never of a full one
    except OSError:
        if not is_complete(output_dir):  # else another process was first, with the same result
            raise
