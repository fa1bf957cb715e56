"""Divide a command's work among the processes that torchrun started, or one process."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from basics.errors import one_line
from processes.launch import Process, share_cpu_cores, started_by_torchrun, this_process
from processes.startup_agreement import Agreement

T = TypeVar("T")


class Share:
    """The part of the work that belongs to this process.

    The processes exchange text through torchrun's store, so no collective can time out while one
    of them downloads. All ranks must call the same methods in the same order.

    Args:
        agreement: between the processes; by default, that of a single process.
    """

    def __init__(self, process: Process, agreement: Agreement | None = None) -> None:
        self.process = process
        self._agreement = agreement or Agreement.in_one_process()
        self._numbers = itertools.count()

    def indices(self, num_items: int) -> range:
        """Return the indices of the items that this process works on."""
        return range(self.process.rank, num_items, self.process.world_size)

    def progress(self, batches: range, *, desc: str) -> tqdm:
        """Show a progress bar on rank 0, if stderr is a terminal."""
        return tqdm(batches, desc=one_line(desc), unit="batch", leave=False,
                    disable=None if self.process.is_main else True)

    def sum(self, *values: float) -> list[float]:
        """Add up the values of all processes, in float64. Every rank."""
        texts = self._agreement.gather(self._next_step(), json.dumps(values))
        return [sum(column) for column in zip(*map(json.loads, texts), strict=True)]

    def run(self, work: Callable[[], T]) -> T:
        """Do this process's part of a step. Every rank.

        Raises:
            UserError: on every rank, the error of the lowest rank that has one.
        """
        return self._agreement.run(self._next_step(), work)

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 finds, as JSON: others may find more. Every rank.

        Raises:
            UserError: rank 0's.
        """
        return json.loads(self._agreement.from_rank_0(self._next_step(),
                                                      lambda: json.dumps(work())))

    def run_first_on_each_node(self, work: Callable[[], T]) -> T:
        """Run work that may download: on each node one process goes first. Every rank.

        Raises:
            UserError: as `run`.
        """
        is_first = self.process.is_main_of_node
        early = self.run(lambda: work() if is_first else None)
        late = self.run(lambda: None if is_first else work())
        return early if is_first else late

    def _next_step(self) -> str:
        return f"step {next(self._numbers)}"


def join_processes() -> Share:
    """Meet the other processes, if torchrun started this one. Every rank. Raises: UserError."""
    if not started_by_torchrun():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Share(Process(rank=0, local_rank=0, world_size=1, device=device))
    agreement = Agreement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    process = agreement.run("process", this_process)
    share_cpu_cores(process)
    return Share(process, agreement)
