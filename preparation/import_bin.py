"""Copy tokens from files of nanoGPT and llm.c."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from basics.errors import UserError, cannot_be_written
from basics.files import write_atomically
from preparation.card import write_card
from preparation.journal import Journal, Origin, Progress, Request, SplitCount, check_output_dir
from preparation.sources import without_links_out
from preparation.token_stream import TokenFileWriter, num_training_documents
from tokens.tokenizer import Tokenizer, choose_tokenizer, file_beside

LLM_C_MAGIC, LLM_C_VERSION = 20240520, 1
LLM_C_HEADER = 256  # int32 values: magic, version, number of tokens, zeros
CHUNK_TOKENS = 2**24
VALIDATION_FRACTION = 0.01  # of a single file


def import_tokens(source: Path, output_dir: Path, tokenizer_choice: str) -> Progress:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, llm.c's start with a header.

    Args:
        source: a directory, or one file, whose last tokens are for validation.

    Raises:
        UserError: files are missing, their sizes do not match their headers, or a token id is
            outside the tokenizer's vocabulary.
    """
    output_dir = check_output_dir(output_dir)
    chosen = choose_tokenizer(tokenizer_choice)
    tokenizer = chosen.load()
    parts = _find(source)  # all are checked before anything is written
    try:
        journal = Journal(output_dir)
        with journal.locked():  # an import is not resumed
            journal.begin_anew(2 * sum(stop - first for files in parts.values()
                                       for _, first, stop in files))
            counts = {}
            for split, files in parts.items():
                writer = TokenFileWriter(journal.dataset_dir / f"{split}.safetensors")
                counts[split] = _copy(files, writer, tokenizer, tokenizer_choice)
                names = ", ".join(path.name for path, _, _ in files)
                writer.finish(counts[split].metadata() | {
                    "tokenizer": chosen.name, "source": names[:400]})
            if path := file_beside(journal.dataset_dir, chosen.name):
                write_atomically(path, chosen.content, durable=True)
            progress, title = Progress(**counts), source.resolve().name
            write_card(journal.dataset_dir, Origin(title=title),
                       Request(source=title, tokenizer=chosen.name), progress)
            journal.publish()
    except OSError as error:
        raise cannot_be_written(output_dir, error) from None
    return progress


def _find(source: Path) -> dict[str, list[tuple[Path, int, int]]]:
    """Return the files of each split, with the places of the first token and of the end.

    They are named such as val.bin or fineweb_val_000000.bin. Raises: UserError.
    """
    folder = source.parent if source.is_file() else source
    if (folder / "meta.pkl").exists():
        raise UserError(f"{folder}: meta.pkl defines another vocabulary than that of --tokenizer;"
                        " prepare the original text instead")
    if source.is_file():
        num_tokens = _read(source).size
        if num_tokens < 2:
            raise UserError(f"{source}: has one token; wanted two or more, for training and"
                            " validation")
        cut = num_training_documents(num_tokens, VALIDATION_FRACTION)
        return {"train": [(source, 0, cut)], "validation": [(source, cut, num_tokens)]}
    found = {}
    for split, name in (("train", "train"), ("validation", "val")):
        named = (path for path in source.glob("*.bin")
                 if name in path.stem.replace("-", "_").split("_"))
        paths = sorted(without_links_out(named, source))
        if not paths:
            raise UserError(f"{source}: no {name}.bin or *_{name}_*.bin; wanted the token files of"
                            " nanoGPT or llm.c")
        found[split] = [(path, 0, _read(path).size) for path in paths]
    return found


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


def _copy(files: Sequence[tuple[Path, int, int]], writer: TokenFileWriter, tokenizer: Tokenizer,
          choice: str) -> SplitCount:
    count = SplitCount()
    for path, first, stop in files:
        mapped = _read(path)  # one at a time: each file that is mapped into memory is an open one
        for start in range(first, stop, CHUNK_TOKENS):
            tokens = mapped[start:min(start + CHUNK_TOKENS, stop)]
            largest = int(tokens.max())
            if largest >= tokenizer.n_vocab:
                offset = int(np.argmax(tokens >= tokenizer.n_vocab))
                raise UserError(f"{path}: token {start + offset} has id {tokens[offset]},"
                                f" outside the vocabulary of --tokenizer {choice}"
                                f" ({tokenizer.n_vocab}); name the right tokenizer")
            writer.add(tokens)
            count += SplitCount(
                num_documents=int(np.count_nonzero(tokens == tokenizer.eot_token)),
                num_tokens=tokens.size, max_token_id=largest)
    return count
