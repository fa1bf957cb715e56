"""A process of the load tests: `python -m lab.doctor.load_process SPEC`, one for each GPU.

It loads its GPU and exchanges data with the others, and writes what it finds to a file, line by
line, so that one that crashes or hangs leaves what it had found, and which part it began last.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from basics.errors import describe
from basics.files import append_whole
from basics.gpu_readings import read_gpus
from basics.json_files import to_json
from basics.machine import cuda_problem
from lab.plan.setting import GPT2_SMALL
from processes.signals import end_with_parent
from run_config import TrainConfig, load_run

if TYPE_CHECKING:
    import torch

    from processes.launch import Process

MATMUL_SIZE, MATMUL_SIZE_ON_CPU = 8192, 1024
MATMUL_SECONDS = 0.5
REDUCED_BYTES, REDUCED_BYTES_ON_CPU = 256 * 2**20, 16 * 2**20
NUM_REDUCTIONS = 10
TRAIN = TrainConfig(dataset="none", microbatch_size=1, checkpoint_interval=1)


@dataclass(frozen=True)
class Spec:
    """What a process does.

    Attributes:
        num_gpus: those that the driver sees; the tests are left out if PyTorch sees others.
        store: a file for the rendezvous; empty under torchrun, which has a store.
        name: of the keys in torchrun's store.
        is_loading: make the load tests too, not only report facts.
    """

    output: str
    rank: int
    world_size: int
    local_rank: int
    num_gpus: int
    store: str
    name: str
    is_loading: bool
    runs_dir: str
    run_name: str | None
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(spec: Spec) -> None:
    """Make all parts that this process takes part in."""
    if _report(spec, "import", import_torch) is None:
        return
    facts = _report(spec, "torch", torch_facts)
    if not spec.is_loading or facts is None or facts["num_gpus"] != spec.num_gpus:
        return
    device = torch_device(spec)
    if _report(spec, "device", lambda: begin(device)) is None:
        return
    process = _process(spec, device)
    settings = _report(spec, "attention", lambda: attention(spec, device))
    precision = (settings or {}).get("precision", "fp32")
    if spec.local_rank == 0 and spec.num_gpus:
        _report(spec, "triton", lambda: triton_kernel(device))
    if spec.local_rank == 0 and spec.num_gpus > 1:
        _report(spec, "peers", lambda: unreachable_peers(spec.num_gpus))
    _report(spec, "matmul", lambda: matmul(device, precision))
    if spec.world_size > 1:
        _report(spec, "all_reduce", lambda: all_reduce(spec, process))


def _report(spec: Spec, part: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Do one part and write what it returns, or the error that it raises."""
    _write(spec, {"part": part, "began": time.time()})
    try:
        found = work()
    except Exception as error:  # whatever it is, the other parts go on
        _write(spec, {"part": part, "error": describe(error)})
        return None
    _write(spec, {"part": part, "found": found})
    return found


def _write(spec: Spec, record: dict[str, Any]) -> None:
    append_whole(Path(spec.output), to_json(record) + "\n")


def import_torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__}


def torch_facts() -> dict[str, Any]:
    """Report PyTorch's versions and the GPUs that it sees. Puts nothing on a GPU."""
    import torch

    count = torch.cuda.device_count()
    problem = cuda_problem()
    return {
        "version": torch.__version__, "cuda": torch.version.cuda or torch.version.hip,
        "num_gpus": count, "problem": problem, "driver_cuda": _driver_cuda(),
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "cards": [_card(number) for number in range(0 if any(problem) else count)],
    }


