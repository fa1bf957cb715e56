"""Start the processes of the load tests, and judge what they found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from basics.files import read_regular_file
from basics.gpu_readings import SLOWDOWNS
from basics.machine import PROJECT_DIR
from lab.doctor.check import Finding, Subject, ok, problem, unknown, warning
from lab.doctor.gpu_checks import numbers
from lab.doctor.load_process import Spec
from lab.doctor.load_result import HANG_SECONDS, Result, read_result
from reporting.speed import find_gpu

LITTLE_OF_PEAK = 0.5  # of a GPU's peak; large products reach 60 to 90%
MUCH_SLOWER = 0.8  # of the fastest GPU's speed
SLOW_BUS = 4e9  # bytes a second; PCIe without peer-to-peer access has more
OTHER_MACHINE = "restart the machine, or take another one"
MORE_TIME = "give the tests more time with --time-limit"


class LoadTests:
    """Processes of the load tests, which write to files in a directory."""

    def __init__(self, folder: Path, specs: Sequence[Spec], *, seconds: float) -> None:
        self._folder, self._specs = folder, specs
        self._deadline, self._seconds = time.monotonic() + seconds, seconds
        self._processes = [self._start(spec) for spec in specs]

    def _start(self, spec: Spec) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(PROJECT_DIR), os.environ.get("PYTHONPATH"))))
        with Path(f"{spec.output}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lab.doctor.load_process", spec.to_json()], stdout=log,
                stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path})

    def results(self) -> list[Result]:
        """Wait for the processes, or their time limit, and read what they have written."""
        return [self._result(spec, process)
                for spec, process in zip(self._specs, self._processes, strict=True)]

    def _result(self, spec: Spec, process: subprocess.Popen[bytes]) -> Result:
        try:
            status = process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return read_result(spec, f"no answer within {self._seconds:g} s", is_late=True)
        return read_result(spec, "" if status == 0 else _last_line(spec, status))

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # one that waits for a dead driver
                process.wait(2)


@contextmanager
def load_tests(subject: Subject, launch: Mapping[str, Any], *,
               seconds: float) -> Iterator[LoadTests]:
    """Run processes while the block runs; none is left after it.

    Call it in the main thread: the processes end with the thread that has started them.

    Args:
        launch: ranks, world size, and the name of the store's keys under torchrun.
    """
    with tempfile.TemporaryDirectory(prefix="lab-doctor-") as name:
        folder = Path(name)
        specs = [Spec(
            output=str(folder / f"{rank}"), rank=rank, world_size=launch["world_size"],
            local_rank=local_rank, num_gpus=len(subject.gpus), seconds=seconds,
            store="" if launch["name"] else str(folder / "store"), name=launch["name"],
            is_loading=not subject.busy, runs_dir=str(subject.runs_dir.absolute()),
            run_name=subject.run.name if subject.run else None,
        ) for local_rank, rank in launch["ranks"]]
        tests = LoadTests(folder, specs, seconds=seconds)
        try:
            yield tests
        finally:
            tests.end()


def _last_line(spec: Spec, status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with suppress(OSError):
        lines = read_regular_file(Path(f"{spec.output}.log")).split("\n")
        return next((line.strip()[:120] for line in reversed(lines) if line.strip()), "")
    return f"exit status {status}"


def check_torch(results: Sequence[Result]) -> Finding | None:
    """Report PyTorch's version, or that it cannot even be imported."""
    first = results[0]
    if "import" in first.errors:
        return problem(f"cannot be imported: {first.errors['import']}",
                       "install it again: uv sync --reinstall-package torch")
    facts = first.found.get("torch")
    if "torch" in first.errors:
        return problem(f"cannot tell what GPUs there are: {first.errors['torch']}", OTHER_MACHINE)
    return ok(facts["version"]) if facts else _not_found([first], "torch")


