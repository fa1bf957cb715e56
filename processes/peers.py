"""What the processes of a run tell each other through torchrun's key-value store."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
import torch.distributed as dist

from basics.errors import is_out_of_memory
from basics.machine import process_namespace

# More for an answer that is there: C++ code that loads a large file may hold up all Python threads.
MOMENT_SECONDS = 0.5


class Peers:
    """The store, and the other processes of the run by what they have published there. Any thread.

    Attributes:
        is_up: whether the store has answered every request in time so far. Once it has not, no more
            are sent: keys read as missing, and what is set is dropped.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, *,
                 timeout_seconds: float) -> None:
        self.is_up = True
        self._rank, self._world_size, self._store = rank, world_size, store
        self._timeout_seconds = timeout_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peers")
        self._own: dict[str, Any] = {}
        self._lock = threading.Lock()  # of `_own`, which two threads change
        self._local_pids: dict[int, int | None] = {rank: None}  # None: elsewhere, or known as dead
        self._seen: dict[int, tuple[object, float]] = {}  # rank: its last status, and since when

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def get(self, key: str) -> str:
        """Return the value of a key; empty if nobody has set it, or the store is down."""
        value = self._ask(lambda: self._store.check([key]) and self._store.get(key))
        return (value or b"").decode()

    def set_if_missing(self, key: str, text: str) -> str:
        """Set a key unless another process has set it; return the value that it has now."""
        return (self._ask(lambda: self._store.compare_set(key, "", text)) or text.encode()).decode()

    def close(self) -> None:
        """End the thread: one that is still in C++ code when Python exits crashes the process."""
        self._thread.shutdown(wait=self.is_up)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer, None if it is down: torchrun has ended, or its machine."""
        if not self.is_up:
            return None
        try:
            answer = self._thread.submit(request)
            for timeout_seconds in (self._timeout_seconds, MOMENT_SECONDS):
                try:
                    return answer.result(timeout_seconds)
                except TimeoutError:
                    pass
        except RuntimeError:
            pass
        self.is_up = False
        return None

    def publish(self, **facts: Any) -> None:
        """Publish facts of this process, beside the earlier ones.

        Those that this class reads: `place` and `pid`; `is_done`, it exits because it is done;
        `is_silent`, without a heartbeat for too long; `progress`, [step, heartbeats in it], None
        where it waits for the others; any that changes shows that its machine can be reached.
        """
        with self._lock:
            self._own |= facts
            self.set(f"rank/{self._rank}", json.dumps(self._own))

    def facts(self, rank: int) -> dict[str, Any]:
        """Return what a process has published; empty if nothing, or if the store is down."""
        return json.loads(self.get(f"rank/{rank}") or "{}")

    def find_dead(self) -> list[int]:
        """Return the ranks on this machine that have died since the last call."""
        for rank in range(self._world_size):
            if rank not in self._local_pids and (facts := self.facts(rank)):
                is_here = facts["place"] == process_namespace()
                self._local_pids[rank] = facts["pid"] if is_here else None
        dead = [rank for rank, pid in self._local_pids.items()
                if pid and not psutil.pid_exists(pid) and "is_done" not in self.facts(rank)]
        if not self.is_up:
            return []  # which of them were done, and which have died, is not known
        self._local_pids |= dict.fromkeys(dead)
        return dead

    def find_lost(self, now: float, timeout_seconds: float) -> list[int]:
        """Return the ranks whose facts stay the same: nothing else tells of a lost machine.

        Each is found once.

        Args:
            now: as `time.monotonic()` counts.
        """
        lost = []
        for rank in range(self._world_size):
            facts, (seen, since) = self.facts(rank), self._seen.get(rank, (None, now))
            if facts != seen:
                self._seen[rank] = facts, now
            elif now - since > timeout_seconds and "is_done" not in facts:
                self._seen[rank] = facts, float("inf")
                lost.append(rank)
        return lost if self.is_up else []

    def find_hung(self) -> list[int]:
        """Return the ranks with the least progress; all if every rank waits for others."""
        found = {rank: self.facts(rank).get("progress") for rank in range(self._world_size)}
        least = min(filter(None, found.values()), default=None)
        return [rank for rank, progress in found.items() if progress == least or least is None]

    def caused(self, error: BaseException) -> bool:
        """Return whether a collective raised this because another process has died or hangs."""
        is_local = isinstance(error, torch.AcceleratorError) or is_out_of_memory(error)
        if self._world_size == 1 or is_local or not isinstance(error, RuntimeError):
            return False
        return isinstance(error, dist.DistError) or any(
            part in str(error).lower()
            for part in ("connection", "timed out", "timeout", "gloo", "nccl"))


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective has waited for too long."""
    text = str(error).lower().replace("timeout watchdog", "")  # it finds other errors too
    return "timed out" in text or "timeout" in text
