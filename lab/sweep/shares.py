"""How the runs of a sweep that are trained at once share a machine: GPUs, or the cores of a CPU."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from basics.errors import UserError
from basics.text import counted
from lab.sweep.definition import Sweep
from reporting.machine_time import SHARES_VARIABLE

AUTO = "auto"  # as many runs at once as the machine has room for
GPU_LIST = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """What one of the runs that are trained at once gets of the machine."""

    name: str = ""  # for people; empty: all of it
    environment: dict[str, str] = field(default_factory=dict)
    cores: frozenset[int] = frozenset()  # that its processes may use; empty: all


def share_machine(
    sweep: Sweep, parallel: int | str, processes: int | None
) -> tuple[int, list[Share]]:
    """Return the processes of each run, and the shares of the runs that are trained at once.

    The first command with --parallel decides what each run gets, and the plan keeps it.

    Args:
        parallel: runs at once, or AUTO: as many as there is room for.
        processes: of each run, as the command line has it.

    Raises: UserError: the machine is too small, or the runs of the sweep have other processes.
    """
    # Imported here: only to ask how many GPUs there are takes seconds.
    from processes.distributed import num_gpus

    gpus, cores = num_gpus(), sorted(os.sched_getaffinity(0))
    if sweep.processes is None:
        wanted = processes or 1
        at_once = parallel
        if at_once == AUTO:  # each process has a core, if there are not fewer runs
            at_once = max(1, min(len(cores) // wanted, len(sweep.runs)))
        threads = None if gpus else max(1, len(cores) // (int(at_once) * wanted))
        if gpus:
            shares_of_gpus(parallel, wanted, num_gpus=gpus)  # refused before it is written
        sweep.update(processes=wanted, threads=threads)
    if processes not in (None, sweep.processes):
        raise UserError(
            f"{sweep.sweep_dir}: each run of this sweep has"
            f" {counted(sweep.processes, 'process', 'processes')}, since losses are compared;"
            " leave --nproc-per-node out, or set another --name"
        )
    if gpus:
        return sweep.processes, shares_of_gpus(parallel, sweep.processes, num_gpus=gpus)
    shares = shares_of_cores(parallel, sweep.processes, sweep.threads or 1, cores)
    return sweep.processes, shares


def shares_of_gpus(parallel: int | str, processes: int, *, num_gpus: int) -> list[Share]:
    """Return the shares of a machine with GPUs: each process has one of its own.

    Raises: UserError: there are too few.
    """
    listed = os.environ.get(GPU_LIST, "").split(",")
    gpus = listed[:num_gpus] if os.environ.get(GPU_LIST) else [str(i) for i in range(num_gpus)]
    wanted = max(1, num_gpus // processes) if parallel == AUTO else int(parallel)
    if wanted * processes > num_gpus:
        raise UserError(
            f"--parallel {parallel}: {counted(wanted, 'run')} of"
            f" {counted(processes, 'process', 'processes')} at once need"
            f" {wanted * processes} GPUs, and there {'is' if num_gpus == 1 else 'are'} {num_gpus};"
            " set a smaller --parallel or --nproc-per-node"
        )
    shares = []
    for first in range(0, wanted * processes, processes):
        own = ",".join(gpus[first : first + processes])
        shares.append(Share(f"GPU {own}", {GPU_LIST: own, SHARES_VARIABLE: str(wanted)}))
    return shares


def shares_of_cores(
    parallel: int | str, processes: int, threads: int, cores: Sequence[int]
) -> list[Share]:
    """Return the shares of a machine without GPUs: each thread has a core, while there are enough.

    A run has the same number of threads on each machine, since that changes how sums are rounded.
    """
    width = processes * threads
    wanted = max(1, len(cores) // width) if parallel == AUTO else int(parallel)
    environment = {"OMP_NUM_THREADS": str(threads), SHARES_VARIABLE: str(wanted)}
    shares = []
    for first in range(0, wanted * width, width):
        own = sorted({cores[i % len(cores)] for i in range(first, first + width)})
        name = f"core {own[0]}" if len(own) == 1 else f"cores {own[0]} to {own[-1]}"
        shares.append(Share(name, environment, frozenset(own)))
    return shares
