"""Copy tokens: from files of nanoGPT and llm.c, or from prepared datasets to a mix of them."""

from collections.abc import Iterable, Iterator, Sequence
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from basics.errors import UserError, cannot_be_written
from basics.files import write_atomically
from preparation.card import write_card
from preparation.journal import (
    Journal,
    Origin,
    Progress,
    Request,
    SplitCount,
    check_disk_space,
    check_output_dir,
)
from preparation.sources import without_links_out
from preparation.token_stream import TokenFileWriter, num_training_documents
from tokens.token_file import TokenFile
from tokens.tokenizer import Tokenizer, choose_tokenizer, file_beside

LLM_C_MAGIC, LLM_C_VERSION = 20240520, 1
LLM_C_HEADER = 256  # int32 values: magic, version, number of tokens, zeros
CHUNK_TOKENS = 2**24
CHUNK_DOCUMENTS = 2**12  # of a mix
VALIDATION_FRACTION = 0.01  # of a single file
NAMES = {"train": "train", "validation": "val"}  # in the names of files


class Chunk(NamedTuple):
    """Tokens of a file, (n,) uint16, and the place of the first one."""

    path: Path
    first: int
    tokens: np.ndarray


class Tokens(NamedTuple):
    """What becomes one token file."""

    chunks: Iterable[Chunk]
    num_bytes: float
    origin: str  # for the metadata


