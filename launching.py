"""From a command line to a process group: checks before the start, torchrun, device, seeds."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from run_config import Precision, TrainConfig, UserError

# Rank 0 validates, saves and charts while the others wait in a barrier.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
# A dataset of 20 GiB may come in over a slow line before the first collective.
START_TIMEOUT = timedelta(days=2)
THROTTLE_REASONS = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process's place among those that train together."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_main_of_node(self) -> bool:
        return self.local_rank == 0


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_num_processes() -> int:
    """One process for each GPU, or one on a machine without."""
    return max(1, num_gpus())


def num_gpus() -> int:
    """Count this machine's GPUs.

    Raises:
        UserError: there are some, but PyTorch cannot use them.
    """
    counted = torch.cuda.device_count()
    if counted and not torch.cuda.is_available():
        raise UserError(f"this machine has {counted} GPUs, but PyTorch {torch.__version__} cannot"
                        " use them; install a driver for its CUDA version")
    return counted


def start_torchrun(script: str, arguments: list[str], *, num_processes: int) -> int:
    """Run a script under torchrun on this machine; give the exit status of what failed first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, which warns about it
    command = ["--standalone", f"--nproc-per-node={num_processes}", script, *arguments]
    try:
        run(parse_args(command))
    except ChildFailedError as error:
        return abs(error.get_first_failure()[1].exitcode)
    return 0


def this_process() -> Process:
    """Read this process's place from the environment that torchrun makes.

    Raises:
        UserError: there are more processes than GPUs on a machine that has any.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = num_gpus()
    if found and local_rank >= found:
        raise UserError(f"--nproc_per_node: local rank {local_rank} has no GPU of its own;"
                        f" this machine has {found}, start as many processes")
    return Process(
        rank=int(os.environ["RANK"]),
        local_rank=local_rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        device=torch.device("cuda", local_rank) if found else torch.device("cpu"),
    )


class AgreedError(UserError):
    """A mistake that every rank has heard of, so that one can speak for all."""


class Agreement:
    """All processes finish a step of preparation together, or all stop with the same error.

    It goes through torchrun's key-value store, before there is a process group: however long one
    process takes, no collective times out, and none is left waiting.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store, _, _ = next(dist.rendezvous("env://", timeout=START_TIMEOUT))

    def on(self, step: str, work: Callable[[], T]) -> T:
        """Do this process's part of a step. Every rank.

        Raises:
            AgreedError: on every rank, the mistake of the lowest rank that has one.
        """
        result, failure = None, ""
        try:
            result = work()
        except UserError as error:
            failure = str(error)
        except BaseException as error:  # told to the others on its way out, whatever it is
            self._publish(step, f"rank {self._rank} failed: {type(error).__name__}: {error}")
            raise
        self._raise_if_any(step, failure)
        return result

    def same(self, step: str, found: object) -> None:
        """Make sure that all processes have found the same. Every rank.

        Raises:
            AgreedError: one differs from rank 0, so that they would not train the same run.
        """
        if self._rank == 0:
            self._store.set(f"{step}/found", repr(found))
        self._store.wait([f"{step}/found"], START_TIMEOUT)
        differs = self._store.get(f"{step}/found").decode() != repr(found)
        self._raise_if_any(step, f"rank {self._rank} reads another run than rank 0; make its"
                           " configs, dataset and checkpoints the same" if differs else "")

    def gather(self, step: str, text: str) -> list[str]:
        """Give every process's text, by rank, once all have come to this step. Every rank."""
        self._publish(step, text)
        keys = [f"{step}/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, START_TIMEOUT)
        return [self._store.get(key).decode() for key in keys]

    def raise_flag(self, name: str) -> None:
        """Let the other processes know of something, whenever they look. Any rank."""
        self._store.set(f"{name}/flag", "")

    def is_flagged(self, name: str) -> bool:
        """Tell if any process has raised a flag; never waits for one. Any rank."""
        return self._store.check([f"{name}/flag"])

    def _publish(self, step: str, text: str) -> None:
        self._store.set(f"{step}/{self._rank}", text)

    def _raise_if_any(self, step: str, failure: str) -> None:
        reason = next((text for text in self.gather(step, failure) if text), "")
        if reason:
            raise AgreedError(reason)

    def tell_once(self, message: str) -> None:
        """Let rank 0 speak for all. Nobody leaves before: torchrun ends the others with the first.

        Every rank.
        """
        if self._rank == 0:
            print(message, file=sys.stderr, flush=True)
            self._store.set("told", "")
        self._store.wait(["told"], timedelta(seconds=20))


@contextmanager
def process_group(process: Process) -> Iterator[None]:
    """Join the process group and leave it in the end. Every rank."""
    join_process_group(process, "training", timeout=COLLECTIVE_TIMEOUT)
    yield
    # Not after an error: taking the group down waits for the others, who wait for this process.
    gc.unfreeze()
    gc.collect()  # DDP's threads must be gone before the group they use
    dist.destroy_process_group()


def join_process_group(process: Process, name: str, *, timeout: timedelta) -> None:
    """Join a process group (nccl with GPUs, else gloo) through torchrun's store. Every rank.

    Args:
        name: of this group among all that meet in the same store, one after another.
    """
    on_gpu = process.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(process.device)
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.PrefixStore(name, store), timeout=timeout,
        rank=rank, world_size=world_size, device_id=process.device if on_gpu else None,
    )


def share_cpu_cores(process: Process) -> None:
    """Give each process of a CPU run its share of the cores.

    torchrun sets one thread a process where nobody asked for another number.
    """
    if process.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        num_neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, num_cpu_cores() // num_neighbours))


def choose_precision(train: TrainConfig, device: torch.device) -> Precision:
    """Settle the precision: what the run asks for, else the fastest that is safe on the device."""
    if train.precision is not None:
        return train.precision
    if not train.use_amp:
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if _cpu_has_bf16() else "fp32"


def set_matmul_precision(precision: Precision) -> None:
    """Allow TF32 in float32 matrix products, unless float32 itself was asked for."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Give the autocast context of a precision; for fp32 and tf32 one that does nothing."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision in ("bf16", "fp16"))


def seed_for(random_seed: int, microbatch_index: int) -> int:
    """Mix a seed for one microbatch's dropout.

    The random stream is, like the data, a function of the position in the run: each process has
    its own, a resumed run needs no saved state, and another split of the global batch into
    processes and accumulation steps draws the same masks.
    """
    digest = hashlib.blake2b(f"{random_seed}/{microbatch_index}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def machine_facts(process: Process, precision: Precision) -> dict[str, Any]:
    """Name the hardware and the versions that a run used."""
    on_gpu = process.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(process.device) if on_gpu else _cpu_name(),
        "device_type": process.device.type,
        "processes": process.world_size,
        "cpu_cores": num_cpu_cores(),
        "precision": precision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def throttling(device: torch.device) -> str | None:
    """Say why a GPU runs below its clock, as nvidia-smi tells it; None where it does not."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ",".join(f"clocks_throttle_reasons.{reason}" for reason in THROTTLE_REASONS)
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # nothing is known
    active = [field.strip() == "Active" for field in said.stdout.split(",")]
    return next((reason.replace("_", " ") for reason, is_active
                 in zip(THROTTLE_REASONS, active, strict=False) if is_active), None)


def num_cpu_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
