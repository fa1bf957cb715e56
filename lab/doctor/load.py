"""A process of the load tests, one for each GPU, under torchrun: `lab.doctor.load OUTPUT SPEC`.

It appends a line when it begins a part of the tests, and one with what it found: one that crashes
or hangs leaves the part in which it did.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from basics.errors import UserError, describe
from basics.gpu_readings import read_gpus
from basics.json_files import to_json
from basics.machine import cuda_problem
from basics.tensors import Moment
from lab.doctor.check import OTHER_MACHINE, ok, problem, warn_unless, warning
from lab.plan.setting import GPT2_SMALL
from processes.launch import Process, join_process_group, share_cpu_cores
from processes.signals import end_with_parent
from processes.startup_agreement import open_store
from run_config import TrainConfig, load_run
from trainer.compilation import choose_forward_options
from trainer.precision import check_attention, kernel_name, resolve_for_device

MATMUL_SIZE, MATMUL_SIZE_ON_CPU = 8192, 1024
MATMUL_SECONDS = 0.5
REDUCED_BYTES, REDUCED_BYTES_ON_CPU = 256 * 2**20, 16 * 2**20
NUM_REDUCTIONS, NUM_REDUCTIONS_ON_CPU = 10, 2
TRAIN = TrainConfig(dataset="none", microbatch_size=1, checkpoint_interval=1)


def main(output: Path, spec: SimpleNamespace) -> None:
    """Do all parts that this process takes part in.

    Args:
        spec: what `load_tests` says. Nothing is loaded unless it says `is_loading`, nor if PyTorch
            sees other GPUs than the driver, `num_gpus`.
    """
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))

    def do(part: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Do one part and write what it returns, or the error that it raises."""
        write(part, {"begun": time.time()})
        try:
            found = work(*arguments)
        except Exception as error:  # whatever it is, the other parts go on
            text = describe(error)  # only a UserError's ends with advice, behind a semicolon
            write(part, {"error": text if isinstance(error, UserError)
                         else text.replace(";", ",")})
            return {}
        write(part, {"found": found})
        return found

    def write(part: str, record: dict[str, Any]) -> None:
        with output.open("a") as file:
            file.write(to_json({"part": part, "rank": rank} | record) + "\n")

    facts = do("PyTorch", torch_facts)
    if not spec.is_loading or facts.get("num_gpus") != spec.num_gpus:
        return
    device = torch.device("cuda", rank) if spec.num_gpus else torch.device("cpu")
    process = Process(rank, rank, world_size, device)
    share_cpu_cores(process)
    if not do("first kernel", first_kernel, device):
        return
    precision = do("attention", attention, spec, device).get("precision", "fp32")
    if rank == 0 and spec.num_gpus:
        do("Triton", triton_kernel, device)
    if rank == 0 and spec.num_gpus > 1:
        do("peer-to-peer", unreachable_peers, spec.num_gpus)
    do("matrix products", matrix_products, device, precision)
    if world_size > 1:
        do("all-reduce", all_reduce, process, open_store("lab doctor"),
           timedelta(seconds=spec.seconds))


def torch_facts() -> dict[str, Any]:
    """Report PyTorch's versions and the GPUs that it sees. Puts nothing on a GPU."""
    count, problem = torch.cuda.device_count(), cuda_problem()
    usable = () if any(problem) or torch.version.hip else range(count)
    return {"version": torch.__version__, "cuda": torch.version.cuda or torch.version.hip,
            "num_gpus": count, "problem": problem, "without_bf16": [
                number for number in usable if torch.cuda.get_device_capability(number) < (8, 0)]}