def import_tokens(sources: Sequence[Path], output_dir: Path, tokenizer_choice: str,
                  shares: Sequence[float] = ()) -> Progress:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, llm.c's start with a header.

    Args:
        sources: one directory, or one file, whose last tokens are for validation; with shares
            prepared datasets, one for each share of the tokens.

    Raises:
        UserError: files are missing, their sizes do not match their headers, or a token id is
            outside the tokenizer's vocabulary.
    """
    output_dir = check_output_dir(output_dir)
    chosen = choose_tokenizer(tokenizer_choice)
    tokenizer = chosen.load()
    found = {split: _of_datasets(sources, split, shares, chosen.name, tokenizer.eot_token)
             if shares else _of_files(sources[0], split) for split in NAMES}
    try:
        with Journal(output_dir) as journal:  # used as a lock: an import is not resumed
            journal.begin_anew()
            check_disk_space(journal.dir, sum(part.num_bytes for part in found.values()), "tokens")
            counts = {}
            for split, part in found.items():
                writer = TokenFileWriter(journal.dataset_dir / f"{split}.safetensors")
                counts[split] = _write(part.chunks, writer, tokenizer, tokenizer_choice)
                writer.finish(counts[split].metadata() | {
                    "tokenizer": chosen.name, "source": part.origin[:400]})
            if path := file_beside(journal.dataset_dir, chosen.name):
                write_atomically(path, chosen.content, durable=True)
            progress = Progress(**counts)
            title = " and ".join(source.resolve().name for source in sources)
            write_card(journal.dataset_dir,
                       Origin(title=title, licence="unknown", languages=["en"]),
                       Request(source=title, tokenizer=chosen.name), progress)
            journal.publish(output_dir)
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    return progress


def _of_datasets(sources: Sequence[Path], split: str, shares: Sequence[float], tokenizer: str,
                 end_of_text: int) -> Tokens:
    files = [TokenFile(source / f"{split}.safetensors") for source in sources]
    sizes = [2 * file.num_tokens for file in files]
    return Tokens(_mixed(files, shares, tokenizer, end_of_text),
                  sum(shares) * min(map(truediv, sizes, shares)),
                  ", ".join(f"{file.path.parent.name} {share:g}"
                            for file, share in zip(files, shares, strict=True)))


def _of_files(source: Path, split: str) -> Tokens:
    """Find files such as val.bin or fineweb_val_000000.bin, or the part of a single file."""
    folder, name = source.parent if source.is_file() else source, NAMES[split]
    if (folder / "meta.pkl").exists():
        raise UserError(f"{folder}: meta.pkl defines another vocabulary than that of --tokenizer;"
                        " prepare the original text instead")
    if source.is_file():
        tokens = _read(source)
        cut = num_training_documents(tokens.size, VALIDATION_FRACTION)
        chunk = (Chunk(source, 0, tokens[:cut]) if split == "train" else
                 Chunk(source, cut, tokens[cut:]))
        return Tokens([chunk], chunk.tokens.nbytes, source.name)
    named = (path for path in source.glob("*.bin")
             if name in path.stem.replace("-", "_").split("_"))
    paths = sorted(without_links_out(named, source))
    if not paths:
        raise UserError(f"{source}: no {name}.bin or *_{name}_*.bin; wanted the token files of"
                        " nanoGPT or llm.c")
    num_bytes = sum(_read(path).nbytes for path in paths)  # checks all before anything is written
    # One at a time: each file that is mapped into memory is an open one.
    return Tokens((Chunk(path, 0, _read(path)) for path in paths), num_bytes,
                  ", ".join(path.name for path in paths))


def _read(path: Path) -> np.ndarray:
    """Map the tokens of a file into memory. Raises: UserError."""
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=min(LLM_C_HEADER, size // 4))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    start, num_tokens = 0, size // 2
    if header.size == LLM_C_HEADER and header[0] == LLM_C_MAGIC:
        start, num_tokens = 4 * LLM_C_HEADER, int(header[2])
        if header[1] != LLM_C_VERSION:
            raise UserError(f"{path}: version {header[1]} of llm.c's format; wanted version"
                            f" {LLM_C_VERSION}, with 16-bit tokens")
    if not num_tokens or size != start + 2 * num_tokens:
        raise UserError(f"{path}: {size} bytes; wanted {start + 2 * num_tokens} for {num_tokens}"
                        " tokens; it is damaged or in another format: replace it")
    return np.memmap(path, dtype="<u2", mode="r", offset=start)


def _write(chunks: Iterable[Chunk], writer: TokenFileWriter, tokenizer: Tokenizer,
           choice: str) -> SplitCount:
    count = SplitCount()
    for path, first, tokens in _smaller(chunks):
        if int(tokens.max(initial=0)) >= tokenizer.n_vocab:
            offset = int(np.argmax(tokens >= tokenizer.n_vocab))
            raise UserError(f"{path}: token {first + offset} has id {tokens[offset]},"
                            f" outside the vocabulary of --tokenizer {choice}"
                            f" ({tokenizer.n_vocab}); name the right tokenizer")
        writer.add(tokens)
        count = count.with_more(
            tokens, num_documents=int(np.count_nonzero(tokens == tokenizer.eot_token)))
    return count


def _smaller(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for path, place, tokens in chunks:
        for first in range(0, tokens.size, CHUNK_TOKENS):
            yield Chunk(path, place + first, tokens[first:first + CHUNK_TOKENS])


def _mixed(files: list[TokenFile], shares: Sequence[float], tokenizer: str,
           end_of_text: int) -> Iterator[Chunk]:
    """Yield documents in turn until one dataset has no more. Raises: UserError.

    A document comes where the position of its end in its dataset, divided by the share, puts it.
    """
    for file in files:
        if (name := file.metadata.get("tokenizer", tokenizer)) != tokenizer:
            raise UserError(f"{file.path}: its tokenizer is {name}; set --tokenizer to that of all"
                            " SOURCEs")
    ends = [np.concatenate([
        first + 1 + np.flatnonzero(file.read(first, min(first + CHUNK_TOKENS, file.num_tokens))
                                   == end_of_text)
        for first in range(0, file.num_tokens or 1, CHUNK_TOKENS)]) for file in files]
    for file, end in zip(files, ends, strict=True):
        if not end.size:
            raise UserError(f"{file.path}: no token ends a document; prepare it from its text")
    places = [end / share for end, share in zip(ends, shares, strict=True)]
    last = min(place[-1] for place in places)
    documents = np.concatenate([
        np.stack([np.full(end.size, number), np.append(0, end[:-1]), end], axis=1)
        [place <= last] for number, (end, place) in enumerate(zip(ends, places, strict=True))])
    order = np.argsort(np.concatenate([place[place <= last] for place in places]), kind="stable")
    for first in range(0, order.size, CHUNK_DOCUMENTS):
        yield Chunk(Path("the mix"), 0, np.concatenate([
            files[number].read(start, stop)
            for number, start, stop in documents[order[first:first + CHUNK_DOCUMENTS]].tolist()]))
