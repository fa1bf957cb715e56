"""Small tokenizers for the tests: trained here, or written by hand."""

import json
from pathlib import Path
from typing import Any

from lab.tokenizer import train_tokenizer

TEXTS = ["the cat sat on the mat, and the hat", "naïve café, naïve 🎉🎉",
         "def f(x):\n    return x\n", "它是它的, 它是它的",
         "aaaa bbbb 1234 1234\n\n\t it's we'll"] * 3


def write_tokenizer(directory: Path, *, vocab_size: int = 300,
                    texts: list[str] | None = None, **changes: Any) -> Path:
    """Train a tokenizer and write its tokenizer.json, with some parts of it changed."""
    content, _ = train_tokenizer(texts or TEXTS, vocab_size=vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(content) | changes))
    return directory
