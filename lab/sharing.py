"""A command's work, shared among the processes that torchrun has started, if it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from launching import Process, share_cpu_cores, started_by_torchrun, this_process

LONGEST_WAIT = timedelta(days=2)  # for a process that fetches something large


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

    @contextmanager
    def first_on_each_machine(self) -> Iterator[None]:
        """Let one process of a machine do what is inside before the others. Every rank."""
        is_alone, is_first = self.process.world_size == 1, self.process.is_main_of_node
        if not (is_alone or is_first):
            dist.barrier()
        yield
        if is_first and not is_alone:
            dist.barrier()


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
