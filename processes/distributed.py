"""The processes of a run: torchrun, ranks and devices, the process group, facts of the machine."""

import gc
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from basics.device import (
    CPU,
    count_gpus,
    cuda_problem,
    device_name,
    gpu,
    gpu_uuid,
    is_cpu,
    is_gpu,
    peak_bytes,
    use,
)
from basics.entry_points import may_restart
from basics.errors import STOP_SIGNALS, UserError, print_error
from basics.machine import PROJECT_DIR, num_cpu_cores
from processes.background import THREADS, torchrun_limits_threads
from processes.signals import stop_signals
from run_config import TrainConfig
from settings.machine import Precision

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# The others wait for rank 0 while it validates and saves, however long that takes.
CONTROL_TIMEOUT = timedelta(days=2)
NCCL_MARGIN_SECONDS = 120.0  # between the hang timeout and NCCL's
# Signals of native code: an address that is not there, an assertion, an instruction of another CPU.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Process:
    """The rank and the device of this process."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    torchrun_pid: int = 0  # its parent when it began

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_main_of_node(self) -> bool:
        return self.local_rank == 0


def num_gpus() -> int:
    """Return the number of GPUs of this machine. Raises: UserError: PyTorch cannot use them."""
    cause, remedy = cuda_problem()
    if cause:
        raise UserError(
            f"this machine has GPUs, but PyTorch {torch.__version__} cannot use them:"
            f" {cause}; {remedy}"
        )
    return count_gpus()


def unused_gpus() -> list[str]:
    found, used = num_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (
        []
        if used >= found
        else [
            f"{used} of the {found} GPUs of this machine are used: set --nproc_per_node to {found},"
            " or hide the others with CUDA_VISIBLE_DEVICES"
        ]
    )


def start_torchrun(num_processes: int, logs_dir: Path | None = None) -> int:
    """Run `ddp_train.py` under torchrun on this machine, with the arguments of this process.

    Returns the status of the first process that failed; 128 + n if signal n stopped this one.
    `logs_dir` gets what the processes print.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Others' settings of torchrun, such as those of Kubeflow's trainer: with two nodes in them, a
    # launch on this one would wait for ever.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    os.environ.setdefault(THREADS, "1")  # torchrun would set the same, with a warning
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks report it
    passed_on = ",".join([*(STOP_SIGNALS[number] for number in stop_signals()), "SIGQUIT"])
    # Without its address torchrun asks for that of the machine's name, which containers may lack.
    # Without a place for logs it makes a temporary directory for them, which it leaves behind.
    logs = ["--redirects=3", f"--log-dir={logs_dir}"] if logs_dir else [f"--log-dir={os.devnull}"]
    command = [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--signals-to-handle={passed_on}",
        f"--nproc-per-node={num_processes}",
        *logs,
        str(PROJECT_DIR / "ddp_train.py"),
        *sys.argv[1:],
    ]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0 and not logs_dir:
            if line := killed_line(error.failures, num_processes):
                print_error(line)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def killed_line(failures: Mapping[int, "ProcessFailure"], num_processes: int) -> str:
    """Return the line about processes that a signal ended, by rank; empty if another one says it.

    Of a kill the ranks that are left say it. They do not know the signal, which tells a crash.
    """
    by_signal: dict[int, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0:
            by_signal.setdefault(-failure.exitcode, []).append(rank)
    for number, ranks in by_signal.items():
        who = f"rank {' and '.join(map(str, ranks))}"
        name = signal.Signals(number).name
        if number in CRASHES:
            return (
                f"Error: {who} crashed in native code: {name}; the same command continues the run;"
                " if it crashes again, see docs/troubleshooting.md"
            )
        if len(ranks) == num_processes:
            return f"Error: {who}: killed by {name}"
    return ""


def this_process() -> Process:
    """Return this process, from the environment variables that torchrun sets.

    Raises: UserError: the machine has GPUs, but fewer than processes; or not the interface that
        gloo is told to use, which would end each process with a traceback.
    """
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        interfaces = psutil.net_if_addrs()
        if name not in interfaces:
            raise UserError(
                f"GLOO_SOCKET_IFNAME: this machine has no network interface {name};"
                f" unset it, or name one of {', '.join(interfaces)}"
            )
    local_rank, found = int(os.environ.get("LOCAL_RANK", "0")), num_gpus()
    # Two processes on one GPU would be slow, and NCCL refuses them with a traceback.
    if found and local_rank >= found:
        raise UserError(
            f"--nproc_per_node: local rank {local_rank} has no GPU of its own;"
            f" this machine has {found}: set --nproc_per_node to that"
        )
    return Process(
        int(os.environ["RANK"]),
        local_rank,
        int(os.environ["WORLD_SIZE"]),
        device=gpu(local_rank) if found else CPU,
        torchrun_pid=os.getppid(),
    )


def spans_nodes() -> bool:
    """Return whether several of torchrun's agents, each on a node, started this run."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def end_torchrun(process: Process) -> None:
    """After a stop signal, end the torchrun of this node if it would not end by itself. Every rank.

    With --max-restarts it would start the processes again. On several nodes the signal may have
    come to one node's torchrun, which leaves without the others: at their end each of them would
    wait for it for 5 minutes, a time that cannot be set.
    """
    goes_on = spans_nodes() or may_restart()
    if process.is_main_of_node and goes_on and os.getppid() == process.torchrun_pid:
        os.kill(process.torchrun_pid, signal.SIGTERM)


@contextmanager
def process_group(
    process: Process, store: dist.Store, config: TrainConfig
) -> Iterator[dist.ProcessGroup]:
    """Join the process group, and destroy it at the end. Every rank.

    Yields a second group, of gloo, for waits that are longer than the collective timeout.
    """
    seconds = config.collective_timeout_seconds
    if is_gpu(process.device):  # NCCL ends the process without a word: the watchdog is first
        seconds = max(seconds, config.hang_timeout_seconds) + NCCL_MARGIN_SECONDS
    join_process_group(process, store, timeout=timedelta(seconds=seconds))
    # Of its own: rank 0 may save and validate for longer than any collective should take.
    yield dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)  # type: ignore[misc]
    # Not after an error: destroying the group waits for the others, which wait for this process.
    gc.unfreeze()
    gc.collect()  # DDP's threads must be gone before the group they use
    dist.destroy_process_group()


@contextmanager
def waiting_for_all(process: Process) -> Iterator[None]:
    """Wait at the end for the slowest process, however long it takes. Every rank."""
    if process.world_size == 1 or not dist.is_initialized():
        yield
        return
    group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    yield
    dist.barrier(group)  # type: ignore[arg-type]
    dist.destroy_process_group(group)  # not after an error, as above


def join_process_group(process: Process, store: dist.Store, *, timeout: timedelta) -> None:
    """Join a process group, nccl with GPUs, else gloo, by a store of its own keys. Every rank."""
    if spans_nodes():
        _choose_interface(process, store, timeout)
    on_gpu = is_gpu(process.device)
    use(process.device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        timeout=timeout,
        rank=process.rank,
        world_size=process.world_size,
        device_id=process.device if on_gpu else None,
    )


def _choose_interface(process: Process, store: dist.Store, timeout: timedelta) -> None:
    """Have gloo use the interface that leads to the other nodes, if no other is set. Every rank.

    By itself it takes the address of this machine's name, often a loopback address in /etc/hosts.
    MASTER_ADDR may be one too, on the node that has it: there the address of another node counts.
    """
    store.set(f"address/{process.rank}", _own_address(os.environ["MASTER_ADDR"]))
    keys = [f"address/{rank}" for rank in range(process.world_size)]
    store.wait(keys, timeout)
    addresses = [store.get(key).decode() for key in keys]
    other = next((found for found in addresses if not ip_address(found).is_loopback), None)
    own = other and _own_address(other)
    for name, found in psutil.net_if_addrs().items():
        if own in [each.address for each in found]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _own_address(target: str) -> str:
    """Return this machine's address on the way to another one. Sends nothing."""
    for family, kind, protocol, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as way:
            way.connect(place)  # of UDP: it only looks up the route
            return way.getsockname()[0]
    return "127.0.0.1"


def share_cpu_cores(process: Process) -> None:
    """Set the number of threads to this process's share of the cores, in a run on CPU.

    A number that a person has set stays.
    """
    is_set = THREADS in os.environ and not torchrun_limits_threads()
    if is_cpu(process.device) and not is_set:
        num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, num_cpu_cores() // num_local_processes))


def machine_facts(process: Process, precision: Precision | None) -> dict[str, Any]:
    """Return hardware, versions and this process's peak memory: of tensors, resident on a CPU."""
    return {
        "device": device_name(process.device),
        "device_type": process.device.type,
        "processes": process.world_size,
        "cpu_cores": num_cpu_cores(),
        "precision": precision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "peak_memory_gib": peak_bytes(process.device) / 2**30,
    }


def gpu_uuids(process: Process) -> list[str]:
    """Return the driver's ids of the GPUs that the processes of this node use, by local rank.

    Empty without NVIDIA GPUs. CUDA_VISIBLE_DEVICES may hide and reorder them.
    """
    if not is_gpu(process.device):
        return []
    num_local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return list(filter(None, map(gpu_uuid, range(num_local_processes))))
