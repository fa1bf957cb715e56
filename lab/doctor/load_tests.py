"""Start the processes of the load tests, and judge what they found."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from basics.gpu_readings import SLOWDOWNS
from basics.machine import PROJECT_DIR, code_digest
from lab.doctor.check import (
    Checks,
    Finding,
    Subject,
    num_processes,
    numbers,
    ok,
    problem,
    unknown,
    warning,
)
from lab.doctor.machine_checks import INSTALL_TORCH, OTHER_MACHINE
from reporting.speed import find_gpu

HANG_SECONDS = 8.0  # in one part; an exchange counts from when the last process begins it
LITTLE_OF_PEAK = 0.5  # of a GPU's peak; large products reach 60 to 90%
MUCH_SLOWER = 0.8  # of the fastest GPU's speed
SLOW_BUS = 4e9  # bytes a second; PCIe without peer-to-peer access has more
MUCH_SKEW = 1.0  # seconds
MEETING, FIRST_KERNEL = "nodes", "first kernel"
PRODUCTS, EXCHANGE = "matrix products", "all-reduce"
PARTS = ("PyTorch", MEETING, FIRST_KERNEL, "attention", "Triton", "peer-to-peer", PRODUCTS,
         EXCHANGE)
ADVICE = {  # by the part that fails, or a word of its error
    "import": "install it again: uv sync --reinstall-package torch",
    "attention": 'set attention to "auto" in train.json',
    "Triton": "install gcc and Python's headers, as setup_lambda.sh does, or set compile to false",
    EXCHANGE: "set NCCL_DEBUG=INFO and train a few steps: it names the connection that fails",
    "gloo": "set GLOO_SOCKET_IFNAME to the interface between the machines",
    "no kernel image": INSTALL_TORCH,
}


@dataclass(frozen=True)
class Result:
    """What one process has found, and how far it has come.

    Attributes:
        found, errors: by part; a part that has ended is in one of them.
        part: the one that it began last; empty before it has imported PyTorch.
        ended: how it ended, if that was too early: a signal, its last line, or its time limit.
        is_late: it did not end, but ran at its time limit.
        waited: seconds since its last part began, by its own machine's clock.
    """

    rank: int
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    part: str = ""
    ended: str = ""
    is_late: bool = False
    waited: float = 0.0

    @property
    def place(self) -> int:
        """The index of the last part that it began."""
        return PARTS.index(self.part or PARTS[0])


@contextmanager
def load_tests(subject: Subject, ranks: Sequence[dict[str, str]], *,
               store: str = "") -> Iterator[Callable[[], list[Result]]]:
    """Run processes while the block runs, and yield what waits for their results.

    Call it in the main thread: the processes end with the thread that has started them.

    Args:
        ranks: environment variables of each process, as torchrun sets them.
        store: begins the names of the keys in torchrun's store; empty without torchrun.
    """
    seconds = subject.time_limit * (2 if store else 1)  # to meet the other nodes' processes, too
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="lab-doctor-") as name:
        folder, processes = Path(name), []
        about = {"num_gpus": len(subject.gpus), "is_loading": not subject.busy, "store": store,
                 "file": "" if store else f"{name}/store", "seconds": subject.time_limit,
                 "runs_dir": str(subject.runs_dir.absolute()), "versions": versions(subject),
                 "run_name": subject.run.name if subject.run else None}
        path = os.pathsep.join(filter(None, (str(PROJECT_DIR), os.environ.get("PYTHONPATH"))))
        try:
            for each in ranks:
                output = folder / each["RANK"]
                with output.with_suffix(".log").open("wb") as log:
                    processes.append(subprocess.Popen(
                        [sys.executable, "-m", "lab.doctor.load", str(output), json.dumps(about)],
                        stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                        env=os.environ | {"PYTHONPATH": path} | each))
            yield lambda: [
                result_of(process, folder / each["RANK"], deadline, seconds)
                for process, each in zip(processes, ranks, strict=True)]
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                with suppress(subprocess.TimeoutExpired):  # one that waits for a dead driver
                    process.wait(2)


def versions(subject: Subject) -> dict[str, str]:
    """Return what must be the same on all nodes; code and configs as a digest."""
    found = {"PyTorch": version("torch"), "Python": ".".join(platform.python_version_tuple()[:2]),
             "the project's code": code_digest()}
    if subject.run is not None:
        configs = f"{subject.run.model!r} {subject.run.train!r}".encode()
        found["the run's configs"] = hashlib.blake2b(configs, digest_size=6).hexdigest()
    return found


def result_of(process: subprocess.Popen[bytes], output: Path, deadline: float,
              seconds: float) -> Result:
    """Wait for a process, at most until the deadline, and read the lines that it has written."""
    ended, is_late = "", False
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
        if status < 0:
            ended = f"killed by {signal.Signals(-status).name}"
        elif status:
            lines = output.with_suffix(".log").read_text(errors="replace").split("\n")
            ended = next((line.strip()[:120] for line in reversed(lines) if line.strip()),
                         f"exit status {status}")
    except subprocess.TimeoutExpired:
        ended, is_late = f"no answer within {seconds:g} s", True
    part, found, errors, waited = "", {}, {}, 0.0
    with suppress(OSError, ValueError):  # nothing written yet; the last line cut off by a kill
        waited = time.time() - output.stat().st_mtime
        for record in map(json.loads, output.read_text().splitlines()):
            part = record["part"]
            for key, place in (("found", found), ("error", errors)):
                place.update({part: record[key]} if key in record else {})
    return Result(int(output.name), found, errors, part, ended, is_late, waited)


def check_load(results: Sequence[Result]) -> Checks:
    """Judge what the processes have found, or why not all have finished, part by part."""
    checks = {}
    for part in PARTS:
        found = [result.found[part] for result in results if part in result.found]
        if failure := _why_not(part, results):
            checks[part] = failure
        elif found and part in JUDGES and (finding := JUDGES[part](found)):
            checks[part] = finding
        if part == PRODUCTS and (clocks := _clocks([each["gpu"] or {} for each in found])):
            checks["clocks"] = clocks
    return checks


def _why_not(part: str, results: Sequence[Result]) -> Finding | None:
    """Return why not all processes have finished a part; None if all have, or none began it."""
    place, known = PARTS.index(part), ADVICE.get(part, OTHER_MACHINE)
    stopped = [result for result in results if result.ended and result.place == place]
    for result in stopped:
        if not result.part and not result.is_late:
            return problem(f"cannot be imported: {result.ended}", ADVICE["import"])
        if not result.is_late:
            return problem(f"stopped on rank {result.rank}: {result.ended}", known)
    before = [result.rank for result in results if result.place < place and (
        result.ended or FIRST_KERNEL in result.errors)]
    if before and part in (PRODUCTS, EXCHANGE) and len(results) > 1:  # all take part in these
        return unknown(f"rank {before[0]} stopped before it")
    for result in results:
        if error := result.errors.get(part):
            text, _, advice = error.partition("; ")
            by_word = next((ADVICE[word] for word in ("gloo", "no kernel image") if word in text),
                           known)
            return problem(f"failed on rank {result.rank}: {text}", advice or by_word)
    if not stopped:
        return None
    # In an exchange one waits for the last one that begins; an import and a CPU may only be slow.
    waited = (min if part == EXCHANGE else max)(result.waited for result in stopped)
    first = stopped[0]
    may_be_slow = not first.part or first.found.get("PyTorch", {}).get("num_gpus") == 0
    if waited < HANG_SECONDS or (may_be_slow and part not in (MEETING, EXCHANGE)):
        return unknown(first.ended, "give the tests more time with --time-limit")
    return problem(f"has not ended on rank {first.rank} after {waited:.0f} s", known)


def _meeting(found: Sequence[dict[str, Any]]) -> Finding | None:
    """Compare what must be the same on all nodes, and their clocks at one moment."""
    nodes = {each["node"]: each for each in reversed(found[0]["everybody"])}
    if len(nodes) == 1:
        return None
    (first, one), *others = sorted(nodes.items())
    for node, other in others:
        for what, value in one["versions"].items():
            if value != (theirs := other["versions"].get(what)):
                return problem(
                    f"{what} differs: {value} on node {first}, {theirs} on node {node}", "bring all"
                    " nodes to the same commit and run uv sync on each; runs/ is best shared"
                    " between them")
    ahead = {node: other["clock"] - one["clock"] for node, other in others}
    worst = max(ahead, key=lambda node: abs(ahead[node]))
    text = (f"{', '.join(one['versions'])}: the same on all {len(nodes)}; the clock of node {worst}"
            f" is {abs(ahead[worst]):,.2f} s {'ahead of' if ahead[worst] > 0 else 'behind'} that of"
            f" node {first}")
    if abs(ahead[worst]) >= MUCH_SKEW:
        return warning(text, "set the clocks (timedatectl set-ntp true): logs and the hub need the"
                             " time")
    busy = [str(node) for node, other in sorted(nodes.items()) if not other["is_loading"]]
    return ok(text) if not busy else warning(
        f"{text}; nothing is loaded, because of node {', '.join(busy)}", "see that node's report")


def _attention(found: Sequence[dict[str, Any]]) -> Finding:
    first = found[0]
    text = f"{first['kernel']}, in {first['precision']}{first['of']}"
    return ok(text) if first["kernel"] != "math" or not first["on_gpu"] else warning(
        text, 'it is slow; remove attention "math" and precision "fp32" from train.json, or use a'
              " head size (emb_dim / n_heads) of 64 or 128")


def _triton(found: Sequence[dict[str, Any]]) -> Finding:
    text = f"Triton {found[0]['version']} compiles and runs"
    return ok(text) if found[0]["is_right"] else problem(
        f"{text}, with wrong results", OTHER_MACHINE)


def _peers(found: Sequence[dict[str, Any]]) -> Finding:
    pairs, without = found[0]["num_pairs"], found[0]["without"]
    return ok(f"all {pairs} pairs of GPUs") if not without else warning(
        f"{len(without)} of {pairs} pairs of GPUs cannot, such as {without[0][0]} and"
        f" {without[0][1]}", "data goes through the RAM, which is slower; consumer cards and some"
        " virtual machines cannot do it")


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
    return ok(text) if not gpu or min(speeds) >= LITTLE_OF_PEAK * gpu.peak_flops else warning(
        text, "large products reach 60 to 90%; see the lines on clocks and temperature, and look"
              " for other programs on the GPUs")


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


def _exchange(found: Sequence[dict[str, Any]]) -> Finding:
    if not all(each["is_right"] for each in found):
        return problem("gives wrong sums", "the machine is defective: take another one")
    backend, number = found[0]["backend"], found[0]["world_size"]
    slowest = max(each["seconds"] for each in found)
    speed = 2 * (number - 1) / number * found[0]["bytes"] / slowest  # as nccl-tests counts
    text = f"{speed / 1e9:,.3g} GB/s bus bandwidth, {num_processes(number)}, {backend}"
    return ok(text) if speed >= SLOW_BUS or backend == "gloo" else warning(
        text, "each step waits long for the gradients: raise gradient accumulation (a larger"
              ' global_batch_size), set "all_reduce_dtype": "bf16", or take a machine with NVLink')


JUDGES: dict[str, Callable[[Sequence[dict[str, Any]]], Finding | None]] = {
    "PyTorch": lambda found: ok(found[0]["version"]), MEETING: _meeting,
    "attention": _attention, "Triton": _triton, "peer-to-peer": _peers, PRODUCTS: _products,
    EXCHANGE: _exchange}
