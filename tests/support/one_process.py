"""A start-up agreement of one process, without torchrun's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AgreementOfOne:
    """What `Agreement` does for a single rank; remembers the flags that were raised."""

    name = "test"

    def __init__(self) -> None:
        self.flags: set[str] = set()

    def run(self, step: str, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, step: str, text: str) -> list[str]:
        return [text]

    def raise_flag(self, name: str) -> None:
        self.flags.add(name)

    def is_flagged(self, name: str) -> bool:
        return name in self.flags
