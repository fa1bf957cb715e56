"""What the processes of a run let each other know, through torchrun's key-value store."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch.distributed as dist

PATIENCE = 20.0  # seconds for an answer: the store's machine may be out of reach for good


class NoticeBoard:
    """A store that never keeps its reader waiting for long. Any rank, any thread.

    Attributes:
        is_there: whether it has always answered; once it has not, it is asked no more, knows
            nothing and forgets what it is told.
    """

    def __init__(self, store: dist.Store) -> None:
        self.is_there = True
        self._store = store
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="notice board", daemon=True)
        self._thread.start()

    def tell(self, key: str, text: str = "") -> None:
        self._ask(lambda: self._store.set(key, text))

    def knows(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def read(self, key: str) -> str:
        """Give what a key that is known holds; empty if nothing can be read any more."""
        return (self._ask(lambda: self._store.get(key)) or b"").decode()

    def claim(self, key: str, text: str) -> str:
        """Be the first to write there, or give what somebody else has."""
        held = self._ask(lambda: self._store.compare_set(key, "", text))
        return held.decode() if held else text

    def count(self, key: str, *, up_by: int = 0) -> int:
        """Give a counter's value, after this."""
        return int(self._ask(lambda: self._store.add(key, up_by)) or 0)

    def close(self) -> None:
        """End its thread: one that is in C++ when Python ends would take the process with it."""
        self._questions.put(None)
        if self.is_there:
            self._thread.join()

    def _ask(self, question: Callable[[], object]) -> object:
        if not self.is_there:
            return None
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except RuntimeError:  # torchrun, and the store with it, is gone
                self.is_there = False
                answers.put(None)

        self._questions.put(ask)
        try:
            return answers.get(timeout=PATIENCE)
        except queue.Empty:
            self.is_there = False
            return None

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            question()
