"""One process that loads one GPU: `python -m lab.doctor.load_process FOLDER SPEC`.

It appends a line to FOLDER/RANK when it begins a part of the tests, and one with what it found. So
the file of a process that crashes or hangs tells in which part. On several nodes, the processes of
`lab doctor` itself exchange data over all of them.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from basics.errors import describe
from basics.json_files import to_json
from basics.machine import code_digest, cuda_problem, within
from basics.tensors import DeviceTime
from lab.doctor.load_tests import EXCHANGE, PRODUCTS, advice_on, judge_exchange
from lab.doctor.machine_checks import OTHER_MACHINE, Checks, Facts, ok, problem, warning
from processes.distributed import Process, join_process_group, share_cpu_cores, this_process
from processes.signals import end_with_parent
from processes.startup_agreement import open_torchrun_store

MATMUL_SIZE = 8192
MATMUL_SIZE_ON_CPU = 1024
MATMUL_SECONDS = 0.5
REDUCED_BYTES = 256 * 2**20
REDUCED_BYTES_ON_CPU = 16 * 2**20
NUM_REDUCTIONS = 10
NUM_REDUCTIONS_ON_CPU = 2
MEET_SECONDS = 60.0  # more than the checks of a node take, without its load tests


def main(folder: Path, spec: SimpleNamespace) -> None:
    """Do all parts that this process takes part in, by the `spec` of `load_tests`.

    Nothing is loaded unless `is_loading`, nor if PyTorch sees other GPUs than the driver.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])

    def do(part: str, work: Callable[..., Facts], *arguments: Any) -> Facts:
        with (folder / str(rank)).open("a", buffering=1) as file:
            file.write(to_json({"part": part, "begun": time.time()}) + "\n")
            try:
                outcome: Facts = {"found": work(*arguments)}
            except Exception as error:  # whatever it is, the other parts go on
                outcome = {"error": describe(error)}
            file.write(to_json({"part": part} | outcome) + "\n")
        return outcome.get("found", {})

    facts = do("PyTorch", torch_facts)
    if not spec.is_loading or facts.get("num_gpus") != spec.num_gpus:
        return
    device = torch.device("cuda", rank) if spec.num_gpus else torch.device("cpu")
    process = Process(rank, rank, world_size, device)
    share_cpu_cores(process)
    if do(PRODUCTS, matrix_products, device) and world_size > 1:
        store = dist.FileStore(str(folder / "store"), world_size)
        do(EXCHANGE, all_reduce, process, store, timedelta(seconds=spec.seconds))


def torch_facts() -> Facts:
    """Report what PyTorch sees. Puts nothing on a GPU."""
    return {
        "version": torch.__version__,
        "num_gpus": torch.cuda.device_count(),
        "problem": cuda_problem(),
    }


def matrix_products(device: torch.device) -> Facts:
    """Measure products in the 16 bits that training uses, in float32 on a CPU.

    A defective GPU, or one that PyTorch has no code for, fails here.
    """
    size = MATMUL_SIZE_ON_CPU
    dtype = torch.float32
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        size = MATMUL_SIZE
        dtype = torch.bfloat16 if has_bf16 else torch.float16
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn_like(a)
    out = torch.empty_like(a)

    def seconds(number: int) -> float:
        began = DeviceTime(device)
        for _ in range(number):
            torch.mm(a, b, out=out)
        return DeviceTime(device).seconds_since(began)

    seconds(3)  # the first call initialises a library
    number = max(3, int(MATMUL_SECONDS / (seconds(3) / 3)))
    return {
        "flops": 2 * size**3 * number / seconds(number),
        "dtype": str(dtype).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
    }


def all_reduce(process: Process, store: dist.Store, limit: timedelta) -> Facts:
    """Add up a tensor over all processes, check the sum, and measure the time. Every rank.

    With GPUs also once over gloo, which training uses too.
    """
    join_process_group(process, store, timeout=limit)
    size = REDUCED_BYTES
    number = NUM_REDUCTIONS
    if process.device.type == "cpu":
        size = REDUCED_BYTES_ON_CPU
        number = NUM_REDUCTIONS_ON_CPU
    tensor = torch.full((size // 4,), process.rank + 1.0, device=process.device)
    dist.all_reduce(tensor)
    wanted = process.world_size * (process.world_size + 1) / 2  # 1 + 2 + ... + world_size
    is_right = bool((tensor == wanted).all())
    tensor.zero_()  # or the sums would grow without limit
    dist.all_reduce(tensor)
    began = DeviceTime(process.device)
    for _ in range(number):
        dist.all_reduce(tensor)
    taken = DeviceTime(process.device).seconds_since(began) / number
    gloo: Any = dist.new_group(backend="gloo", timeout=limit)
    dist.all_reduce(torch.zeros(1), group=gloo)
    # One that has exited cannot send what the others may still wait for.
    store.set(f"done/{process.rank}", "")
    store.wait([f"done/{rank}" for rank in range(process.world_size)], limit)
    return {
        "backend": dist.get_backend(),
        "bytes": size,
        "seconds": taken,
        "is_right": is_right,
        "world_size": process.world_size,
    }


def check_nodes(is_busy: bool, time_limit: float) -> Checks:
    """Compare all nodes; add up numbers over all GPUs, unless one is in use. Every rank.

    Its first process knows whether a node `is_busy`; the exchange has `time_limit` seconds.
    """
    versions = {
        "PyTorch": torch.__version__,
        "the project's code": code_digest(),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    facts = {"node": int(os.environ["GROUP_RANK"]), "is_busy": is_busy, "versions": versions}
    keys = [f"process/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store = open_torchrun_store()
    store.set(f"process/{os.environ['RANK']}", json.dumps(facts))
    try:
        store.wait(keys, timedelta(seconds=MEET_SECONDS + time_limit))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        return {"nodes": problem(f"no answer from rank {', '.join(missing)}", OTHER_MACHINE)}
    of_all = [json.loads(store.get(key)) for key in keys]
    nodes = ok(f"{', '.join(versions)}: the same on all")
    for what in versions:
        found = {each["versions"][what]: each["node"] for each in of_all}
        if len(found) > 1:
            values = ", ".join(f"{value} on node {node}" for value, node in found.items())
            nodes = problem(
                f"{what} differs: {values}",
                "bring all nodes to the same commit and"
                " run uv sync on each; runs/ is best shared between them",
            )
    if busy := [str(each["node"]) for each in of_all if each["is_busy"]]:
        exchange = warning(f"left out, because of node {', '.join(busy)}", "see that node's report")
        return {"nodes": nodes, "all-reduce of all nodes": exchange}
    limit = timedelta(seconds=time_limit)
    try:
        found = within(time_limit, lambda: all_reduce(this_process(), store, limit))
        exchange = judge_exchange([found])
    except Exception as error:  # whatever it is, the report is printed
        text = describe(error)
        if isinstance(error, TimeoutError):
            text = f"has not ended after {time_limit:g} s"
        exchange = problem(text, advice_on(EXCHANGE, text))
    return {"nodes": nodes, "all-reduce of all nodes": exchange}


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2])))
    os._exit(0)  # to destroy the process group could wait for a process that hangs
