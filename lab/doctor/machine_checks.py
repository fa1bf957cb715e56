"""Checks of a machine: its GPUs as the driver and PyTorch see them, its memory and limits."""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from basics.gpu_readings import GpuReading, read_gpus
from basics.machine import find_compiler, num_usable_cores
from lab.doctor.check import (
    INSTALL_TORCH,
    OTHER_MACHINE,
    OTHER_PLACE,
    PROBLEM,
    SKIPPED,
    WARNING,
    Checks,
    Finding,
    Subject,
    numbers,
    ok,
    problem,
    warn_unless,
    warning,
)

BUSY_MEMORY_SHARE, BUSY_PERCENT = 0.1, 30  # of a GPU in use; an idle one's driver takes less
HOT_C = 85  # most cards slow down a few degrees above
NO_ANSWER = "the driver does not answer"
CORES_PER_PROCESS = 2  # one for the process, one for reading data, saving and charts
FEW_OPEN_FILES = 1024
TEST_BYTES, CHUNK_BYTES = 256 * 2**20, 32 * 2**20  # written to measure a disk
TEST_SECONDS = 3.0  # after which no further chunk is written
SLOW_DISK = 50e6  # bytes a second: the 2 GB of a checkpoint of GPT-2 take 40 seconds
SHARED_MEMORY, SMALL_SHARED_MEMORY = Path("/dev/shm"), 2**30
SHARED_MEMORY_PER_PROCESS = 16 * 2**20  # NCCL's, without peer-to-peer access
Facts = Mapping[str, Any]  # what PyTorch says: `facts` of `load.py`; empty without an answer


