"""What the processes of a run know of each other, through torchrun's key-value store."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist

from basics.machine import process_namespace
from basics.out_of_memory import is_out_of_memory

# More for an answer that is there: C++ code that loads a large file may hold up all Python threads.
MOMENT_SECONDS = 0.5


class PeerStore:
    """torchrun's store with a timeout; after that it counts as down. Any rank, any thread.

    Attributes:
        is_up: whether every request was answered so far. Once one was not, no more are sent:
            keys read as missing, and what is set is dropped.
    """

    def __init__(self, store: dist.Store, *, timeout_seconds: float) -> None:
        self.is_up = True
        self._store, self._timeout_seconds = store, timeout_seconds
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="peer store", daemon=True)
        self._thread.start()

    def set(self, key: str, text: str = "") -> None:
        self._request(lambda: self._store.set(key, text))

    def has(self, key: str) -> bool:
        return bool(self._request(lambda: self._store.check([key])))

    def get(self, key: str) -> str:
        """Return the value of a key that has been set; empty if the store is down."""
        return (self._request(lambda: self._store.get(key)) or b"").decode()

    def set_if_missing(self, key: str, text: str) -> str:
        """Set a key unless another process has set it; return the value that it has now."""
        value = self._request(lambda: self._store.compare_set(key, "", text))
        return value.decode() if value else text

    def add(self, key: str, amount: int) -> int:
        """Increase a counter; return its new value."""
        return int(self._request(lambda: self._store.add(key, amount)) or 0)

    def close(self) -> None:
        """End the thread: one that is still in C++ code when Python exits crashes the process."""
        self._requests.put(None)
        if self.is_up:
            self._thread.join()

    def _request(self, call: Callable[[], Any]) -> Any:
        if not self.is_up:
            return None
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put(call())
            except RuntimeError:  # torchrun has exited, and the store with it
                self.is_up = False
                answers.put(None)

        self._requests.put(answer)
        for timeout_seconds in (self._timeout_seconds, MOMENT_SECONDS):
            with suppress(queue.Empty):
                return answers.get(timeout=timeout_seconds)
        self.is_up = False
        return None

    def _serve(self) -> None:
        while (answer := self._requests.get()) is not None:
            answer()


class Peers:
    """Finds the processes of the run that died or cannot be reached. Reports each of them once."""

    def __init__(self, rank: int, world_size: int, store: PeerStore) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._local_pids: dict[int, int] = {}  # rank: process id, on this machine
        self._located, self._is_silent = {rank}, False
        self._seen: dict[int, tuple[int, float]] = {}  # rank: its heartbeats, and since when

    def announce(self) -> None:
        """Publish where this process runs."""
        self._store.set(f"process/{self._rank}", f"{process_namespace()} {os.getpid()}")

    def announce_exit(self) -> None:
        """Publish that this process exits because it is done."""
        self._store.set(f"done/{self._rank}")

    def is_done(self, rank: int) -> bool:
        """Return whether a process exits, or has, because it is done."""
        return self._store.has(f"done/{rank}")

    def is_working(self, rank: int) -> bool:
        """Return whether a process is not done; False if the store is down."""
        return self._store.is_up and not self.is_done(rank)

    def heartbeat(self) -> None:
        """Show the other machines that this one can be reached."""
        self._store.add(f"heartbeats/{self._rank}", 1)

    def find_dead(self) -> list[int]:
        """Return the ranks on this machine that have died since the last call."""
        self._locate()
        dead = [rank for rank, pid in self._local_pids.items()
                if not psutil.pid_exists(pid) and not self.is_done(rank)]
        if not self._store.is_up:
            return []  # which of them were done, and which have died, is not known
        self._local_pids = {r: pid for r, pid in self._local_pids.items() if r not in dead}
        return dead

    def caused(self, error: BaseException) -> bool:
        """Return whether a collective raised this because another process has died or hangs."""
        is_local = isinstance(error, torch.AcceleratorError) or is_out_of_memory(error)
        if self._world_size == 1 or is_local or not isinstance(error, RuntimeError):
            return False
        return isinstance(error, dist.DistError) or any(
            part in str(error).lower()
            for part in ("connection", "timed out", "timeout", "gloo", "nccl"))

    def find_lost(self, now: float, timeout_seconds: float) -> list[int]:
        """Return the ranks whose heartbeat counter stopped: nothing else tells of a lost machine.

        Args:
            now: as `time.monotonic()` counts.
        """
        lost = []
        for rank in range(self._world_size):
            heartbeats = self._store.add(f"heartbeats/{rank}", 0)
            if self._seen.get(rank, (None, 0.0))[0] != heartbeats:
                self._seen[rank] = heartbeats, now
            elif (now - self._seen[rank][1] > timeout_seconds
                  and not self.is_done(rank)):
                self._seen[rank] = heartbeats, float("inf")
                lost.append(rank)
        return lost

    def all_silent(self, is_silent: bool) -> bool:
        """Return whether no rank makes progress: each waits for the others.

        Args:
            is_silent: whether this process has been silent for too long. Call it at every check,
                so that what the others read of this process is up to date.
        """
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            self._store.set(f"silent/{self._rank}", str(is_silent))
        keys = [f"silent/{rank}" for rank in range(self._world_size)]
        return is_silent and all(
            self._store.has(key) and self._store.get(key) == "True" for key in keys)

    def publish_progress(self, progress: tuple[int, int] | None) -> None:
        """Publish the step and the heartbeats in it; None if this process waits for others."""
        self._store.set(f"progress/{self._rank}", " ".join(map(str, progress or ())))

    def find_hung(self) -> list[int]:
        """Return the ranks with the least progress; all if every rank waits for others."""
        ranks, progress = range(self._world_size), {}
        for rank in ranks:
            key = f"progress/{rank}"
            if self._store.has(key) and (text := self._store.get(key)):
                progress[rank] = tuple(map(int, text.split()))
        return [r for r, place in progress.items() if place == min(progress.values())] or [*ranks]

    def _locate(self) -> None:
        for rank in range(self._world_size):
            if rank not in self._located and self._store.has(f"process/{rank}"):
                self._located.add(rank)
                namespace, _, pid = self._store.get(f"process/{rank}").rpartition(" ")
                if namespace == process_namespace():
                    self._local_pids[rank] = int(pid)


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective has waited for too long."""
    text = str(error).lower().replace("timeout watchdog", "")  # it finds other errors too
    return "timed out" in text or "timeout" in text
