"""Add up a tensor over all processes: `torchrun ... -m lab.doctor.all_reduce SECONDS`.

`lab doctor` starts it for the GPUs of one machine, a person for those of several. It prints one
line of JSON: rank 0 prints the bandwidth, or a rank that fails prints why.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from basics.device import DeviceTime, is_cpu
from basics.errors import UserError, describe, print_line
from basics.json_files import to_json
from basics.machine import code_digest, within
from lab.doctor.checks import WRONG_SUM
from processes.distributed import Process, join_process_group, share_cpu_cores, this_process
from processes.signals import end_with_torchrun
from processes.startup_agreement import open_torchrun_store

NUM_BYTES = 256 * 2**20
NUM_REDUCTIONS = 10
NUM_BYTES_ON_CPU = 16 * 2**20
NUM_REDUCTIONS_ON_CPU = 2


def main() -> None:
    """Measure, or end with status 1 after the time limit or an error. Every rank."""
    seconds = float(sys.argv[1])
    end_with_torchrun()
    status = 0
    try:
        process = this_process()
        share_cpu_cores(process)
        store = open_torchrun_store()
        found = within(seconds, lambda: measure(process, store, timedelta(seconds=seconds)))
        if process.is_main:
            print_line(to_json(found))
    except TimeoutError:
        print_line(to_json({"failure": f"has not ended within {seconds:g} s"}))
        status = 1
    except Exception as error:  # whatever it is, the report of `lab doctor` has it
        print_line(to_json({"failure": f"rank {os.environ['RANK']}: {describe(error)}"}))
        status = 1
    os._exit(status)  # to destroy the process group could wait for a process that hangs


def measure(process: Process, store: dist.Store, limit: timedelta) -> dict[str, Any]:
    """Return the fields of an `AllReduce`. Every rank.

    Raises: UserError: the sum is wrong, or the processes run different code.
    """
    join_process_group(process, store, timeout=limit)
    size = NUM_BYTES
    number = NUM_REDUCTIONS
    if is_cpu(process.device):
        size = NUM_BYTES_ON_CPU
        number = NUM_REDUCTIONS_ON_CPU
    tensor = torch.full((size // 4,), process.rank + 1.0, device=process.device)
    dist.all_reduce(tensor)
    if not (tensor == process.world_size * (process.world_size + 1) / 2).all():  # 1 + 2 + ...
        raise UserError(WRONG_SUM)
    tensor.zero_()  # or the sums would grow without limit
    dist.all_reduce(tensor)
    began = DeviceTime(process.device)
    for _ in range(number):
        dist.all_reduce(tensor)
    seconds = DeviceTime(process.device).seconds_since(began) / number
    # Training uses gloo too. The last exchange: no process exits while another one needs it.
    gloo: Any = dist.new_group(backend="gloo", timeout=limit)
    versions: list[Any] = [None] * process.world_size
    own = f"PyTorch {torch.__version__} and code {code_digest()}"
    dist.all_gather_object(versions, own, group=gloo)
    if other := next((found for found in versions if found != versions[0]), None):
        raise UserError(f"one machine has {versions[0]}, another one {other}")
    return {
        "num_processes": process.world_size,
        "backend": dist.get_backend(),
        # The bus bandwidth, as nccl-tests counts it.
        "bytes_per_second": 2 * (process.world_size - 1) / process.world_size * size / seconds,
    }


if __name__ == "__main__":
    main()
