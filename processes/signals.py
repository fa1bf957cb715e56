"""What ends the processes of a run: signals, deadlines, and what they tell each other. No torch."""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import psutil

from basics.errors import STOP_SIGNALS, is_out_of_memory
from basics.failpoints import failpoint

if TYPE_CHECKING:
    import torch.distributed as dist

NEVER = float("inf")
PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
ASK_SECONDS = 2.0  # for torchrun's store to answer
# More for an answer that is there: C++ code that loads a large file may hold up all Python threads.
MOMENT_SECONDS = 0.5
DEADLINES = "DDP_TRAIN_TEST_DEADLINES"  # environment variable of tests: '{"stop": 2}'


class Period(Enum):
    """A period of a launch: each has its own limits."""

    STARTUP = auto()  # without heartbeats: data may be downloaded for hours
    FIRST_STEP = auto()  # without heartbeats too: it compiles
    TRAINING = auto()


class Limits(NamedTuple):
    """The seconds that are allowed in a period without a sign of life."""

    hang: float  # of this process: after them it hangs
    store: float  # of this process, while torchrun's store does not answer
    machine: float  # of a process on another machine: after them it is lost


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
    first_step: float = 3600.0  # of compiling, without a heartbeat
    store: float = 20.0  # for an answer of torchrun's store; after that it counts as down

    @classmethod
    def read(cls) -> Self:
        """Return the deadlines, with the changes that the environment variable asks for."""
        return cls(**json.loads(os.environ.get(DEADLINES, "{}")))

    def limits(self, period: Period, hang_timeout_seconds: float) -> Limits:
        """Return the limits of a period; the hang timeout is not known in the start-up."""
        hang, lost = {
            Period.STARTUP: (NEVER, self.lost),
            Period.FIRST_STEP: (max(self.first_step, hang_timeout_seconds), hang_timeout_seconds),
            Period.TRAINING: (hang_timeout_seconds, hang_timeout_seconds),
        }[period]
        return Limits(hang, store=lost, machine=max(lost, 3 * self.heartbeat))


def end_with_parent(parent: int | None = None) -> None:
    """Have the system send SIGTERM to this process when its parent dies.

    Args:
        parent: its process id, if known from before: where it is gone, the signal comes now.
    """
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
    return [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


class Peers:
    """The store, and the other processes of the run by what they have published there. Any thread.

    The facts: `pid`; `heartbeat`, whose change shows that the machine can be reached; `silent`,
    without progress for too long; `progress`, the step and the heartbeats in it, empty where the
    process waits for the others; `done`, it exits because it is done, or after a signal.

    Attributes:
        is_up: whether the store has answered every request in time so far. Once it has not, no more
            are sent: keys read as missing, and what is set is dropped.
    """

    def __init__(
        self,
        store: "dist.Store",
        *,
        rank: int,
        local_rank: int,
        world_size: int,
        timeout_seconds: float,
    ) -> None:
        self.is_up = True
        self._rank, self._ranks, self._store = rank, range(world_size), store
        self._timeout_seconds = timeout_seconds
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="peers")
        first = rank - local_rank  # of those that this torchrun has started
        self._local_ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._local_pids: dict[int, int] = {}
        self._seen: dict[int, tuple[str, float]] = {}  # rank: its last heartbeat, and since when

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def get(self, key: str) -> str:
        """Return the value of a key; empty if nobody has set it, or the store is down."""
        value = self._ask(lambda: self._store.check([key]) and self._store.get(key))
        return (value or b"").decode()

    def set_if_missing(self, key: str, text: str) -> str:
        return (self._ask(lambda: self._store.compare_set(key, "", text)) or text.encode()).decode()

    def close(self) -> None:
        """End the thread: one that is still in C++ code when Python exits crashes the process."""
        self._thread.shutdown(wait=self.is_up)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer, None if it is down: torchrun has ended, or its machine."""
        if self.is_up:
            try:
                answer = self._thread.submit(request)
                wait([answer], self._timeout_seconds)
                return answer.result(MOMENT_SECONDS)
            except (RuntimeError, TimeoutError):
                self.is_up = False
        return None

    def publish(self, fact: str, value: object = "yes") -> None:
        self.set(f"{fact}/{self._rank}", str(value))

    def find_dead(self) -> list[int]:
        """Return the ranks of this node that have died, so far as the store answers."""
        for rank in self._local_ranks:
            if rank not in self._local_pids and (pid := self.get(f"pid/{rank}")):
                self._local_pids[rank] = int(pid)
        dead = [
            rank
            for rank, pid in self._local_pids.items()
            if not psutil.pid_exists(pid) and not self.get(f"done/{rank}")
        ]
        return dead if self.is_up else []

    def find_lost(self, now: float, timeout_seconds: float) -> list[int]:
        """Return the ranks without a new heartbeat: nothing else tells of a lost machine."""
        lost = []
        for rank in self._ranks:
            heartbeat = self.get(f"heartbeat/{rank}")
            seen, since = self._seen.get(rank, (None, now))
            if heartbeat != seen:
                self._seen[rank] = heartbeat, now
            elif now - since > timeout_seconds and not self.get(f"done/{rank}"):
                lost.append(rank)
        return lost if self.is_up else []

    def having(self, fact: str) -> list[int]:
        """Return the ranks that have published a fact."""
        return [rank for rank in self._ranks if self.get(f"{fact}/{rank}")]

    def find_hung(self) -> list[int]:
        """Return the ranks with the least progress; all if every rank waits for others."""
        found = {rank: [*map(int, self.get(f"progress/{rank}").split())] for rank in self._ranks}
        least = min(filter(None, found.values()), default=None)
        return [rank for rank, progress in found.items() if progress == least or least is None]


def is_caused_by_others(error: BaseException) -> bool:
    """Return whether a collective raised this because another process has died or hangs."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch is not imported here
    is_local = "AcceleratorError" in kinds or is_out_of_memory(error)
    return (
        isinstance(error, RuntimeError)
        and not is_local
        and (
            "DistError" in kinds
            or any(
                part in str(error).lower()
                for part in ("connection", "timed out", "timeout", "gloo", "nccl")
            )
        )
    )


def is_timeout(error: BaseException) -> bool:
    text = str(error).lower().replace("timeout watchdog", "")  # it finds other errors too
    return "timed out" in text or "timeout" in text