def _driver_cuda() -> str | None:
    """Return the CUDA version that the driver supports, such as "12.4"; None without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"


def triton_kernel(device: torch.device) -> dict[str, Any]:
    """Compile and run a Triton kernel; see `triton_kernel.py`."""
    from lab.doctor.triton_kernel import run_kernel

    return run_kernel(device)


def _card(number: int) -> dict[str, Any]:
    import torch

    about = torch.cuda.get_device_properties(number)
    return {"name": about.name, "capability": [about.major, about.minor],
            "memory_gib": about.total_memory / 2**30,
            "has_bf16": bool(torch.version.hip) or about.major >= 8}


def torch_device(spec: Spec) -> torch.device:
    import torch

    return torch.device("cuda", spec.local_rank) if spec.num_gpus else torch.device("cpu")


def begin(device: torch.device) -> dict[str, Any]:
    """Put a number on the device and read it again: a defective GPU fails here."""
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(device)
    return {"one": torch.ones(1, device=device).item()}


def _process(spec: Spec, device: torch.device) -> Process:
    from processes.launch import Process, share_cpu_cores

    process = Process(spec.rank, spec.local_rank, spec.world_size, device)
    share_cpu_cores(process)
    return process


def attention(spec: Spec, device: torch.device) -> dict[str, Any]:
    """Report the precision and the attention kernel of the run, or of GPT-2 small."""
    from trainer.compilation import choose_forward_options
    from trainer.precision import check_attention, kernel_name, resolve_for_device

    model, train = GPT2_SMALL, TRAIN
    if spec.run_name is not None:
        run = load_run(Path(spec.runs_dir), spec.run_name)
        model, train = run.model, run.train
    train = resolve_for_device(train, device)
    check_attention(model, train, device)
    options = choose_forward_options(model, train, device)
    return {"kernel": kernel_name(model, train, device, options), "precision": train.precision,
            "of": "" if spec.run_name else "GPT-2 small"}


def unreachable_peers(num_gpus: int) -> dict[str, Any]:
    """Report the pairs of GPUs that cannot read each other's memory."""
    import torch

    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    return {"num_pairs": len(pairs), "without": [
        pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]}


def matmul(device: torch.device, precision: str) -> dict[str, Any]:
    """Measure matrix products in 16 bits, in float32 on a CPU, and the GPU's state meanwhile."""
    import torch

    on_gpu = device.type == "cuda"
    size = MATMUL_SIZE if on_gpu else MATMUL_SIZE_ON_CPU
    dtype = torch.float32 if not on_gpu else (
        torch.float16 if precision == "fp16" else torch.bfloat16)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(number: int, meanwhile: Callable[[], Any] = lambda: None) -> tuple[float, Any]:
        from basics.device_time import Moment

        began = Moment(device)
        for _ in range(number):
            torch.mm(a, b, out=out)
        ended, found = Moment(device), meanwhile()
        return ended.seconds_since(began), found

    seconds(3)  # the first call initialises a library
    number = max(3, int(MATMUL_SECONDS / (seconds(3)[0] / 3)))
    taken, reading = seconds(number, lambda: _reading(device) if on_gpu else None)
    return {"flops": 2 * size**3 * number / taken, "dtype": str(dtype).removeprefix("torch."),
            "name": torch.cuda.get_device_name(device) if on_gpu else "CPU", "gpu": reading}


def _reading(device: torch.device) -> dict[str, Any]:
    """Return what the driver says of a GPU that computes."""
    import torch

    time.sleep(MATMUL_SECONDS / 2)  # until its clock has risen
    found = read_gpus([f"GPU-{torch.cuda.get_device_properties(device).uuid}"])
    return asdict(found[0]) if found else {}


def all_reduce(spec: Spec, process: Process) -> dict[str, Any]:
    """Add up a tensor over all processes, check the sum, and measure the time. Every rank.

    With GPUs also once over gloo, which training uses too.
    """
    import torch
    import torch.distributed as dist

    from basics.device_time import Moment
    from processes.launch import join_process_group
    from processes.startup_agreement import open_store

    store = dist.FileStore(spec.store, spec.world_size) if spec.store else open_store(spec.name)
    join_process_group(process, store, timeout=timedelta(seconds=spec.seconds))
    on_gpu = process.device.type == "cuda"
    size = REDUCED_BYTES if on_gpu else REDUCED_BYTES_ON_CPU
    tensor = torch.full((size // 4,), spec.rank + 1.0, device=process.device)
    dist.all_reduce(tensor)
    is_right = bool((tensor == spec.world_size * (spec.world_size + 1) / 2).all())
    tensor.zero_()  # or the sums would grow without limit
    number = NUM_REDUCTIONS if on_gpu else 2
    dist.all_reduce(tensor)
    began = Moment(process.device)
    for _ in range(number):
        dist.all_reduce(tensor)
    taken = Moment(process.device).seconds_since(began) / number
    dist.all_reduce(torch.zeros(1), group=dist.new_group(
        backend="gloo", timeout=timedelta(seconds=spec.seconds)))
    # One that has exited cannot send what the others may still wait for.
    store.set(f"done/{spec.rank}", "")
    store.wait([f"done/{rank}" for rank in range(spec.world_size)],
               timedelta(seconds=spec.seconds))
    return {"backend": dist.get_backend(), "bytes": size, "seconds": taken, "is_right": is_right}


if __name__ == "__main__":
    end_with_parent()
    main(Spec(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # to destroy the process group could wait for a process that hangs
