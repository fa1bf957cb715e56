"""What a task becomes: tokens, and what is known of their documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from preparation.findings import Findings
from preparation.reading import BadFile
from preparation.token_stream import Counts
from tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """The result of a task: tokens, with an end-of-text token after each document."""

    tokens: np.ndarray  # (num_tokens,) uint16
    # Of each document that ends here, (num_documents,) int64: the bytes of this text up to its end,
    # and the characters that stand for bytes that were not in its encoding.
    ends: np.ndarray
    replaced: np.ndarray
    findings: Findings
    num_text_bytes: int = 0
    bad_files: Sequence[BadFile] = ()
    markers: frozenset[str] = frozenset()  # of the end of a text, that are in the texts

    @property
    def counts(self) -> Counts:  # a document counts where it ends
        return Counts(len(self.ends), self.tokens.size, self.num_text_bytes)

    def first_documents(self, num_documents: int, tokenizer: Tokenizer) -> "Encoded":
        """Return no more than so many documents."""
        if len(self.ends) < num_documents:
            return self
        last = np.flatnonzero(self.tokens == tokenizer.eot_token)[num_documents - 1]
        ends = self.ends[:num_documents]
        replaced = self.replaced[:num_documents]
        return replace(
            self,
            tokens=self.tokens[: last + 1],
            ends=ends,
            replaced=replaced,
            findings=findings_of(ends, replaced),
            num_text_bytes=int(ends[-1]),
        )


def findings_of(ends: np.ndarray, replaced: np.ndarray) -> Findings:
    """Count the documents of some text; see `Encoded`."""
    num_empty = np.count_nonzero(np.diff(ends, prepend=0) == 0)
    return Findings(int(num_empty), int(np.count_nonzero(replaced)), int(replaced.sum()))
