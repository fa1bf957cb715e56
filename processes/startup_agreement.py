"""All processes go through the preparation together, or all stop with the same error."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from basics.errors import UserError, print_error

CONNECT_TIMEOUT = timedelta(seconds=20)  # torchrun's store is there, or torchrun is gone
# A dataset of 20 GiB may come in over a slow line before the first collective.
START_TIMEOUT = timedelta(days=2)

T = TypeVar("T")

BEGUN = "ddp_train/begun"


class AgreedError(UserError):
    """A mistake that every rank has heard of, so that one can speak for all."""


class Agreement:
    """What processes settle through torchrun's key-value store, without a process group.

    However long one of them takes, no collective times out, and none is left waiting.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.name = _meet(_connect(), rank, world_size)
        self._store = self.connect()

    @classmethod
    def in_one_process(cls) -> Agreement:
        """Return the agreement of a single process, which needs no torchrun."""
        agreement = cls.__new__(cls)
        agreement._rank, agreement._world_size = 0, 1
        agreement._store = dist.HashStore()
        return agreement

    def connect(self, part: str = "") -> dist.Store:
        """Give a store with keys of this start, and this part of it, alone.

        Each has a connection of its own: one that waits for a key blocks no other.
        """
        return open_store(f"{self.name}/{part}")

    def run(self, step: str, work: Callable[[], T]) -> T:
        """Do this process's part of a step. Every rank.

        Raises:
            AgreedError: on every rank, the mistake of the lowest rank that has one.
        """
        result, failure = None, ""
        try:
            result = work()
        except UserError as error:
            failure = f"{error.status} {error}"
        except BaseException as error:  # told to the others on its way out, whatever it is
            self._publish(step, f"1 rank {self._rank} failed: {type(error).__name__}: {error}")
            raise
        self._raise_if_any(step, failure)
        return result

    def from_rank_0(self, step: str, work: Callable[[], str]) -> str:
        """Let rank 0 decide something, and every process know it. Every rank."""
        text = self.run(step, work if self._rank == 0 else str)
        if self._rank == 0:
            self._store.set(f"{step}/decided", text)
        self._store.wait([f"{step}/decided"], START_TIMEOUT)
        return self._store.get(f"{step}/decided").decode()

    def require_same(self, step: str, found: object) -> None:
        """Make sure that all processes have found the same. Every rank.

        Raises:
            AgreedError: one differs from rank 0, so that they would not train the same run.
        """
        expected = self.from_rank_0(step, lambda: repr(found))
        self._raise_if_any(f"{step}/same", "" if expected == repr(found) else (
            f"2 rank {self._rank} reads another run than rank 0; make its configs, dataset and"
            " checkpoints the same"))

    def gather(self, step: str, text: str) -> list[str]:
        """Give every process's text, by rank, once all have come to this step. Every rank."""
        self._publish(step, text)
        keys = [f"{step}/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, START_TIMEOUT)
        return [self._store.get(key).decode() for key in keys]

    def record_training_began(self) -> None:
        """Let those that torchrun starts after these know that the run has begun. Rank 0."""
        _lasting_store().set(BEGUN, "")

    def is_torchrun_restart(self) -> bool:
        """Tell if torchrun has started these processes after others that had begun. Every rank."""
        return self.from_rank_0("again", lambda: str(_lasting_store().check([BEGUN]))) == "True"

    def raise_flag(self, name: str) -> None:
        """Let the other processes know of something, whenever they look. Any rank."""
        self._store.set(f"{name}/flag", "")

    def is_flagged(self, name: str) -> bool:
        """Tell if any process has raised a flag; never waits for one. Any rank."""
        return self._store.check([f"{name}/flag"])

    def _publish(self, step: str, text: str) -> None:
        self._store.set(f"{step}/{self._rank}", text)

    def _raise_if_any(self, step: str, failure: str) -> None:
        """Raise the lowest rank's failure, a status and a reason, if there is one. Every rank."""
        status, _, reason = next(filter(None, self.gather(step, failure)), "").partition(" ")
        if reason:
            raise AgreedError(reason, int(status))

    def report_once(self, message: str) -> None:
        """Let rank 0 speak for all. Nobody leaves before: torchrun ends the others with the first.

        Every rank.
        """
        if self._rank == 0:
            print_error(message)
            self._store.set("told", "")
        self._store.wait(["told"], timedelta(seconds=20))


def open_store(name: str) -> dist.Store:
    """Give torchrun's store, as far as its keys begin with a name."""
    return dist.PrefixStore(name, _connect())


def _connect() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=CONNECT_TIMEOUT))
    store.set_timeout(START_TIMEOUT)
    return store


def _lasting_store() -> dist.Store:
    """Give the store that stays as long as torchrun, whatever prefix it gives to one attempt."""
    store = _connect()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _meet(store: dist.Store, rank: int, world_size: int) -> str:
    """Find a name for this start that all its processes know, and no earlier one has used.

    Where torchrun starts processes again, they find the keys of those before in the same store.
    So each says hello with a word of its own, and rank 0 repeats what it has heard until everybody
    has found their own word in it.
    """
    word = uuid.uuid4().hex
    if rank != 0:
        store.set(f"hello/{rank}", word)
        return _wait_for_own_word(store, rank, word)
    ranks = range(1, world_size)
    while True:
        words = [store.get(f"hello/{other}").decode() for other in ranks]
        name = hashlib.blake2b(" ".join([word, *words]).encode(), digest_size=12).hexdigest()
        store.set("start", " ".join([name, *words]))
        for _ in range(20):
            if all(store.check([f"{name}/{other}"]) for other in ranks):
                store.set(f"{name}/go", "")
                return name
            time.sleep(0.01)


def _wait_for_own_word(store: dist.Store, rank: int, word: str) -> str:
    while True:
        name, *words = store.get("start").decode().split()  # waits until there is one
        if words[rank - 1 : rank] == [word]:
            store.set(f"{name}/{rank}", "")
            if store.check([f"{name}/go"]):
                return name
        time.sleep(0.01)
