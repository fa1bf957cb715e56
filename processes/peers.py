"""What the processes of a run know of each other, through torchrun's key-value store."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

PATIENCE = 20.0  # seconds for an answer: the store's machine may be out of reach for good


class PeerStore:
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


class Peers:
    """Looks for processes that have ended without taking their leave. Each is found once."""

    def __init__(self, rank: int, world_size: int, board: PeerStore) -> None:
        self._rank, self._world_size, self._store = rank, world_size, board
        self._siblings: dict[int, int] = {}  # rank: process id, of this machine
        self._looked_for, self._is_silent = {rank}, False
        self._seen: dict[int, tuple[int, float]] = {}  # rank: its count of beats, and since when

    def arrive(self) -> None:
        """Let the others know where this process is to be found."""
        self._store.tell(f"process/{self._rank}", f"{this_machine()} {os.getpid()}")

    def take_leave(self) -> None:
        """Let the others know that this process ends because it is done."""
        self._store.tell(f"left/{self._rank}")

    def beat(self) -> None:
        """Let other machines know that this one can be reached."""
        self._store.count(f"beats/{self._rank}", up_by=1)

    def gone(self) -> list[int]:
        """Give the ranks of this machine that have ended since the last call."""
        self._find_siblings()
        lost = [rank for rank, pid in self._siblings.items()
                if not Path(f"/proc/{pid}").exists() and not self._store.knows(f"left/{rank}")]
        if not self._store.is_there:
            return []  # nobody can tell any more who has left and who was lost
        self._siblings = {r: pid for r, pid in self._siblings.items() if r not in lost}
        return lost

    def silent(self, now: float, patience: float) -> list[int]:
        """Give the ranks that count their beats no more: a lost machine is never heard of again."""
        lost = []
        for rank in range(self._world_size):
            beats = self._store.count(f"beats/{rank}")
            if self._seen.get(rank, (None, 0.0))[0] != beats:
                self._seen[rank] = beats, now
            elif now - self._seen[rank][1] > patience and not self._store.knows(f"left/{rank}"):
                self._seen[rank] = beats, float("inf")
                lost.append(rank)
        return lost

    def all_wait(self, is_silent: bool) -> bool:
        """Tell if all wait for each other, silent for too long: then nobody is at work.

        Called at every look, so that what is said of this process is true.
        """
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            self._store.tell(f"silent/{self._rank}", str(is_silent))
        keys = [f"silent/{rank}" for rank in range(self._world_size)]
        return is_silent and all(
            self._store.knows(key) and self._store.read(key) == "True" for key in keys)

    def _find_siblings(self) -> None:
        for rank in range(self._world_size):
            if rank not in self._looked_for and self._store.knows(f"process/{rank}"):
                self._looked_for.add(rank)
                machine, _, pid = self._store.read(f"process/{rank}").rpartition(" ")
                if machine == this_machine() and Path("/proc/self").exists():
                    self._siblings[rank] = int(pid)


def this_machine() -> str:
    """Name what process ids are counted in; machines and containers may share a host name."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not on macOS
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
