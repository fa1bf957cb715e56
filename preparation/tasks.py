"""The unit of work of a worker, and those whose text is in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from preparation.cutting import BadShard, Piece


class Task(ABC):
    """The unit of work of a worker. It is pickled and sent to another process."""

    num_bytes: int  # of text, roughly

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Read the text. Raises: BadShard."""


@dataclass(frozen=True)
class Texts(Task):
    """Pieces of text that are already in memory."""

    texts: list[Piece]
    num_bytes: int

    def pieces(self) -> Iterator[Piece]:
        yield from self.texts


@dataclass(frozen=True)
class Unreadable(Task):
    """A file that could not be split into tasks."""

    reason: str
    num_bytes: int = 0

    def pieces(self) -> Iterator[Piece]:
        raise BadShard(self.reason)