def check_attention(results: Sequence[Result]) -> Finding | None:
    """Report the attention kernel that PyTorch chooses."""
    found, error = results[0].found.get("attention"), results[0].errors.get("attention")
    if error:
        text, _, advice = error.partition("; ")
        return problem(text, advice or 'set attention to "auto" in train.json')
    if found is None:
        return _not_found(results[:1], "attention")
    text = f"{found['kernel']}, in {found['precision']}"
    text += f" ({found['of']})" if found["of"] else ""
    is_slow = found["kernel"] == "math" and (results[0].found["torch"]["num_gpus"])
    return ok(text) if not is_slow else warning(
        text, 'it is slow; remove attention "math" and precision "fp32" from train.json, or use a'
              " head size (emb_dim / n_heads) of 64 or 128")


def check_triton(results: Sequence[Result]) -> Finding | None:
    """Report whether compiled code runs: Triton needs a C compiler and Python's headers."""
    first = results[0]
    if "triton" not in first.began:
        return None  # no GPU, or GPUs in use
    advice = "install gcc and Python's headers, as setup_lambda.sh does, or set compile to false"
    if error := first.errors.get("triton"):
        return problem(f"a Triton kernel cannot be compiled or run: {error}", advice)
    found = first.found.get("triton")
    if found is None:
        return _not_found([first], "triton", advice)
    text = f"Triton {found['version']} compiles and runs"
    return ok(text) if found["is_right"] else problem(f"{text}, with wrong results", OTHER_MACHINE)


def check_peers(results: Sequence[Result]) -> Finding | None:
    """Check that the GPUs can read each other's memory."""
    if "peers" not in results[0].began:
        return None  # fewer than two GPUs, or GPUs in use
    found = results[0].found.get("peers")
    if found is None:
        return _not_found(results[:1], "peers")
    without = found["without"]
    if not without:
        return ok(f"all {found['num_pairs']} pairs of GPUs")
    return warning(f"{len(without)} of {found['num_pairs']} pairs of GPUs cannot, such as"
                   f" {without[0][0]} and {without[0][1]}",
                   "data goes through the RAM, which is slower; consumer cards and some virtual"
                   " machines cannot do it")


def check_matmul(results: Sequence[Result]) -> Finding | None:
    """Compare each GPU's speed with its peak and with the others."""
    for result in results:
        if error := result.errors.get("device") or result.errors.get("matmul"):
            return problem(f"failed on rank {result.rank}: {error}", OTHER_MACHINE)
    found = [result.found["matmul"] for result in results if "matmul" in result.found]
    if len(found) < len(results):
        return _not_found(results, "matmul")
    speeds = [each["flops"] for each in found]
    gpu = find_gpu(found[0]["name"])
    unit, size = ("GFLOP/s", 1e9) if found[0]["gpu"] is None else ("TFLOP/s", 1e12)
    low, high = (f"{flops / size:,.3g}" for flops in (min(speeds), max(speeds)))
    text = f"{low if low == high else f'{low} to {high}'} {unit} in {found[0]['dtype']}"
    if found[0]["gpu"] is None:
        return ok(text if len(speeds) == 1 else f"{text} by each of {len(speeds)} processes")
    if gpu:
        text += f", {min(speeds) / gpu.peak_flops:.0%} of the peak of {gpu.name}"
    slow = [number for number, speed in enumerate(speeds) if speed < MUCH_SLOWER * max(speeds)]
    if slow:
        return warning(f"{text}; {numbers(slow)} much slower than the others",
                       "all GPUs wait for the slowest; see the lines on clocks and temperature")
    if gpu and min(speeds) < LITTLE_OF_PEAK * gpu.peak_flops:
        return warning(text, "large products reach 60 to 90%; see the lines on clocks and"
                       " temperature, and look for other programs on the GPUs")
    return ok(text)


