"""What is found in documents that people should know of."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import NonNegativeInt

from basics.text import counted
from preparation.token_stream import Numbers
from tokens.tokenizer import END_OF_TEXT_TOKENS


@dataclass(frozen=True)
class Findings(Numbers):
    """Numbers of documents and characters."""

    num_empty: NonNegativeInt = 0  # documents without text
    num_damaged: NonNegativeInt = 0  # documents with bytes that were not in their encoding
    num_replaced: NonNegativeInt = 0  # characters that stand for such bytes

    def damage(self, encoding: str) -> str:
        """Say how much text was not in its encoding, empty for UTF-8."""
        return (
            f"{counted(self.num_damaged, 'document')} with bytes that are not"
            f" {encoding or 'UTF-8'}: {counted(self.num_replaced, 'character')} became U+FFFD"
        )


def markers_in(texts: Iterable[str]) -> frozenset[str]:
    """Return the markers of the end of a text that some texts have in them."""
    return frozenset(marker for text in texts for marker in END_OF_TEXT_TOKENS if marker in text)
