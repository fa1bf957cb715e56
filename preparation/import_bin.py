"""Convert token files of nanoGPT and llm.c."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from basics.errors import UserError, cannot_be_written
from basics.files import write_atomically
from preparation.dataset_card import write_import_card
from preparation.documents import without_links_out
from preparation.journal import Journal, Progress, SplitCount
from preparation.planning import check_disk_space, check_output_dir
from preparation.token_file_writer import TokenFileWriter
from tokens.tokenizer import ChosenTokenizer, choose_tokenizer, file_beside

LLM_C_MAGIC, LLM_C_VERSION = 20240520, 1
LLM_C_HEADER = 256  # int32 values: magic, version, number of tokens, zeros
CHUNK_TOKENS = 2**24


def import_tokens(source: Path, output_dir: Path, tokenizer_choice: str) -> Progress:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, llm.c's start with a header.

    Raises:
        UserError: files are missing, their sizes do not match their headers, or a token id is
            outside the tokenizer's vocabulary.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer = choose_tokenizer(tokenizer_choice)
    paths = {"train": _files(source, "train"), "validation": _files(source, "val")}
    if (source / "meta.pkl").exists():
        raise UserError(f"{source}: meta.pkl defines another vocabulary, so the tokens are not"
                        f" those of {tokenizer_choice}; prepare the original text instead")
    num_bytes = sum(path.stat().st_size for split in paths.values() for path in split
                    if path.exists())
    try:
        with Journal(output_dir) as journal:  # used as a lock: an import is not resumed
            journal.begin_anew()
            check_disk_space(journal.dir, num_bytes, "tokens")
            counts = {split: _import_split(paths[split],
                                           journal.dataset_dir / f"{split}.safetensors",
                                           tokenizer, tokenizer_choice) for split in paths}
            if path := file_beside(journal.dataset_dir, tokenizer.name):
                write_atomically(path, tokenizer.content, durable=True)
            progress = Progress(**counts)
            write_import_card(journal.dataset_dir, source, tokenizer.name, progress)
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
                  choice: str) -> SplitCount:
    loaded = tokenizer.load()
    vocab_size, end_of_text = loaded.n_vocab, loaded.eot_token
    count = SplitCount()
    writer = TokenFileWriter(output)
    try:
        for path in paths:
            for first, tokens in _chunks(path):
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
            "source": ", ".join(path.name for path in paths)[:400],
        })
    finally:
        writer.close()
    return count


def _chunks(path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """Read a file's tokens in chunks, each with the index of its first token. Raises: UserError."""
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
            yield first, np.fromfile(file, dtype="<u2", count=min(CHUNK_TOKENS, num_tokens - first))