def check_clocks(results: Sequence[Result]) -> Finding | None:
    """Check the clocks while the GPUs computed, and whether heat or the supply lowered them."""
    gpus = [result.found.get("matmul", {}).get("gpu") or {} for result in results]
    known = [gpu for gpu in gpus if gpu.get("sm_clock_mhz") and gpu.get("max_sm_clock_mhz")]
    if not known:
        return None
    clocks = [gpu["sm_clock_mhz"] for gpu in known]
    text = (f"{min(clocks):,.0f} to {max(clocks):,.0f} of"
            f" {max(gpu['max_sm_clock_mhz'] for gpu in known):,.0f} MHz under load")
    degrees = [gpu["temperature_c"] for gpu in known if gpu.get("temperature_c") is not None]
    text += f", at most {max(degrees):.0f} °C" if degrees else ""
    slowed = {number: [reason for reason in gpu.get("throttle_reasons") or ()
                       if reason in SLOWDOWNS] for number, gpu in enumerate(gpus)}
    slowed = {number: reasons for number, reasons in slowed.items() if reasons}
    if slowed:
        return warning(f"{text}; {numbers(list(slowed))} slowed down:"
                       f" {next(iter(slowed.values()))[0]}",
                       "the machine's cooling or power supply is too weak; take another one")
    return ok(text)


def check_all_reduce(results: Sequence[Result]) -> Finding | None:
    """Judge the exchange of data between all processes."""
    if len(results) < 2:
        return None
    advice = "set NCCL_DEBUG=INFO and train a few steps: it names the connection that fails"
    for result in results:
        if error := result.errors.get("all_reduce"):
            return problem(f"failed on rank {result.rank}: {error}", advice if "gloo" not in error
                           else "set GLOO_SOCKET_IFNAME to the interface between the machines")
    found = [result.found["all_reduce"] for result in results if "all_reduce" in result.found]
    if len(found) < len(results):
        missing = [result for result in results if "all_reduce" not in result.found]
        waited = min(result.waited for result in missing)
        if (all("all_reduce" in result.began for result in results) and waited > HANG_SECONDS
                and not any(result.has_crashed for result in missing)):
            return problem(f"has not ended after {waited:.0f} s", advice)
        return _not_found(results, "all_reduce", advice)
    if not all(each["is_right"] for each in found):
        return problem("gives wrong sums", "the machine is defective: take another one")
    slowest = max(each["seconds"] for each in found)
    num_bytes, backend = found[0]["bytes"], found[0]["backend"]
    speed = 2 * (len(results) - 1) / len(results) * num_bytes / slowest  # as nccl-tests counts
    text = f"{speed / 1e9:,.3g} GB/s bus bandwidth, {len(results)} processes, {backend}"
    return ok(text) if speed >= SLOW_BUS or backend == "gloo" else warning(
        text, "each step waits long for the gradients: raise gradient accumulation (a larger"
              ' global_batch_size), set "all_reduce_dtype": "bf16", or take a machine with NVLink')


def _not_found(results: Sequence[Result], part: str,
               advice: str = OTHER_MACHINE) -> Finding | None:
    """Judge a part that not all processes have finished; None if none was to make it.

    A process that has crashed, or whose GPU hangs, is a problem of the part that it stopped in. The
    line of the matrix products, which all have to reach, tells of all parts before.
    """
    # The others may only wait for one that has crashed, or has not come as far.
    result = min((each for each in results if part not in each.found), key=lambda each: (
        not each.has_crashed, part in each.began, not each.hangs))
    if not result.ended and part not in result.began:
        return None  # GPUs in use, or others than the driver sees
    stopped_in = result.stopped_in or "the process"
    text = f"{stopped_in} on rank {result.rank}: {result.ended}"
    if not (result.has_crashed or result.hangs):
        return unknown(result.why_not(part), MORE_TIME)
    if part in ("torch", "matmul") or stopped_in in (part, "the process"):
        return problem(text, advice)
    return unknown(text)


CHECKS = {"PyTorch": check_torch, "attention": check_attention, "Triton": check_triton,
          "peer-to-peer": check_peers, "matrix products": check_matmul, "clocks": check_clocks}
SHARED_CHECKS = {"all-reduce": check_all_reduce}  # of all nodes together
