"""A command's work, shared among the processes that torchrun has started, if it has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from basics.errors import UserError
from processes.launch import Process, share_cpu_cores, started_by_torchrun, this_process

LONGEST_WAIT = timedelta(days=2)  # for a process that fetches something large
T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """This process's part of some work."""

    process: Process

    def of(self, num_items: int) -> range:
        """Give the items that are this process's own."""
        return range(self.process.rank, num_items, self.process.world_size)

    def sum(self, *values: float) -> list[float]:
        """Add up what all processes have found, in float64. A collective: every rank."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.process.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def on(self, work: Callable[[], T]) -> T:
        """Do this process's part of a step. A collective: every rank.

        Raises:
            UserError: on every rank, the mistake of the lowest rank that has one.
        """
        result, failure = None, None
        try:
            result = work()
        except UserError as error:
            failure = str(error)
        failures: list[str | None] = [failure]
        if self.process.world_size > 1:
            failures *= self.process.world_size
            dist.all_gather_object(failures, failure)
        if any(failures):
            raise UserError(next(filter(None, failures)))
        return result

    def one_by_one(self, work: Callable[[], T]) -> T:
        """Do what may fetch something: one process of each machine before the others. Every rank.

        Raises:
            UserError: as `on`.
        """
        if self.process.world_size == 1:
            return self.on(work)
        is_first = self.process.is_main_of_node
        early = self.on(lambda: work() if is_first else None)
        late = self.on(lambda: None if is_first else work())
        return early if is_first else late


@contextmanager
def sharing() -> Iterator[Share]:
    """Join with the other processes, where there are any. Every rank."""
    if not started_by_torchrun():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        yield Share(Process(rank=0, local_rank=0, world_size=1, device=device))
        return
    process = this_process()
    share_cpu_cores(process)
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)  # what travels are a few numbers
    try:
        yield Share(process)
    finally:
        dist.destroy_process_group()


def speaks() -> bool:
    """Tell if this process is the one that prints; needs no process group."""
    return os.environ.get("RANK", "0") == "0"
