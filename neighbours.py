"""Which processes of a run are gone without a word: of this machine, and other machines."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from notice_board import NoticeBoard


class Neighbours:
    """Looks for processes that have ended without taking their leave. Each is found once."""

    def __init__(self, rank: int, world_size: int, board: NoticeBoard) -> None:
        self._rank, self._world_size, self._board = rank, world_size, board
        self._siblings: dict[int, int] = {}  # rank: process id, of this machine
        self._looked_for, self._is_silent = {rank}, False
        self._seen: dict[int, tuple[int, float]] = {}  # rank: its count of beats, and since when

    def arrive(self) -> None:
        """Let the others know where this process is to be found."""
        self._board.tell(f"process/{self._rank}", f"{this_machine()} {os.getpid()}")

    def take_leave(self) -> None:
        """Let the others know that this process ends because it is done."""
        self._board.tell(f"left/{self._rank}")

    def beat(self) -> None:
        """Let other machines know that this one can be reached."""
        self._board.count(f"beats/{self._rank}", up_by=1)

    def gone(self) -> list[int]:
        """Give the ranks of this machine that have ended since the last call."""
        self._find_siblings()
        lost = [rank for rank, pid in self._siblings.items()
                if not Path(f"/proc/{pid}").exists() and not self._board.knows(f"left/{rank}")]
        if not self._board.is_there:
            return []  # nobody can tell any more who has left and who was lost
        self._siblings = {r: pid for r, pid in self._siblings.items() if r not in lost}
        return lost

    def silent(self, now: float, patience: float) -> list[int]:
        """Give the ranks that count their beats no more: a lost machine is never heard of again."""
        lost = []
        for rank in range(self._world_size):
            beats = self._board.count(f"beats/{rank}")
            if self._seen.get(rank, (None, 0.0))[0] != beats:
                self._seen[rank] = beats, now
            elif now - self._seen[rank][1] > patience and not self._board.knows(f"left/{rank}"):
                self._seen[rank] = beats, float("inf")
                lost.append(rank)
        return lost

    def all_wait(self, is_silent: bool) -> bool:
        """Tell if all wait for each other, silent for too long: then nobody is at work.

        Called at every look, so that what is said of this process is true.
        """
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            self._board.tell(f"silent/{self._rank}", str(is_silent))
        keys = [f"silent/{rank}" for rank in range(self._world_size)]
        return is_silent and all(
            self._board.knows(key) and self._board.read(key) == "True" for key in keys)

    def _find_siblings(self) -> None:
        for rank in range(self._world_size):
            if rank not in self._looked_for and self._board.knows(f"process/{rank}"):
                self._looked_for.add(rank)
                machine, _, pid = self._board.read(f"process/{rank}").rpartition(" ")
                if machine == this_machine() and Path("/proc/self").exists():
                    self._siblings[rank] = int(pid)


def this_machine() -> str:
    """Name what process ids are counted in; machines and containers may share a host name."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not on macOS
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
