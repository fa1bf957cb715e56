"""Copy tokens from files of nanoGPT and llm.c."""

from pathlib import Path

import numpy as np

from basics.errors import UserError, writing_to
from preparation.card import Prepared, write_card
from preparation.journal import Journal, check_disk_space, check_output_dir
from preparation.sources import Request, without_links_out
from preparation.token_stream import Counts, TokenFileWriter, num_training_documents
from tokens.token_file import check_token_ids
from tokens.tokenizer import Tokenizer, choose_tokenizer

LLM_C_MAGIC, LLM_C_VERSION = 20240520, 1
LLM_C_HEADER = 256  # int32 values: magic, version, number of tokens, zeros
CHUNK_TOKENS = 2**24
VALIDATION_FRACTION = 0.01  # of a single file
Pieces = list[tuple[Path, int, int]]  # of files: the first token, and the end


def import_tokens(source: Path, output_dir: Path, tokenizer_choice: str) -> Prepared:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, llm.c's start with a header. The last tokens
    of a single file are for validation. Raises: UserError: files are missing, their sizes do not
    match their headers, or a token id is outside the tokenizer's vocabulary.
    """
    output_dir = check_output_dir(output_dir)
    tokenizer, title = choose_tokenizer(tokenizer_choice), source.resolve().name
    splits = _find(source)  # all are checked before anything is written
    dataset = Prepared(Request(source=title, title=title, tokenizer=tokenizer.name), {})
    with writing_to(output_dir):
        journal = Journal(output_dir)
        with journal.locked():  # an import is not resumed
            sizes = [stop - first for pieces in splits.values() for _, first, stop in pieces]
            check_disk_space(journal.dir, 2 * sum(sizes), "tokens")
            journal.begin(dataset.request, [], tokenizer)
            for split, pieces in splits.items():
                writer = TokenFileWriter(journal.dataset_dir / f"{split}.safetensors")
                dataset.splits[split], largest = _copy(pieces, writer, tokenizer, tokenizer_choice)
                metadata = dataset.metadata(split, largest)
                del metadata["revision"], metadata["num_text_bytes"]  # unknown
                names = ", ".join(path.name for path, _, _ in pieces)
                writer.finish(metadata | {"source": names[:400]})
            write_card(journal.dataset_dir, dataset)
            journal.publish()
    return dataset


def _find(source: Path) -> dict[str, Pieces]:
    """Return what each split is made of: val.bin, fineweb_val_000000.bin. Raises: UserError."""
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
        found[split] = [(path, 0, _read(path).size)
                        for path in sorted(without_links_out(named, source))]
        if not found[split]:
            raise UserError(f"{source}: no {name}.bin or *_{name}_*.bin; wanted the token files of"
                            " nanoGPT or llm.c")
    return found


def _read(path: Path) -> np.ndarray:
    """Map the tokens of a file into memory. Raises: UserError, OSError."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=min(LLM_C_HEADER, size // 4))
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


def _copy(pieces: Pieces, writer: TokenFileWriter, tokenizer: Tokenizer,
          choice: str) -> tuple[Counts, int]:
    """Write tokens; return how many there are, and the largest id. Raises: UserError."""
    num_documents = num_tokens = largest = 0
    for path, first, stop in pieces:
        mapped = _read(path)  # one at a time: each file that is mapped into memory is an open one
        for start in range(first, stop, CHUNK_TOKENS):
            tokens = mapped[start:min(start + CHUNK_TOKENS, stop)]
            check_token_ids(tokens, path, first=start, vocab_size=tokenizer.n_vocab,
                            advice=f"name another tokenizer than --tokenizer {choice}")
            writer.add(tokens)
            num_documents += int(np.count_nonzero(tokens == tokenizer.eot_token))
            num_tokens += tokens.size
            largest = max(largest, int(tokens.max()))
    return Counts(num_documents, num_tokens), largest