def visible_gpus(gpus: Sequence[GpuReading], variable: str | None) -> list[GpuReading]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it; all if it is not set.

    Of GPUs that are divided (MIG), CUDA shows a process one part alone: it has its own readings.
    """
    found = list(gpus) if variable is None else []
    for entry in map(str.strip, variable.split(",") if variable else ()):
        if entry.isdigit():
            named = list(gpus[int(entry):][:1])
        elif entry.startswith("MIG-"):
            named = [part for part in read_gpus([entry]) if part.name]
        else:
            named = [gpu for gpu in gpus if len(entry) > 4 and (gpu.uuid or "").startswith(entry)]
        if not named:
            break  # CUDA ignores what follows an entry that names no GPU
        found.append(named[0])
    parts = [part for gpu in found for part in (
        [gpu] if (gpu.uuid or "").startswith("MIG-") else parts_of(gpu))]
    return parts[:1] or found


def parts_of(gpu: GpuReading) -> list[GpuReading]:
    """Read the parts (MIG) that a GPU is divided into; none if it is not."""
    import pynvml

    uuids = []
    with suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid or "")
        is_divided, _ = pynvml.nvmlDeviceGetMigMode(handle)
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_divided else 0):
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuids.append(pynvml.nvmlDeviceGetUUID(part))
    return read_gpus(uuids)


def in_use(gpus: Sequence[GpuReading]) -> str:
    """Return which GPUs others use; empty if none is in use."""
    used = [f"GPU {number} ({gpu.memory_used_gib or 0:,.1f} GiB, {gpu.use_percent or 0:.0f}%)"
            for number, gpu in enumerate(gpus) if (gpu.use_percent or 0) >= BUSY_PERCENT
            or (gpu.memory_used_gib or 0) >= BUSY_MEMORY_SHARE * (gpu.memory_total_gib or 1e9)]
    return f"in use: {', '.join(used)}" if used else ""


def check_gpus(subject: Subject, facts: Facts) -> Finding:
    """Compare the GPUs that the driver sees with those that PyTorch sees."""
    seen, by_torch = len(subject.gpus), facts.get("num_gpus")
    cause, remedy = facts.get("problem") or ("", "")
    if cause:
        return problem(f"PyTorch {facts['version']} cannot use them: {cause}", remedy)
    if subject.nvml_failure == NO_ANSWER:
        return problem(NO_ANSWER, OTHER_MACHINE)
    if not subject.all_gpus and by_torch:
        return warning(f"{by_torch} seen by PyTorch, but the driver cannot be read"
                       f" ({subject.nvml_failure}): the tests that load them are left out",
                       "a training's speed line shows what they do")
    if not subject.all_gpus:
        text = f"none ({subject.nvml_failure})" if subject.nvml_failure else "none"
        return warning(f"{text}: training runs on the CPU, slowly", "if the machine has GPUs,"
                       " install their driver, or start the container with --gpus all")
    names = Counter(gpu.name or "a GPU that does not answer" for gpu in subject.gpus)
    text = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if None in [gpu.name for gpu in subject.gpus]:
        return problem(text, f"{OTHER_MACHINE}: that GPU is lost")
    if by_torch is not None and by_torch != seen:
        return problem(f"{text}; PyTorch sees {by_torch}", "restart the machine if its driver was"
                       " renewed; check CUDA_VISIBLE_DEVICES and the container's --gpus")
    if seen and subject.num_processes != seen:
        return Finding(PROBLEM if subject.num_processes > seen else WARNING,
                       f"{text}; number of processes: {subject.num_processes}",
                       f"set --nproc_per_node to {seen}")
    if (hidden := len(subject.all_gpus) - seen) > 0:
        return warning(f"{text}; {hidden} of {len(subject.all_gpus)} are hidden by"
                       " CUDA_VISIBLE_DEVICES", "unset it to train on all of them")
    return warn_unless(len(names) < 2, text, "all wait for the slowest in each step; hide it with"
                       " CUDA_VISIBLE_DEVICES")


def check_readings(subject: Subject, facts: Facts) -> Checks:
    """Judge what the driver and PyTorch say of the GPUs, before they are loaded."""
    checks, gpus = {}, subject.gpus
    if subject.busy:
        checks["use"] = warning(f"{subject.busy}: the tests that load the machine are left out",
                                "run this again when it is idle")
    if facts.get("num_gpus") and not any(facts["problem"]):
        lacking = facts["without_bf16"]
        checks["bf16"] = warn_unless(not lacking, f"{numbers(lacking)} without it" if lacking else
                                     "supported", "training uses fp16, with a loss scale")
        if lacking and subject.run and "bf16" in (subject.run.train.precision,
                                                  subject.run.train.residual_dtype):
            checks["bf16"] = problem(checks["bf16"].text, "remove precision and residual_dtype from"
                                     " train.json, or take a newer GPU")
    if not gpus:
        return checks
    text = next((gpu.driver_version for gpu in gpus if gpu.driver_version), "unknown")
    if facts:
        text += f"; PyTorch {facts['version']} was built with CUDA {facts['cuda']}"
    checks["driver"] = ok(text) if not facts or facts["cuda"] else problem(text, INSTALL_TORCH)
    if degrees := [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]:
        text = f"{min(degrees):.0f} to {max(degrees):.0f} °C before the tests"
        hot = [number for number, gpu in enumerate(gpus) if (gpu.temperature_c or 0) >= HOT_C]
        checks["temperature"] = warn_unless(
            not hot, f"{text}; {numbers(hot)} at {HOT_C} or more" if hot else text,
            "its clock falls when it gets hotter; look for other programs on it, or take another"
            " machine")
    errors = {number: gpu.uncorrected_ecc_errors for number, gpu in enumerate(gpus)
              if gpu.uncorrected_ecc_errors is not None}
    if wrong := [number for number, count in errors.items() if count]:
        checks["ECC memory"] = warning(
            f"{numbers(wrong)}: {sum(errors.values()):,} uncorrected errors since the driver was"
            " loaded", f"{OTHER_MACHINE}: such an error ends a training")
    else:
        checks["ECC memory"] = (ok("no uncorrected errors") if errors else
                                Finding(SKIPPED, "not told by these GPUs"))
    return checks


def check_host_name(_: Subject) -> Finding | None:
    """Check that this machine's name has an address, by which torchrun's processes find it."""
    if "RANK" in os.environ:
        return None  # a torchrun has started this process: it does without, or has an address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return problem(f"{name} has no address: torchrun waits for it for 5 minutes, and fails",
                       f'add "ADDRESS {name}" to /etc/hosts, with the address that others reach')
    return ok(name)


def check_limits(subject: Subject) -> Checks:
    """Judge what each process needs: a compiler, CPU cores, shared memory, open files."""
    checks, number, run = {}, subject.num_processes, subject.run
    if subject.gpus and not (run and run.train.compile is False):
        compiler, missing = find_compiler(on_gpu=True)  # Triton compiles its launchers in C
        checks["compiler"] = ok(compiler) if compiler else problem(
            f"{missing}: the training step cannot be compiled", "install gcc, libc6-dev and"
            ' python3-dev, as ./setup_lambda.sh does, or set "compile": false')
    cores = num_usable_cores()
    share = f", {cores / number:.3g} for each GPU's process" if subject.gpus else ""
    checks["CPU cores"] = warn_unless(
        not subject.gpus or cores >= CORES_PER_PROCESS * number, f"{cores:g}{share}",
        "data, checkpoints and charts may slow training down;"
        f" {CORES_PER_PROCESS} for each GPU are enough")
    if number > 1 and SHARED_MEMORY.is_dir():  # through which NCCL may exchange data
        usage = shutil.disk_usage(SHARED_MEMORY)
        found = warn_unless(
            usage.free >= SMALL_SHARED_MEMORY, f"{usage.free / 2**30:,.2f} of"
            f" {usage.total / 2**30:,.2f} GiB free in {SHARED_MEMORY}",
            "start the container with --shm-size=8g or --ipc=host")
        is_enough = usage.free >= number * SHARED_MEMORY_PER_PROCESS
        checks["shared memory"] = found if is_enough else found._replace(verdict=PROBLEM)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = limit == resource.RLIM_INFINITY
    checks["open files"] = warn_unless(
        is_unlimited or limit >= FEW_OPEN_FILES, "no limit" if is_unlimited
        else f"a process may open {limit:,}",
        f"raise the limit before training: ulimit -n {2 * FEW_OPEN_FILES}")
    return checks


def check_runs_disk(subject: Subject) -> Finding:
    return _check_disk(subject.runs_dir / (subject.run_name or ""), OTHER_PLACE["disk of runs"])


def check_datasets_disk(subject: Subject) -> Finding | None:
    place = existing(subject.datasets_dir)
    if place.stat().st_dev == existing(subject.runs_dir).stat().st_dev:
        return None  # the disk of the runs, which is measured
    return _check_disk(place, OTHER_PLACE["disk of datasets"])


def existing(place: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    place = place.absolute()
    return next(path for path in (place, *place.parents) if path.is_dir())


def _check_disk(place: Path, advice: str) -> Finding:
    place, here = existing(place), Path.cwd()
    free = shutil.disk_usage(place).free
    shown = place.relative_to(here) if place.is_relative_to(here) else place
    text = f"{free / 1e9:,.1f} GB free in {shown}"
    if not os.access(place, os.W_OK | os.X_OK):
        return problem(f"{text}, which cannot be written to", advice)
    try:
        speed = write_speed(place, free)
    except OSError as error:
        return problem(f"{text}; writing fails: {error.strerror or error}", advice)
    if speed is None:
        return warning(f"{text}: too little to measure its speed", f"make room, or {advice}")
    text += f", writes {speed / 1e6:,.0f} MB/s"
    types = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    mounts = (types[str(path)] for path in (place, *place.parents) if str(path) in types)
    if next(mounts, "") == "overlay":
        return warning(f"{text}; in the container's own layer, which is lost with the container",
                       f"mount a volume there, or {advice}")
    return warn_unless(speed >= SLOW_DISK, text, f"checkpoints take long to write; {advice}")


def write_speed(place: Path, free: int) -> float | None:
    """Measure how many bytes a second a disk writes; None if it has too little room for that.

    The file has no name where the system can do that, and never outlives this process.

    Raises:
        OSError: the disk refuses to write.
    """
    size = min(TEST_BYTES, free // 2)
    if size < CHUNK_BYTES:
        return None
    chunk, written, began = os.urandom(CHUNK_BYTES), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=place, prefix=".doctor-", buffering=0) as file:
        while written + CHUNK_BYTES <= size and time.perf_counter() - began < TEST_SECONDS:
            written += file.write(chunk)
            os.fsync(file.fileno())
        return written / (time.perf_counter() - began)


CHECKS = {"host name": check_host_name, "disk of runs": check_runs_disk,
          "disk of datasets": check_datasets_disk}
