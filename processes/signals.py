"""What ends the processes of a run: signals, deadlines, and what they tell each other. No torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from basics.errors import STOP_SIGNALS, is_out_of_memory
from basics.failpoints import failpoint
from basics.machine import process_namespace

if TYPE_CHECKING:
    import torch.distributed as dist

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
ASK_SECONDS = 2.0  # for torchrun's store to answer
# More for an answer that is there: C++ code that loads a large file may hold up all Python threads.
MOMENT_SECONDS = 0.5
DEADLINES = "DDP_TRAIN_TEST_DEADLINES"  # environment variable of tests: '{"stop": 2}'


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Tests shorten some of them."""

    tick: float = 0.25  # between two checks of the watchdog
    heartbeat: float = 5.0  # between two heartbeats
    repeated_signal: float = 1.0  # torchrun forwards signals: ignore repeats within this time
    # The grace: from a stop signal to the exit at the latest. Rank 0 may have a checkpoint to
    # finish. The others stay until it has exited: torchrun ends all when the first one exits.
    stop: float = 13.0
    after_command: float = 3.0  # of the grace, for charts, tracker; --after-checkpoint has the rest
    others_stop: float = 19.0
    failure_grace: float = 7.0  # for the others to save, after a rank has failed
    last_write: float = 5.0  # for a checkpoint in flight, when a rank fails or must exit
    charts: float = 60.0  # for the last charts, at the end of a run
    tracker: float = 60.0  # for the tracker, at the end of a run; after a signal `after_command`
    after_checkpoint: float = 900.0  # for the last --after-checkpoint, at the end of a launch
    orphans: float = 30.0  # for a run's lock: processes that have lost their torchrun may save
    lost: float = 600.0  # for heartbeats of other machines, until hang_timeout_seconds is known
    first_step: float = 3600.0  # of compiling, without a heartbeat; max-autotune takes minutes
    store: float = 20.0  # for an answer of torchrun's store; after that it counts as down

    @classmethod
    def read(cls) -> Deadlines:
        """Return the deadlines, with the changes that the environment variable asks for."""
        return cls(**json.loads(os.environ.get(DEADLINES, "{}")))


def end_with_parent(parent: int | None = None) -> None:
    """Have the system send SIGTERM to this process when its parent dies. Linux only.

    Args:
        parent: its process id, if known from before: where it is gone, the signal comes now.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def end_with_torchrun() -> None:
    """End this process, which torchrun has started, when torchrun dies, or if it is dead already.

    One that asks only after torchrun's death gets no signal, and its new parent tells nothing: in a
    container torchrun itself may have the id 1. But torchrun holds its store's socket to its end.
    """
    failpoint("worker")
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=ASK_SECONDS).close()
    except ConnectionRefusedError:
        sys.exit(128 + signal.SIGTERM)
    except OSError:
        pass  # this says nothing of torchrun


def stop_signals() -> list[int]:
    """Return the stop signals that this process handles: under nohup it ignores SIGHUP."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


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
        kinds = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported here
        is_local = "AcceleratorError" in kinds or is_out_of_memory(error)
        if self._world_size == 1 or is_local or not isinstance(error, RuntimeError):
            return False
        return "DistError" in kinds or any(
            part in str(error).lower()
            for part in ("connection", "timed out", "timeout", "gloo", "nccl"))


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective has waited for too long."""
    text = str(error).lower().replace("timeout watchdog", "")  # it finds other errors too
    return "timed out" in text or "timeout" in text
