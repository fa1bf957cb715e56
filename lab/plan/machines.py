"""Machines that can be rented: GPUs, their count, and the price."""

from __future__ import annotations

import re
from dataclasses import dataclass

from basics.errors import UserError
from reporting.speed import GPUS, Gpu, find_gpu

MACHINE = re.compile(r"(?P<name>[^=]+)=(?P<count>[1-9]\d{0,3})x(?P<gpu>[^@]+)@(?P<usd>\d+(\.\d+)?)")


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs of one kind, and what an hour of it costs in US dollars."""

    name: str
    num_gpus: int
    gpu: Gpu
    usd_per_hour: float


def _known(num_gpus: int, gpu: str, usd_per_hour: float) -> Machine:
    found = find_gpu(gpu)
    assert found is not None
    return Machine(f"{num_gpus}x {found.name}", num_gpus, found, usd_per_hour)


def known_machines() -> list[Machine]:
    """Give the machines of the original system's runs, at the prices of December 2025."""
    return [
        _known(8, "A100-40", 10.32),
        _known(8, "A100-80", 14.32),
        _known(8, "H100", 23.92),
        _known(8, "B200", 39.92),
        _known(2, "H100", 6.38),
    ]


def parse_machine(text: str) -> Machine:
    """Read `name=COUNTxGPU@USD_PER_HOUR`. Raises: UserError, naming the GPUs that are known."""
    match = MACHINE.fullmatch(text)
    if match is None:
        raise UserError(f"--machine {text[:60]!r}: wanted name=COUNTxGPU@USD_PER_HOUR,"
                        " as in box=8xH100@23.92")
    gpu = find_gpu(match["gpu"])
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise UserError(f"--machine {text[:60]!r}: no GPU {match['gpu'][:30]!r} is known; wanted"
                        f" one of {known}")
    if float(match["usd"]) <= 0:
        raise UserError(f"--machine {text[:60]!r}: the price is 0; wanted dollars an hour")
    return Machine(match["name"], int(match["count"]), gpu, float(match["usd"]))
