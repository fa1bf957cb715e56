"""Machines that can be rented: GPU type, GPU count and price."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from basics.errors import UserError
from reporting.speed import GPUS, Gpu, find_gpu

MAX_NAME = 16  # characters, so that the tables fit a terminal
MACHINE = re.compile(rf"(?P<name>[!-<>-~][ -<>-~]{{0,{MAX_NAME - 1}}})"
                     r"=(?P<count>[1-9]\d{0,3})x(?P<gpu>[^@]+)@(?P<usd>\d{1,5}(\.\d{1,9})?)")
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
    """Parse `name=COUNTxGPU@USD_PER_HOUR`. Raises: UserError, with the nearest known GPUs."""
    match = MACHINE.fullmatch(text)
    if match is None:
        raise UserError(f"--machine {text[:60]!r}: wanted name=COUNTxGPU@USD_PER_HOUR,"
                        f" for example box=8xH100@23.92 (name: {MAX_NAME} characters at most)")
    gpu = find_gpu(match["gpu"])
    if gpu is None:
        names = [gpu.name for gpu in GPUS]
        nearest = difflib.get_close_matches(match["gpu"].upper(), names, cutoff=0.3)
        like = f", such as {', '.join(nearest)}" if nearest else ""
        raise UserError(f"--machine: unknown GPU {match['gpu'][:30]!r}; wanted one that lab plan"
                        f" --help lists{like}")
    if float(match["usd"]) <= 0:
        raise UserError(f"--machine {text[:60]!r}: the price is 0; wanted US dollars per hour")
    return Machine(match["name"], int(match["count"]), gpu, float(match["usd"]))
