"""Compile a run's training step outside of a run: PyTorch's cache on disk holds the code then.

One process for each GPU compiles what a rank of the run will: PyTorch keeps code by the index of
the device. They do so at the same time, as ranks do, without a process group.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from basics.errors import FAILED, UserError
from basics.out_of_memory import is_out_of_memory
from processes.launch import Process, num_gpus
from processes.run_lock import end_with_parent
from run_config import Run
from trainer.compilation import CACHE_VARIABLE, compiled_code_of_run, keep_compiled_code
from trainer.losses import Losses, build_training_state
from trainer.precision import check_attention, resolve_for_device

BUSY_BYTES = 2 * 2**30  # of a GPU's memory, in use beside this process: something else computes


@dataclass(frozen=True)
class Compiled:
    """The compiled code of a run, on disk.

    Attributes:
        is_new: whether the cache lacked a part of it.
        why_not: why that was not tried; empty if it was.
    """

    cache_dir: Path
    num_bytes: int
    num_devices: int
    is_new: bool
    why_not: str


def compile_step(run: Run, num_processes: int) -> Compiled:
    """Compile a run's step for the devices of this machine, on which it has `num_processes`.

    Raises:
        UserError: the run cannot be trained on them, or a process ended while it compiled.
    """
    keep_compiled_code()
    cache_dir = Path(os.environ.get(CACHE_VARIABLE, ""))
    before = _entries(cache_dir)
    tasks = _processes(num_processes)
    # CUDA is never initialised in this process, and out of memory there ends nothing here.
    with ProcessPoolExecutor(len(tasks), mp_context=get_context("spawn"),
                             initializer=_begin_child, initargs=(num_processes,)) as pool:
        try:
            reasons = list(pool.map(compile_for, [run] * len(tasks), tasks))
        except BrokenProcessPool:
            raise UserError("a process that compiled the training step was killed, or crashed;"
                            " run the same command again", FAILED) from None
    files = [path for path in cache_dir.rglob("*") if path.is_file()]
    return Compiled(cache_dir, sum(path.stat().st_size for path in files), len(tasks),
                    is_new=_entries(cache_dir) != before, why_not=next(filter(None, reasons), ""))


def _processes(num_processes: int) -> list[Process]:
    """Return the ranks whose code differs: one for each GPU; on a CPU all have the same."""
    count = min(num_processes, num_gpus())
    return [Process(rank=index, local_rank=index, world_size=num_processes,
                    device=torch.device("cuda", index) if count else torch.device("cpu"))
            for index in range(count or 1)]


def _begin_child(num_processes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    end_with_parent()
    os.environ["LOCAL_WORLD_SIZE"] = str(num_processes)  # compiled code depends on the threads


def compile_for(run: Run, process: Process) -> str:
    """Compile what a rank does; return why it was not tried, empty if it was.

    Raises:
        UserError: the run cannot be compiled for the rank's device, or does not fit there.
    """
    if reason := _busy_memory(process.device):
        return reason
    train = resolve_for_device(run.train, process.device)
    try:
        check_attention(run.model, train, process.device)
        with compiled_code_of_run(run.run_dir, train, process):
            Losses(build_training_state(run.model, train, process).model, train, process)
        return ""
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{run.train_path}: microbatch_size {train.microbatch_size} does not fit"
                        f" into the memory of {process.device}; make it smaller, or set"
                        " head_chunks 8 (--find-max-microbatch measures what fits)") from None


def _busy_memory(device: torch.device) -> str:
    """Return what says that something else uses a GPU, which must not run out of memory."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info()
    return "" if total - free < BUSY_BYTES else (
        f"GPU {device.index} is in use: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free")


def _entries(cache_dir: Path) -> set[Path]:
    """Return the graphs in the cache."""
    return set((cache_dir / "fxgraph").glob("*/*"))
