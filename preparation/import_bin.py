"""Copy tokens: from files of nanoGPT and llm.c, or from prepared datasets to a mix of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import truediv
from pathlib import Path

import numpy as np

from basics.errors import UserError, cannot_be_written
from basics.files import write_atomically
from preparation.dataset_card import write_import_card
from preparation.documents import without_links_out
from preparation.journal import Journal, Progress, SplitCount
from preparation.planning import check_disk_space, check_output_dir
from preparation.token_file_writer import TokenFileWriter
from tokens.token_file import TokenFile
from tokens.tokenizer import ChosenTokenizer, choose_tokenizer, file_beside

LLM_C_MAGIC, LLM_C_VERSION = 20240520, 1
LLM_C_HEADER = 256  # int32 values: magic, version, number of tokens, zeros
CHUNK_TOKENS = 2**24
CHUNK_DOCUMENTS = 2**12  # of a mix


def import_tokens(sources: Sequence[Path], output_dir: Path, tokenizer_choice: str,
                  shares: Sequence[float] = ()) -> Progress:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, llm.c's start with a header.

    Args:
        sources: one directory; with shares prepared datasets, one for each share of the tokens.

    Raises:
        UserError: files are missing, their sizes do not match their headers, or a token id is
            outside the tokenizer's vocabulary.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = choose_tokenizer(tokenizer_choice)
    source, names = sources[0], {"train": "train", "validation": "val"}
    paths = {split: [source / f"{split}.safetensors" for source in sources] if shares
             else _files(source, name) for split, name in names.items()}
    if (source / "meta.pkl").exists():
        raise UserError(f"{source}: meta.pkl defines another vocabulary, so the tokens are not"
                        f" those of {tokenizer_choice}; prepare the original text instead")
    num_bytes = 0.0
    for found in paths.values():
        if shares:  # all are opened before anything is written
            sizes = [2 * TokenFile(path).num_tokens for path in found]
            num_bytes += sum(shares) * min(map(truediv, sizes, shares))
        else:
            num_bytes += sum(path.stat().st_size for path in found if path.exists())
    try:
        with Journal(output_dir) as journal:  # used as a lock: an import is not resumed
            journal.begin_anew()
            check_disk_space(journal.dir, num_bytes, "tokens")
            counts = {split: _import_split(paths[split],
                                           journal.dataset_dir / f"{split}.safetensors",
                                           tokenizer, tokenizer_choice, shares) for split in paths}
            if path := file_beside(journal.dataset_dir, tokenizer.name):
                write_atomically(path, tokenizer.content, durable=True)
            progress = Progress(**counts)
            title = Path(" and ".join(source.name for source in sources))
            write_import_card(journal.dataset_dir, title, tokenizer.name, progress)
            journal.publish(output_dir)
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    return progress


def _files(source: Path, split: str) -> list[Path]:
    """Find files such as val.bin or fineweb_val_000000.bin."""
    named = (path for path in source.glob("*.bin")
             if split in path.stem.replace("-", "_").split("_"))
    paths = sorted(without_links_out(named, source))
    if not paths:
        raise UserError(f"{source}: no {split}.bin or *_{split}_*.bin; wanted the token files of"
                        " nanoGPT or llm.c")
    return paths


def _import_split(paths: list[Path], output: Path, tokenizer: ChosenTokenizer,
                  choice: str, shares: Sequence[float]) -> SplitCount:
    loaded = tokenizer.load()
    vocab_size, end_of_text = loaded.n_vocab, loaded.eot_token
    count = SplitCount()
    writer = TokenFileWriter(output)
    try:
        chunks = (_mixed(paths, shares, tokenizer.name, end_of_text) if shares
                  else itertools.chain.from_iterable(map(_chunks, paths)))
        for path, first, tokens in chunks:
            largest = int(tokens.max(initial=0))
            if largest >= vocab_size:
                offset = int(np.argmax(tokens >= vocab_size))
                raise UserError(f"{path}: token {first + offset} has id {tokens[offset]},"
                                f" outside the vocabulary of --tokenizer {choice}"
                                f" ({vocab_size}); name the right tokenizer")
            writer.add(tokens)
            count = count.with_more(
                tokens, num_documents=int(np.count_nonzero(tokens == end_of_text)))
        writer.finish(count.metadata() | {
            "tokenizer": tokenizer.name,
            "source": ", ".join(
                f"{path.parent.name} {share:g}" if share else path.name
                for path, share in itertools.zip_longest(paths, shares))[:400],
        })
    finally:
        writer.close()
    return count


def _mixed(paths: list[Path], shares: Sequence[float], tokenizer: str,
           end_of_text: int) -> Iterator[tuple[Path, int, np.ndarray]]:
    """Yield documents in turn until one dataset has no more; as `_chunks`. Raises: UserError.

    A document comes where the position of its end in its dataset, divided by the share, puts it.
    """
    files = [TokenFile(path) for path in paths]
    for file in files:
        if (name := file.metadata.get("tokenizer", tokenizer)) != tokenizer:
            raise UserError(f"{file.path}: its tokenizer is {name}; set --tokenizer to that of all"
                            " SOURCEs")
    ends = [np.concatenate([
        first + 1 + np.flatnonzero(file.read(first, min(first + CHUNK_TOKENS, file.num_tokens))
                                   == end_of_text)
        for first in range(0, file.num_tokens or 1, CHUNK_TOKENS)]) for file in files]
    for path, end in zip(paths, ends, strict=True):
        if not end.size:
            raise UserError(f"{path}: no token ends a document; prepare it from its text")
    places = [end / share for end, share in zip(ends, shares, strict=True)]
    last = min(place[-1] for place in places)
    documents = np.concatenate([
        np.stack([np.full(end.size, number), np.append(0, end[:-1]), end], axis=1)
        [place <= last] for number, (end, place) in enumerate(zip(ends, places, strict=True))])
    order = np.argsort(np.concatenate([place[place <= last] for place in places]), kind="stable")
    for first in range(0, order.size, CHUNK_DOCUMENTS):
        yield Path("the mix"), 0, np.concatenate([
            files[number].read(start, stop)
            for number, start, stop in documents[order[first:first + CHUNK_DOCUMENTS]].tolist()])


def _chunks(path: Path) -> Iterator[tuple[Path, int, np.ndarray]]:
    """Yield a file's tokens, each chunk with the file and its first token. Raises: UserError."""
    try:
        size = path.stat().st_size
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    header = np.fromfile(path, dtype="<i4", count=min(LLM_C_HEADER, size // 4))
    start, num_tokens = 0, size // 2
    if header.size == LLM_C_HEADER and header[0] == LLM_C_MAGIC:
        start, num_tokens = 4 * LLM_C_HEADER, int(header[2])
        if header[1] != LLM_C_VERSION:
            raise UserError(f"{path}: version {header[1]} of llm.c's format; wanted version"
                            f" {LLM_C_VERSION}, with 16-bit tokens")
    if not size or size != start + 2 * num_tokens:
        raise UserError(f"{path}: {size} bytes; wanted {start + 2 * num_tokens} for {num_tokens}"
                        " tokens; it is damaged or in another format: replace it")
    with path.open("rb") as file:
        file.seek(start)
        for first in range(0, num_tokens, CHUNK_TOKENS):
            yield path, first, np.fromfile(file, dtype="<u2",
                                           count=min(CHUNK_TOKENS, num_tokens - first))
