"""Machines that can be rented: GPU type, GPU count and price."""

from __future__ import annotations

import re
from dataclasses import dataclass

from basics.errors import UserError
from reporting.speed import GPUS, Gpu, find_gpu

MACHINE = re.compile(r"(?P<name>[^=]+)=(?P<count>[1-9]\d{0,3})x(?P<gpu>[^@]+)@(?P<usd>\d+(\.\d+)?)")
KNOWN_MACHINES = (  # those of the original system's runs, at the prices of December 2025
    "8x A100-40=8xA100-40@10.32", "8x A100-80=8xA100-80@14.32", "8x H100=8xH100@23.92",
    "8x B200=8xB200@39.92", "2x H100=2xH100@6.38",
)


@dataclass(frozen=True)
class Machine:
    """A machine with GPUs of one type and its price per hour in US dollars."""

    name: str
    num_gpus: int
    gpu: Gpu
    usd_per_hour: float


def known_machines() -> list[Machine]:
    """Return the machines of the original system's runs, at the prices of December 2025."""
    return [parse_machine(text) for text in KNOWN_MACHINES]


def parse_machine(text: str) -> Machine:
    """Parse `name=COUNTxGPU@USD_PER_HOUR`. Raises: UserError, with the names of the known GPUs."""
    match = MACHINE.fullmatch(text)
    if match is None:
        raise UserError(f"--machine {text[:60]!r}: wanted name=COUNTxGPU@USD_PER_HOUR,"
                        " for example box=8xH100@23.92")
    gpu = find_gpu(match["gpu"])
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise UserError(f"--machine {text[:60]!r}: unknown GPU {match['gpu'][:30]!r}; wanted"
                        f" one of {known}")
    if float(match["usd"]) <= 0:
        raise UserError(f"--machine {text[:60]!r}: the price is 0; wanted US dollars per hour")
    return Machine(match["name"], int(match["count"]), gpu, float(match["usd"]))
