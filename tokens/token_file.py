"""Read a token file: one uint16 vector in a safetensors file. Needs no torch."""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from basics.errors import UserError, first_line

FINGERPRINT_TOKENS = 2**11  # in each of the 64 samples of a fingerprint


class TokenFile:
    """One safetensors file that holds one uint16 vector, `tokens`, read slice by slice.

    The file is memory-mapped: many processes can share one of any size. Raises: UserError: it is
    missing, damaged, or of another layout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="numpy")
            keys = list(self._file.keys())
            self.metadata: dict[str, str] = self._file.metadata() or {}
        except FileNotFoundError:
            raise UserError(
                f"{path}: no such token file; prepare or download the dataset"
            ) from None
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: not a whole safetensors file ({first_line(error)}); delete it"
                " and prepare or download the dataset again"
            ) from None
        if keys != ["tokens"]:
            raise UserError(
                f"{path}: contains {', '.join(keys)[:60] or 'nothing'}; wanted one"
                " tensor called tokens"
            )
        self._tokens = self._file.get_slice("tokens")
        dtype, shape = self._tokens.get_dtype(), self._tokens.get_shape()
        if dtype != "U16" or len(shape) != 1:
            raise UserError(f"{path}: tokens is {dtype} of shape {shape}; wanted a U16 vector")
        self.num_tokens: int = shape[0]

    @property
    def bytes_per_token(self) -> float | None:
        """The mean bytes of text of a token, as the metadata tells it; None if it does not."""
        num_bytes = self.metadata.get("num_text_bytes", "")
        is_known = num_bytes.isdecimal() and len(num_bytes) < 16 and self.num_tokens
        return int(num_bytes) / self.num_tokens if is_known else None

    def fingerprint(self) -> str:
        """Identify the file by its length, its metadata and 64 samples of its tokens."""
        facts = json.dumps([self.num_tokens, self.metadata], sort_keys=True)
        digest = hashlib.blake2b(facts.encode(), digest_size=16)
        for first in np.linspace(0, max(0, self.num_tokens - FINGERPRINT_TOKENS), 64, dtype=int):
            stop = min(int(first) + FINGERPRINT_TOKENS, self.num_tokens)
            digest.update(self.read(int(first), stop).tobytes())
        return f"{self.num_tokens} tokens, {digest.hexdigest()}"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy tokens `start` to `stop` (not included) out of the file: (stop - start,) uint16."""
        return self._tokens[start:stop]


def check_token_ids(
    tokens: np.ndarray,
    path: Path,
    *,
    first: int,
    vocab_size: int,
    advice: str = "use the tokenizer's vocab_size in model.json",
) -> None:
    """Check that ids are inside a vocabulary; `first` is the position of tokens[0] in the file.

    Raises: UserError: one is outside; names the first one and its position.
    """
    if tokens.size and int(tokens.max()) >= vocab_size:
        offset = int(np.argmax(tokens >= vocab_size))
        raise UserError(
            f"{path}: token {first + offset} has id {tokens[offset]}, outside the"
            f" vocabulary of {vocab_size:,}; {advice}"
        )
