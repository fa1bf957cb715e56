"""All processes go through the start-up together, or all stop with the same error."""

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

import torch.distributed as dist

from basics.errors import FAILED, UserError, describe, drop_unwritable_output, print_error
from processes.signals import Deadlines

# Downloading a dataset of 20 GiB over a slow line may take long, before the first collective.
STARTUP_TIMEOUT = timedelta(days=2)
BEGIN_SECONDS = 1800.0  # between the first and the last process that begins: all import torch
TRAINING_BEGAN = "ddp_train/training-began"

P = ParamSpec("P")
T = TypeVar("T")


class AgreedError(UserError):
    """An error that every rank knows of, so that one rank can report it for all."""


class Agreement:
    """Decisions that all processes share, made through torchrun's store without a process group.

    However long one process takes, no collective times out, and no process waits forever.
    """

    def __init__(
        self, rank: int, world_size: int, open_root: Callable[[], dist.Store] | None = None
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._open_root = open_root or open_torchrun_store
        self.step = ""  # that is being done, for people
        try:
            self._root = self._open_root()
            self._name = _agree_on_name(self._root, rank, world_size)
        except (dist.DistError, TimeoutError) as error:
            raise UserError(
                f"rank {rank} lost the others before it began: {describe(error)}", FAILED
            ) from None
        self._store = self.connect()

    @classmethod
    def in_one_process(cls) -> Self:
        store = dist.HashStore()
        return cls(0, 1, lambda: store)

    def connect(self, part: str = "") -> dist.Store:
        """Return a store whose keys belong only to this part of this launch.

        Each store has its own connection: waiting for a key in one does not block the others.
        """
        return dist.PrefixStore(f"{self._name}/{part}", self._open_root())

    def do(self, step: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do this process's part of a step, and wait for the other processes. Every rank.

        Raises: AgreedError: on every rank, the error of the lowest rank that has one.
        """
        self.step = step
        result: T | Any = None
        failure = ""  # a status and a reason
        try:
            result = work(*args, **kwargs)
        except UserError as error:
            failure = f"{error.status} {error}"
        except BaseException as error:  # whatever it is, the others must not wait for this process
            self._publish(step, f"{FAILED} rank {self._rank} failed: {describe(error)}")
            raise  # with its traceback: it is a fault of the code
        # `gather` is in the order of ranks, so all take the same error.
        status, _, reason = next(filter(None, self.gather(step, failure)), "").partition(" ")
        if reason:
            raise AgreedError(reason, int(status))
        return result

    def do_if(
        self, is_here: bool, step: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Do a step in some of the processes; the others only wait, and get None. Every rank."""
        return self.do(step, lambda: work(*args, **kwargs) if is_here else None)

    def from_rank_0(self, step: str, work: Callable[[], str]) -> str:
        text = self.do(step, work if self._rank == 0 else str)
        return self.gather(f"{step}/decision", text)[0]

    def require_same(self, step: str, value: object) -> None:
        """Check that all processes have the same value, so train the same run. Every rank.

        Raises: AgreedError.
        """
        values = self.gather(step, repr(value))
        if other := next((rank for rank, each in enumerate(values) if each != values[0]), None):
            raise AgreedError(
                f"rank {other} reads another run than rank 0; make its configs,"
                " dataset and checkpoints the same"
            )

    def gather(self, step: str, text: str) -> list[str]:
        """Return every process's text, in the order of the ranks. Waits for all. Every rank."""
        self._publish(step, text)
        keys = [f"{step}/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, STARTUP_TIMEOUT)
        return [self._store.get(key).decode() for key in keys]

    def _publish(self, step: str, text: str) -> None:
        # A path on the command line may hold bytes that are no UTF-8.
        self._store.set(
            f"{step}/{self._rank}",
            text.encode(  # type: ignore[arg-type]
                "utf-8", "backslashreplace"
            ),
        )

    def record_training_began(self, first_step: int) -> None:
        """Record the launch's first step for processes that torchrun may start later."""
        if self._rank == 0:
            # Set once: after a restart the step at which the launch itself began still counts.
            # Restarted processes have another `_store`. The first value set stays.
            self._root.compare_set(TRAINING_BEGAN, "", str(first_step))

    def step_before_restart(self) -> int | None:
        """Return where earlier processes of this launch began to train, if they did. Every rank."""
        root = self._root
        found = self.from_rank_0(
            "step before restart",
            lambda: root.get(TRAINING_BEGAN).decode() if root.check([TRAINING_BEGAN]) else "",
        )
        return int(found) if found else None

    def exit(self, error: UserError) -> NoReturn:
        """Exit; rank 0 prints the error, and the others wait for that. Every rank.

        torchrun ends all processes when the first one exits.
        """
        if self._rank == 0:
            print_error(error.line())
            self._store.set("reported", "")
        self._store.wait(["reported"], timedelta(seconds=Deadlines.read().store))
        leave(error.status)  # destroying the process group could wait for the other ranks


def open_torchrun_store() -> dist.Store:
    """Return the store that all processes of a launch share, also those of torchrun's restarts."""
    timeout = timedelta(seconds=Deadlines.read().store)  # either it answers, or torchrun is gone
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(STARTUP_TIMEOUT)
    return store


def _agree_on_name(store: dist.Store, rank: int, world_size: int) -> str:
    """Return a name for this launch that all its processes know, and no earlier launch has used.

    When torchrun restarts processes, they find the keys of the earlier ones in the same store. So
    each rank publishes a nonce, and rank 0 echoes all of them until every rank has found its own.

    Raises: dist.DistError, TimeoutError: a process did not begin in time, or the store is down.
    """
    store.set_timeout(timedelta(seconds=BEGIN_SECONDS))
    nonce, others, until = uuid.uuid4().hex, range(1, world_size), time.monotonic() + BEGIN_SECONDS
    store.set(f"nonce/{rank}", nonce)
    while time.monotonic() < until:
        if rank == 0:
            nonces = [store.get(f"nonce/{other}").decode() for other in others]  # waits for each
            name = hashlib.blake2b(" ".join([nonce, *nonces]).encode(), digest_size=12).hexdigest()
            store.set("echo", " ".join([name, *nonces]))
            if all(store.check([f"{name}/{other}"]) for other in others):
                store.set(f"{name}/agreed", "")
                return name
        else:
            name, *nonces = store.get("echo").decode().split()  # waits until rank 0 has set it
            if nonces[rank - 1 : rank] == [nonce]:
                store.set(f"{name}/{rank}", "")
                if store.check([f"{name}/agreed"]):
                    return name
        time.sleep(0.01)
    raise TimeoutError("not all processes began")


def leave(status: int) -> NoReturn:
    """End this process now: Python's own way takes seconds, and a stop's notice may be short."""
    drop_unwritable_output()
    os._exit(status)
