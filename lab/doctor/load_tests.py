"""Start the load tests in processes of their own, and judge what they found."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from basics.machine import PROJECT_DIR, num_cpu_cores
from basics.text import counted
from lab.doctor import machine_checks
from lab.doctor.machine_checks import Checks, Facts, Finding, Subject, ok, ok_if, problem, unknown
from reporting.speed import find_gpu

HANG_SECONDS = 8.0  # in one part, since the last process has begun it
LITTLE_OF_PEAK = 0.5  # of a GPU's peak; large products reach 60 to 90%
MUCH_SLOWER = 0.8  # of the fastest GPU's speed
SLOW_BUS = 4e9  # bytes a second; PCIe without peer-to-peer access has more
PRODUCTS = "matrix products"
EXCHANGE = "all-reduce"
PARTS = ("PyTorch", PRODUCTS, EXCHANGE)
ADVICE = {  # by the part that fails
    "PyTorch": "install it again: uv sync --reinstall-package torch",
    EXCHANGE: "set NCCL_DEBUG=INFO and train a few steps: it names the connection that fails",
}
ADVICE_ON_ERROR = {  # by a word of its text
    "gloo": "set GLOO_SOCKET_IFNAME to the interface between the machines",
    "no kernel image": machine_checks.INSTALL_TORCH,
}
MORE_TIME = "give the tests more time with --time-limit"
PROCESS = "lab.doctor.load_process"


@dataclass
class Outcome:
    """What a process of the load tests has done.

    Of each part by its name: when it has `begun` it, in seconds since the epoch, and what it
    `found`, or the `error`; a process that crashes or hangs has neither.
    """

    parts: dict[str, Facts] = field(default_factory=dict)
    end: str = ""  # too early: a signal or an error

    @classmethod
    def read(cls, path: Path, process: subprocess.Popen[bytes]) -> Self:
        """Read what a process has written; the last line may be cut off."""
        outcome = cls()
        status = process.poll()
        with suppress(OSError, ValueError):  # nothing is written yet
            for line in path.read_text().splitlines():
                record = json.loads(line)
                outcome.parts.setdefault(record.pop("part"), {}).update(record)
        if status and status < 0:
            outcome.end = f"killed by {signal.Signals(-status).name}"
        elif status:
            said = path.with_suffix(".log").read_text(errors="replace").strip()
            last_line = said.rpartition("\n")[2].strip()
            outcome.end = last_line[:120] or f"exit status {status}"
        return outcome

    def found(self, part: str) -> Any:
        return self.parts.get(part, {}).get("found")


def load_tests(subject: Subject) -> list[Outcome]:
    """Run the tests until all have ended, one has failed, or the time is over.

    One process for each GPU, two on a CPU, one that only reports if others use the machine. They
    need no torchrun: they meet in a file, and each has an exit status of its own.
    """
    number = 1 if subject.busy else len(subject.gpus) or min(2, num_cpu_cores())
    spec = {
        "num_gpus": len(subject.gpus),
        "is_loading": not subject.busy,
        "seconds": subject.time_limit,
    }
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(PROJECT_DIR), os.environ.get("PYTHONPATH")))
        ),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "GROUP_WORLD_SIZE": "1",
    }
    processes = []
    deadline = time.monotonic() + subject.time_limit
    with tempfile.TemporaryDirectory(prefix="lab-doctor-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", PROCESS, folder, json.dumps(spec)]
        try:
            for rank in range(number):
                with Path(folder, f"{rank}.log").open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment | {"RANK": str(rank)},
                    )
                processes.append(process)
            statuses: list[int | None] = [None]
            while time.monotonic() < deadline and None in statuses and not any(statuses):
                time.sleep(0.05)
                statuses = [process.poll() for process in processes]
            return [
                Outcome.read(Path(folder, str(rank)), process)
                for rank, process in enumerate(processes)
            ]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                with suppress(subprocess.TimeoutExpired):  # one that waits for a dead driver
                    process.wait(2)


def check_load(processes: list[Outcome]) -> Checks:
    findings = {part: judge_part(part, processes) for part in PARTS}
    return {part: finding for part, finding in findings.items() if finding}


def judge_part(part: str, processes: list[Outcome]) -> Finding | None:
    """Judge a part; None if no process has come to it, or there is nothing to say."""
    records = [process.parts.get(part, {}) for process in processes]
    for rank, (process, record) in enumerate(zip(processes, records, strict=True)):
        error = record.get("error", "")
        if process.end and part == [PARTS[0], *process.parts][-1]:  # the last one it has begun
            error = error or process.end
        if error:
            return problem(f"failed on rank {rank}: {error}", advice_on(part, error))
    for rank, record in enumerate(records):
        if not record:
            is_known = not any(records) and part != PARTS[0]  # an earlier part tells it
            return None if is_known else unknown(f"rank {rank} has not come to it", MORE_TIME)
    waiting = [rank for rank, record in enumerate(records) if "found" not in record]
    if waiting:
        seconds = time.time() - max(records[rank]["begun"] for rank in waiting)
        facts = processes[0].found(PARTS[0]) or {}
        may_be_slow = part != EXCHANGE and facts.get("num_gpus") == 0  # a CPU
        if seconds < HANG_SECONDS or may_be_slow:
            return unknown("it has not ended in time", MORE_TIME)
        return problem(f"has not ended on rank {waiting[0]} after {seconds:.0f} s", advice_on(part))
    found = [record["found"] for record in records]
    if part == PARTS[0]:
        return ok(found[0]["version"])
    return judge_products(found) if part == PRODUCTS else judge_exchange(found)


def advice_on(part: str, error: str = "") -> str:
    return next(
        (advice for word, advice in ADVICE_ON_ERROR.items() if word in error),
        ADVICE.get(part, machine_checks.OTHER_MACHINE),
    )


def judge_products(found: list[Facts]) -> Finding:
    """Compare each GPU's speed with its peak and with the others."""
    speeds = [each["flops"] for each in found]
    name = found[0]["gpu"]
    size, unit = (1e12, "TFLOP/s") if name else (1e9, "GFLOP/s")
    slowest = min(speeds)
    fastest = max(speeds)
    values = dict.fromkeys(f"{speed / size:,.3g}" for speed in (slowest, fastest))
    text = f"{' to '.join(values)} {unit} in {found[0]['dtype']}"
    if not name:
        return ok(f"{text} by each of {counted(len(speeds), 'process', 'processes')}")
    if gpu := find_gpu(name):
        text += f", {slowest / gpu.peak_flops:.0%} of the peak of {gpu.name}"
    slow = [str(rank) for rank, speed in enumerate(speeds) if speed < MUCH_SLOWER * fastest]
    if slow:
        text += f"; GPU {', '.join(slow)} much slower than the others"
    is_fine = not slow and (not gpu or slowest >= LITTLE_OF_PEAK * gpu.peak_flops)
    return ok_if(
        is_fine,
        text,
        "large products reach 60 to 90%, and all GPUs wait for the slowest:"
        " nvidia-smi -q -d PERFORMANCE tells whether heat or the power supply slows a GPU down;"
        " look for other programs on it, or take another machine",
    )


def judge_exchange(found: list[Facts]) -> Finding:
    """Judge the sums and the speed of the exchange between some processes."""
    if not all(each["is_right"] for each in found):
        return problem("gives wrong sums", "the machine is defective: take another one")
    backend = found[0]["backend"]
    number = found[0]["world_size"]
    slowest = max(each["seconds"] for each in found)
    speed = 2 * (number - 1) / number * found[0]["bytes"] / slowest  # as nccl-tests counts
    return ok_if(
        speed >= SLOW_BUS or backend == "gloo",
        f"{speed / 1e9:,.3g} GB/s bus bandwidth,"
        f" {counted(number, 'process', 'processes')}, {backend}",
        "each step waits long for the gradients: raise gradient accumulation (a larger"
        ' global_batch_size), set "all_reduce_dtype": "bf16", or take a machine with NVLink',
    )
