"""Start the load tests in processes of their own, and judge what they found."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from basics.gpu_readings import SLOWDOWNS
from basics.machine import PROJECT_DIR, num_cpu_cores
from lab.doctor.check import (
    INSTALL_TORCH,
    OTHER_MACHINE,
    Checks,
    Finding,
    Subject,
    num_processes,
    numbers,
    ok,
    problem,
    split_error,
    unknown,
    warn_unless,
    warning,
)
from reporting.speed import find_gpu

HANG_SECONDS = 8.0  # in one part; an exchange counts from when the last process begins it
LITTLE_OF_PEAK = 0.5  # of a GPU's peak; large products reach 60 to 90%
MUCH_SLOWER = 0.8  # of the fastest GPU's speed
SLOW_BUS = 4e9  # bytes a second; PCIe without peer-to-peer access has more
PRODUCTS, EXCHANGE = "matrix products", "all-reduce"
PARTS = ("PyTorch", "first kernel", "attention", "Triton", "peer-to-peer", PRODUCTS, EXCHANGE)
ADVICE = {  # by the part that fails, or a word of its error
    "import": "install it again: uv sync --reinstall-package torch",
    "attention": 'set attention to "auto" in train.json',
    "Triton": "install gcc and Python's headers, as setup_lambda.sh does, or set compile to false",
    EXCHANGE: "set NCCL_DEBUG=INFO and train a few steps: it names the connection that fails",
    "gloo": "set GLOO_SOCKET_IFNAME to the interface between the machines",
    "no kernel image": INSTALL_TORCH,
}
FAILED_FIRST = re.compile(  # in torchrun's report
    r"Root Cause.*?^\s*rank\s*: (\d+).*?^\s*exitcode\s*: (-?\d+)", re.DOTALL | re.MULTILINE)
LAST_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)

MORE_TIME = "give the tests more time with --time-limit"

ByRank = dict[int, Any]


def _by_part() -> defaultdict[str, ByRank]:
    return defaultdict(dict)


@dataclass
class Load:
    """What the processes of the load tests have found, and how far they have come.

    Attributes:
        begun, found, error: by part and rank; a part that has ended is in one of the last two.
        how: they ended, if too early: a signal, an error, or the time limit; `is_late` if that.
        failed_rank: that ended first; None if that is not known.
        seconds: when they ended, in seconds since the epoch, as `begun`.
    """

    begun: dict[str, ByRank] = field(default_factory=_by_part)
    found: dict[str, ByRank] = field(default_factory=_by_part)
    error: dict[str, ByRank] = field(default_factory=_by_part)
    how: str = ""
    is_late: bool = False
    failed_rank: int | None = None
    seconds: float = 0.0

    def add(self, lines: str) -> None:
        """Add what the processes have written; the last line may be cut off."""
        for line in lines.split("\n"):
            with suppress(ValueError):
                record = json.loads(line)
                for kind in record.keys() & {"begun", "found", "error"}:
                    getattr(self, kind)[record["part"]][record["rank"]] = record[kind]


@contextmanager
def load_tests(subject: Subject) -> Iterator[Callable[[], Load]]:
    """Run the tests while the block runs, and yield what waits for their results.

    One process for each GPU, two on a CPU, one that only reports if others use the machine.
    """
    number = 1 if subject.busy else len(subject.gpus) or min(2, num_cpu_cores())
    spec = {"num_gpus": len(subject.gpus), "is_loading": not subject.busy,
            "seconds": subject.time_limit, "runs_dir": str(subject.runs_dir.absolute()),
            "run_name": subject.run.name if subject.run else None}
    path = os.pathsep.join(filter(None, (str(PROJECT_DIR), os.environ.get("PYTHONPATH"))))
    deadline = time.monotonic() + subject.time_limit
    with tempfile.TemporaryDirectory(prefix="lab-doctor-") as folder:
        output, log = Path(folder, "parts"), Path(folder, "log")
        # Without its address torchrun asks for that of the machine's name, which may have none.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--local-addr=127.0.0.1", f"--nproc-per-node={number}",
                   "-m", "lab.doctor.load", str(output), json.dumps(spec)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | {"PYTHONPATH": path})

        def results() -> Load:
            load = Load()
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
                if status:
                    load.failed_rank, load.how = how_it_failed(
                        log.read_text(errors="replace"), status)
            except subprocess.TimeoutExpired:
                load.how, load.is_late = f"no answer within {subject.time_limit:g} s", True
            load.seconds = time.time()
            with suppress(OSError):  # nothing is written yet
                load.add(output.read_text())
            return load

        try:
            yield results
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, and its processes, which it has put into sessions of their own."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # one that waits for a dead driver
        process.wait(2)


def how_it_failed(log: str, status: int) -> tuple[int | None, str]:
    """Return the rank that ended first and how, from what torchrun has printed."""
    errors = LAST_ERROR.findall(log)
    text = errors[-1][:120] if errors else f"exit status {status}"
    if not (first := FAILED_FIRST.search(log)):
        return None, text
    rank, code = map(int, first.groups())
    return rank, f"killed by {signal.Signals(-code).name}" if code < 0 else text


def check_load(load: Load) -> Checks:
    """Judge what the processes have found, or why not all have finished, part by part."""
    checks = {}
    for part in PARTS:
        found = [load.found[part][rank] for rank in sorted(load.found[part])]
        if failure := _why_not(part, load):
            checks[part] = failure
        elif found and part in JUDGES:
            checks[part] = JUDGES[part](found)
        elif found and "finding" in found[0]:
            checks[part] = Finding(*found[0]["finding"])
        if part == PRODUCTS and (clocks := _clocks([each["gpu"] or {} for each in found])):
            checks["clocks"] = clocks
    if not load.begun[PARTS[0]] and load.is_late:
        checks[PARTS[0]] = unknown(load.how, MORE_TIME)
    elif not load.begun[PARTS[0]]:
        checks[PARTS[0]] = problem(f"cannot be imported: {load.how}", ADVICE["import"])
    elif load.how and not load.is_late:
        rank = load.failed_rank or 0
        last = [PARTS[0], *(part for part in PARTS if rank in load.begun[part])][-1]
        checks[last] = problem(f"stopped on rank {rank}: {load.how}",
                               ADVICE.get(last, OTHER_MACHINE))
    return checks


def _why_not(part: str, load: Load) -> Finding | None:
    """Return why not all processes have done a part; None if all have, or none began it."""
    known, begun = ADVICE.get(part, OTHER_MACHINE), load.begun[part]
    missing = load.begun[PARTS[0]].keys() - begun.keys()
    if missing and begun and part in (PRODUCTS, EXCHANGE):  # all take part in these
        first = load.failed_rank if load.failed_rank in missing else min(missing)
        return unknown(f"rank {first} stopped before it")
    if load.error[part]:
        rank, error = min(load.error[part].items())
        by_word = [ADVICE[word] for word in ("gloo", "no kernel image") if word in error]
        text, advice = split_error(error, *by_word, known)
        return problem(f"failed on rank {rank}: {text}", advice)
    waiting = begun.keys() - load.found[part].keys()
    if not waiting or not load.is_late:
        return None
    # In an exchange one waits for the last one that begins; a CPU may only be slow.
    seconds = load.seconds - (max if part == EXCHANGE else min)(begun[rank] for rank in waiting)
    on_gpu = load.found[PARTS[0]].get(0, {}).get("num_gpus") != 0
    if seconds < HANG_SECONDS or not (on_gpu or part == EXCHANGE):
        return unknown(load.how, MORE_TIME)
    return problem(f"has not ended on rank {min(waiting)} after {seconds:.0f} s", known)


def _products(found: Sequence[dict[str, Any]]) -> Finding:
    """Compare each GPU's speed with its peak and with the others."""
    speeds, on_gpu = [each["flops"] for each in found], found[0]["gpu"] is not None
    size, unit = (1e12, "TFLOP/s") if on_gpu else (1e9, "GFLOP/s")
    values = dict.fromkeys(f"{speed / size:,.3g}" for speed in (min(speeds), max(speeds)))
    text = f"{' to '.join(values)} {unit} in {found[0]['dtype']}"
    if not on_gpu:
        return ok(text + (f" by each of {len(speeds)} processes" if len(speeds) > 1 else ""))
    if gpu := find_gpu(found[0]["name"]):
        text += f", {min(speeds) / gpu.peak_flops:.0%} of the peak of {gpu.name}"
    slow = [number for number, speed in enumerate(speeds) if speed < MUCH_SLOWER * max(speeds)]
    if slow:
        return warning(f"{text}; {numbers(slow)} much slower than the others",
                       "all GPUs wait for the slowest; see the lines on clocks and temperature")
    return warn_unless(
        not gpu or min(speeds) >= LITTLE_OF_PEAK * gpu.peak_flops, text, "large products reach 60"
        " to 90%; see the lines on clocks and temperature, and look for other programs on the GPUs")


