"""Write a token file in a stream; the header is written last, so a partial file is never valid."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np

from basics.files import fsync

HEADER_BYTES = 4096  # reserved for the safetensors header, which is known only at the end
DATA_START = 8 + HEADER_BYTES


class TokenFileWriter:
    """Stream uint16 tokens into a safetensors file that does not fit in memory.

    Args:
        num_tokens: tokens of an earlier launch to keep; the file is truncated after them.
    """

    def __init__(self, path: Path, *, num_tokens: int = 0) -> None:
        self.path = path
        self._file = path.open("r+b" if num_tokens else "wb")
        self.truncate(num_tokens)

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) uint16."""
        self._file.write(tokens.astype("<u2", copy=False).data)
        self.num_tokens += tokens.size

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first tokens, and overwrite the header with zeros."""
        self._file.truncate(DATA_START + 2 * num_tokens)
        self._file.seek(0)
        self._file.write(bytes(DATA_START))
        self._file.seek(0, os.SEEK_END)
        self.num_tokens = num_tokens

    def sync(self) -> None:
        """Write all tokens so far to the disk, with fsync."""
        self._file.flush()
        fsync(self.path)

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header and close the file."""
        self.sync()
        self._file.seek(0)
        self._file.write(token_file_header(metadata, self.num_tokens))
        self.sync()
        self.close()

    def close(self) -> None:
        self._file.close()


def token_file_header(metadata: dict[str, str], num_tokens: int) -> bytes:
    """Return the first DATA_START bytes of a token file.

    Source: the safetensors format: a length, JSON padded with blanks, then the data.

    Raises:
        ValueError: the metadata does not fit into the reserved bytes.
    """
    description = {
        "__metadata__": metadata,
        "tokens": {"dtype": "U16", "shape": [num_tokens], "data_offsets": [0, 2 * num_tokens]},
    }
    header = json.dumps(description, ensure_ascii=False).encode()
    if len(header) > HEADER_BYTES:
        raise ValueError(f"the header has {len(header)} bytes; at most {HEADER_BYTES} fit")
    return struct.pack("<Q", HEADER_BYTES) + header.ljust(HEADER_BYTES)