def first_kernel(device: torch.device) -> dict[str, Any]:
    """Compute on the device: a defective GPU, or one that PyTorch has no code for, fails here."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return {"one": torch.ones(1, device=device).item()}


def attention(spec: SimpleNamespace, device: torch.device) -> dict[str, Any]:
    """Judge the attention kernel of the run, or of GPT-2 small; report the precision."""
    model, train = GPT2_SMALL, TRAIN
    if spec.run_name is not None:
        run = load_run(Path(spec.runs_dir), spec.run_name)
        model, train = run.model, run.train
    train = resolve_for_device(train, device)
    check_attention(model, train, device)
    kernel = kernel_name(model, train, device, choose_forward_options(model, train, device))
    return {"precision": train.precision, "finding": warn_unless(
        kernel != "math" or device.type != "cuda",
        f"{kernel}, in {train.precision}{'' if spec.run_name else ' (GPT-2 small)'}", "it is slow;"
        ' remove attention "math" and precision "fp32" from train.json, or use a head size'
        " (emb_dim / n_heads) of 64 or 128")}


def triton_kernel(device: torch.device) -> dict[str, Any]:
    """Compile a kernel and run it, as torch.compile does: needs a C compiler, Python's headers."""
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target):
        places = tl.arange(0, 1024)
        tl.store(target + places, 2 * tl.load(source + places))

    source = torch.arange(1024, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    double[(1,)](source, target)
    text = f"Triton {triton.__version__} compiles and runs"
    return {"finding": ok(text) if torch.equal(target, 2 * source) else problem(
        f"{text}, with wrong results", OTHER_MACHINE)}


def unreachable_peers(num_gpus: int) -> dict[str, Any]:
    """Judge how many GPUs cannot read each other's memory."""
    pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return {"finding": warning(
        f"{len(without)} of {len(pairs)} pairs of GPUs cannot, such as {without[0][0]} and"
        f" {without[0][1]}", "data goes through the RAM, which is slower; consumer cards and some"
        " virtual machines cannot do it") if without else ok(f"all {len(pairs)} pairs of GPUs")}


def matrix_products(device: torch.device, precision: str) -> dict[str, Any]:
    """Measure products in 16 bits, in float32 on a CPU, and read the GPU's state meanwhile."""
    on_gpu, reading = device.type == "cuda", None
    size = MATMUL_SIZE if on_gpu else MATMUL_SIZE_ON_CPU
    dtype = torch.float32 if not on_gpu else (
        torch.float16 if precision == "fp16" else torch.bfloat16)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(number: int, meanwhile: Callable[[], None] = lambda: None) -> float:
        began = Moment(device)
        for _ in range(number):
            torch.mm(a, b, out=out)
        ended = Moment(device)
        meanwhile()
        return ended.seconds_since(began)

    def read() -> None:
        nonlocal reading
        time.sleep(MATMUL_SECONDS / 2)  # until its clock has risen
        reading = asdict(read_gpus([f"GPU-{torch.cuda.get_device_properties(device).uuid}"])[0])

    seconds(3)  # the first call initialises a library
    number = max(3, int(MATMUL_SECONDS / (seconds(3) / 3)))
    taken = seconds(number, read) if on_gpu else seconds(number)
    return {"flops": 2 * size**3 * number / taken, "dtype": str(dtype).removeprefix("torch."),
            "name": torch.cuda.get_device_name(device) if on_gpu else "CPU", "gpu": reading}


def all_reduce(process: Process, store: dist.Store, limit: timedelta) -> dict[str, Any]:
    """Add up a tensor over all processes, check the sum, and measure the time. Every rank.

    With GPUs also once over gloo, which training uses too.
    """
    on_gpu = process.device.type == "cuda"
    join_process_group(process, store, timeout=limit)
    size, number = ((REDUCED_BYTES, NUM_REDUCTIONS) if on_gpu
                    else (REDUCED_BYTES_ON_CPU, NUM_REDUCTIONS_ON_CPU))
    tensor = torch.full((size // 4,), process.rank + 1.0, device=process.device)
    dist.all_reduce(tensor)
    is_right = bool((tensor == process.world_size * (process.world_size + 1) / 2).all())
    tensor.zero_()  # or the sums would grow without limit
    dist.all_reduce(tensor)
    began = Moment(process.device)
    for _ in range(number):
        dist.all_reduce(tensor)
    taken = Moment(process.device).seconds_since(began) / number
    dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="gloo", timeout=limit))
    # One that has exited cannot send what the others may still wait for.
    store.set(f"done/{process.rank}", "")
    store.wait([f"done/{rank}" for rank in range(process.world_size)], limit)
    return {"backend": dist.get_backend(), "bytes": size, "seconds": taken, "is_right": is_right,
            "world_size": process.world_size}


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2])))
    os._exit(0)  # to destroy the process group could wait for a process that hangs