def _clocks(gpus: Sequence[dict[str, Any]]) -> Finding | None:
    """Check the clocks while the GPUs computed, and whether heat or the supply lowered them."""
    known = [gpu for gpu in gpus if gpu.get("sm_clock_mhz") and gpu.get("max_sm_clock_mhz")]
    if not known:
        return None
    clocks = [gpu["sm_clock_mhz"] for gpu in known]
    degrees = [gpu["temperature_c"] for gpu in known if gpu.get("temperature_c") is not None]
    text = (f"{min(clocks):,.0f} to {max(clocks):,.0f} of"
            f" {max(gpu['max_sm_clock_mhz'] for gpu in known):,.0f} MHz under load"
            + (f", at most {max(degrees):.0f} °C" if degrees else ""))
    slowed = {number: reason for number, gpu in enumerate(gpus)
              for reason in reversed(gpu.get("throttle_reasons") or ()) if reason in SLOWDOWNS}
    return ok(text) if not slowed else warning(
        f"{text}; {numbers(list(slowed))} slowed down: {next(iter(slowed.values()))}",
        "the machine's cooling or power supply is too weak; take another one")


def judge_exchange(found: Sequence[dict[str, Any]]) -> Finding:
    """Judge the sums and the speed of the exchange between some processes."""
    if not all(each["is_right"] for each in found):
        return problem("gives wrong sums", "the machine is defective: take another one")
    backend, number = found[0]["backend"], found[0]["world_size"]
    slowest = max(each["seconds"] for each in found)
    speed = 2 * (number - 1) / number * found[0]["bytes"] / slowest  # as nccl-tests counts
    return warn_unless(
        speed >= SLOW_BUS or backend == "gloo", f"{speed / 1e9:,.3g} GB/s bus bandwidth,"
        f" {num_processes(number)}, {backend}", "each step waits long for the gradients: raise"
        ' gradient accumulation (a larger global_batch_size), set "all_reduce_dtype": "bf16", or'
        " take a machine with NVLink")


JUDGES: dict[str, Callable[[Sequence[dict[str, Any]]], Finding]] = {  # of what all ranks found
    "PyTorch": lambda found: ok(found[0]["version"]), PRODUCTS: _products, EXCHANGE: judge_exchange}
