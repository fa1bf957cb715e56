"""A token file as it grows: its header comes last, so that a file cut short is never valid."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np

HEADER_BYTES = 4096  # room for the safetensors header, which is known only at the end
DATA_START = 8 + HEADER_BYTES


class TokenFileWriter:
    """Stream uint16 tokens into a safetensors file that could not be held in memory.

    Args:
        num_tokens: of an earlier start, that are on disk and count; what lies behind them is cut
            off.
    """

    def __init__(self, path: Path, *, num_tokens: int = 0) -> None:
        self.path = path
        self._file = path.open("r+b" if num_tokens else "wb")
        self.cut_to(num_tokens)

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) uint16."""
        self._file.write(tokens.astype("<u2", copy=False).data)
        self.num_tokens += tokens.size

    def cut_to(self, num_tokens: int) -> None:
        """Forget all but the first tokens, and the header of an earlier start."""
        self._file.truncate(DATA_START + 2 * num_tokens)
        self._file.seek(0)
        self._file.write(bytes(DATA_START))
        self._file.seek(0, os.SEEK_END)
        self.num_tokens = num_tokens

    def flush(self) -> None:
        """Bring everything so far onto the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header, and close."""
        self.flush()
        self._file.seek(0)
        self._file.write(token_file_header(metadata, self.num_tokens))
        self.flush()
        self.close()

    def close(self) -> None:
        self._file.close()


def token_file_header(metadata: dict[str, str], num_tokens: int) -> bytes:
    """Give the first DATA_START bytes of a token file.

    Source: the safetensors format: a length, JSON padded with blanks, then the data.

    Raises:
        ValueError: the metadata needs more room than there is.
    """
    description = {
        "__metadata__": metadata,
        "tokens": {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]},
    }
    header = json.dumps(description, ensure_ascii=False).encode()
    if len(header) > HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes; there is room for {HEADER_BYTES}")
    return struct.pack("<Q", HEADER_BYTES) + header.ljust(HEADER_BYTES)
