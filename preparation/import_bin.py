"""Copy tokens from files of nanoGPT, llm.c and datatrove, and from NumPy's .npy files."""

import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from basics.errors import UserError, one_line, print_error, writing_to
from basics.files import read_regular_file
from preparation.card import Prepared, write_card
from preparation.journal import Journal, check_disk_space
from preparation.sources import Request
from preparation.text_files import IS_POINTER, LFS_POINTER, leads_out
from preparation.token_stream import Counts, TokenFileWriter, num_training_documents
from settings.data import token_file_name
from tokens.token_file import check_token_ids
from tokens.tokenizer import Tokenizer, choose_tokenizer, short_name

# Files of llm.c begin with 256 int32 values: a magic number, a version, for tokens their number.
LLM_C_HEADER = 256
LLM_C_TOKENS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # those of GPT-2 and of Llama 3
LLM_C_MAGIC = range(20240101, 20250101)  # dates: of tokens, models, states, questions
NPY_MAGIC = b"\x93NUMPY"
UNKNOWN_TOKENIZER = "Unknown Tokenizer"  # in the metadata of datatrove
# Of a file without a header, the first numbers tell how wide its tokens are.
SEEN_NUMBERS = 2**20
LEAST_NUMBERS = 64
CHUNK_TOKENS = 2**24
VALIDATION_FRACTION = 0.01  # of a single file
Pieces = list[tuple[Path, int, int]]  # of files: the first token, and the end


def import_tokens(
    source: Path, output_dir: Path, tokenizer_choice: str, *, replace: bool = False
) -> Prepared:
    """Write both token files from the files named train and val, in the order of their names.

    nanoGPT's files contain nothing but uint16 tokens, those of llm.c and NumPy start with a header.
    The last tokens of a single file are for validation, and the last documents of datatrove's.

    Raises: UserError: files are missing, their sizes do not match their headers, their tokens are
    wider than their headers say, or a token id is outside the tokenizer's vocabulary.
    """
    journal = Journal(output_dir, replace=replace)
    tokenizer = choose_tokenizer(tokenizer_choice)
    title = source.resolve().name
    splits = _find(source, tokenizer)  # all are checked before anything is written
    dataset = Prepared(Request(source=title, title=title, tokenizer=tokenizer.name), {})
    with writing_to(output_dir), journal.locked():  # an import is not resumed
        sizes = [stop - first for pieces in splits.values() for _, first, stop in pieces]
        check_disk_space(journal.dir, 2 * sum(sizes), "tokens")
        journal.begin(dataset.request, tokenizer)
        for split, pieces in splits.items():
            writer = TokenFileWriter(journal.dataset_dir / token_file_name(split))
            dataset.splits[split], largest = _copy(pieces, writer, tokenizer, tokenizer_choice)
            metadata = dataset.metadata(split, largest)
            del metadata["revision"], metadata["num_text_bytes"]  # unknown
            names = ", ".join(path.name for path, _, _ in pieces)
            writer.finish(metadata | {"source": names[:400]})
        write_card(journal.dataset_dir, dataset)
        journal.publish()
    return dataset


def _find(source: Path, tokenizer: Tokenizer) -> dict[str, Pieces]:
    """Return what each split is made of: val.bin, fineweb_val_000000.bin. Raises: UserError."""
    folder = source.parent if source.is_file() else source
    if of_datatrove := [source] if source.suffix == ".ds" else sorted(source.glob("*.ds")):
        return _divide(of_datatrove, tokenizer)
    if (folder / "meta.pkl").exists():
        raise UserError(
            f"{folder}: meta.pkl defines another vocabulary than that of --tokenizer;"
            " prepare the original text instead"
        )
    if source.is_file():
        num_tokens = _read(source).size
        if num_tokens < 2:
            raise UserError(
                f"{source}: has one token; wanted two or more, for training and validation"
            )
        cut = num_training_documents(num_tokens, VALIDATION_FRACTION)
        return {"train": [(source, 0, cut)], "validation": [(source, cut, num_tokens)]}
    found = {}
    for split, name in (("train", "train"), ("validation", "val")):
        paths = []
        for path in sorted(source.iterdir()):
            if path.suffix not in (".bin", ".npy") or name not in re.split("[-_]", path.stem):
                continue
            if leads_out(path, source):
                print_error(one_line(f"warning: {path}: leads out of the directory: skipped"))
            else:
                paths.append(path)
        if len({path.suffix for path in paths}) > 1:  # perhaps the same tokens twice
            raise UserError(f"{source}: has .bin and .npy files of {split}; move some away")
        found[split] = [(path, 0, _read(path).size) for path in paths]
        if not paths:
            raise UserError(
                f"{source}: no {name}.bin or *_{name}_*.bin; wanted the token files of"
                " nanoGPT or llm.c, or .npy files of such names"
            )
    return found


def _divide(paths: list[Path], tokenizer: Tokenizer) -> dict[str, Pieces]:
    """Return what each split is made of, the last documents for validation.

    Raises: UserError: the files have other tokens than the tokenizer's, or no ends of documents.
    """
    ends = {path: _ends_of_documents(path, tokenizer) for path in paths if not _is_empty(path)}
    num_documents = sum(map(len, ends.values()))
    if num_documents < 2:
        raise UserError(f"{paths[0]}: {num_documents} documents; wanted at least 2")
    left = num_training_documents(num_documents, VALIDATION_FRACTION)
    splits: dict[str, Pieces] = {"train": [], "validation": []}
    for path, of_file in ends.items():
        num_train = min(left, len(of_file))
        left -= num_train
        cut = int(of_file[num_train - 1]) if num_train else 0
        for split, first, stop in (("train", 0, cut), ("validation", cut, int(of_file[-1]))):
            if stop > first:
                splits[split].append((path, first, stop))
    return splits


def _ends_of_documents(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Return where the documents of a datatrove file end, (n,) uint64. Raises: UserError."""
    ends = _index_of(path)
    tokens = _read(path)
    name = UNKNOWN_TOKENIZER
    with suppress(FileNotFoundError):  # it can be left out
        name = read_regular_file(path.with_name(f"{path.name}.metadata")).split("|")[0]
    is_gpt2 = Path(name).name == "gpt2"
    if name != UNKNOWN_TOKENIZER and is_gpt2 != (tokenizer.name == "gpt2"):
        raise UserError(
            f"{path}: has tokens of the tokenizer {name[-80:]}, not of"
            f" {short_name(tokenizer.name)}; name its tokenizer with --tokenizer"
        )
    if int(tokens[ends[0] - 1]) != tokenizer.eot_token:
        raise UserError(
            f"{path}: its documents do not end with the end-of-text token of"
            f" {short_name(tokenizer.name)}; give DocumentTokenizer an eos_token"
        )
    return ends


def _is_empty(path: Path) -> bool:
    """Return whether a datatrove file is that of a task without documents, which has an index."""
    index = path.with_name(f"{path.name}.index")
    return index.exists() and not index.stat().st_size and not path.stat().st_size


def _index_of(path: Path) -> np.ndarray:
    """Read the index of a datatrove file. Raises: UserError: there is none, or it is damaged."""
    index = path.with_name(f"{path.name}.index")
    if not index.exists():
        raise UserError(f"{index}: no such file; it tells where the documents of {path.name} end")
    ends = np.fromfile(index, dtype="<u8")
    if not ends.size or not ends[0] or (ends[1:] < ends[:-1]).any():
        raise UserError(f"{index}: is damaged: the ends of documents do not grow; replace it")
    return ends


def _read(path: Path) -> np.ndarray:
    """Map the tokens of a file into memory, (num_tokens,) of an integer type.

    Raises: UserError: it is damaged, or does not hold tokens; OSError.
    """
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=min(LLM_C_HEADER, size // 4))
    magic, version = header[:2].tolist() if header.size == LLM_C_HEADER else (0, 0)
    if header.tobytes().startswith(LFS_POINTER):
        raise UserError(f"{path}: {IS_POINTER}")
    if path.suffix == ".npy" or header[:2].tobytes().startswith(NPY_MAGIC):
        return _read_npy(path)
    start = 0  # of the tokens, in bytes
    kind = "<u2"
    num_tokens = size // 2
    if magic in LLM_C_MAGIC:
        if (magic, version) not in LLM_C_TOKENS:
            known = " or ".join(f"{magic} version {version}" for magic, version in LLM_C_TOKENS)
            raise UserError(
                f"{path}: is of llm.c's format {magic} version {version}; wanted tokens, whose"
                f" format is {known}"
            )
        kind = LLM_C_TOKENS[magic, version]
        start = 4 * LLM_C_HEADER
        num_tokens = int(header[2])
    if path.suffix == ".ds":
        num_tokens = int(_index_of(path)[-1])
        kind = "<u4" if size == 4 * num_tokens else "<u2"
    wanted = start + np.dtype(kind).itemsize * num_tokens
    if num_tokens < 1 or size != wanted:
        raise UserError(
            f"{path}: {size} bytes; wanted {wanted} for {num_tokens} tokens; it is"
            " damaged or in another format: replace it"
        )
    tokens = np.memmap(path, dtype=kind, mode="r", offset=start)
    if path.suffix != ".ds" and not start:
        _check_width(tokens, path)
    return tokens


def _read_npy(path: Path) -> np.ndarray:
    """Map the tokens of a .npy file into memory. Raises: UserError: it holds something else."""
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")  # refuses all else, and pickles
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a whole .npy file: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not tokens.size:
        raise UserError(
            f"{path}: holds {tokens.dtype} of shape {tokens.shape}; wanted a vector of integers"
        )
    return tokens.view(tokens.dtype.str.replace("i", "u"))  # an id below 0 is a large one then


def _check_width(numbers: np.ndarray, path: Path) -> None:
    """Refuse tokens of 32 or 64 bits in a file without a header, read as (N,) uint16.

    Their upper halves are 0 or small, but not their lower ones. Raises: UserError.
    """
    num_seen = min(SEEN_NUMBERS, len(numbers) // 2 * 2)
    lower, upper = numbers[:num_seen].reshape(-1, 2).T
    if num_seen >= LEAST_NUMBERS and upper.max() < 16 <= lower.max():
        bits = 32 if lower[1::2].any() else 64
        raise UserError(
            f"{path}: looks like {bits}-bit tokens (every second 16-bit number is small); convert"
            f" it: np.save('{path.stem}', np.fromfile('{path.name}', np.uint{bits}))"
        )


def _copy(
    pieces: Pieces, writer: TokenFileWriter, tokenizer: Tokenizer, choice: str
) -> tuple[Counts, int]:
    """Write tokens; return how many there are, and the largest id. Raises: UserError."""
    num_documents = num_tokens = largest = 0
    for path, first, stop in pieces:
        mapped = _read(path)  # one at a time: each file that is mapped into memory is an open one
        for start in range(first, stop, CHUNK_TOKENS):
            tokens = mapped[start : min(start + CHUNK_TOKENS, stop)]
            check_token_ids(
                tokens,
                path,
                first=start,
                vocab_size=tokenizer.n_vocab,
                advice=f"name another tokenizer than --tokenizer {choice}",
            )
            writer.add(tokens)  # as 16 bits
            num_documents += int(np.count_nonzero(tokens == tokenizer.eot_token))
            num_tokens += tokens.size
            largest = max(largest, int(tokens.max()))
    return Counts(num_documents, num_tokens), largest
