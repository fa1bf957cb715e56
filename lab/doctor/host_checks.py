"""Checks of a machine's disks, memory and limits."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import time
from pathlib import Path

import psutil

from basics.machine import find_compiler, num_usable_cores
from basics.text import gib
from lab.doctor.check import Finding, Subject, ok, problem, warning
from lab.plan.estimate import bytes_of_checkpoint, default_precision, pinned_bytes
from lab.plan.memory import peak_memory
from lab.plan.setting import Setting
from reporting.speed import find_gpu

SHARED_MEMORY = Path("/dev/shm")
TEST_BYTES, CHUNK_BYTES = 256 * 2**20, 32 * 2**20  # written to measure a disk
TEST_SECONDS = 3.0  # after which no further chunk is written
SLOW_DISK = 50e6  # bytes a second: the 2 GB of a checkpoint of GPT-2 take 40 seconds
PROCESS_GIB, CPU_PROCESS_GIB = 3.0, 0.5  # of RAM, estimated: PyTorch with CUDA and without
FEW_OPEN_FILES = 1024
CORES_PER_PROCESS = 2  # one for the process, one for reading data, saving and charts
SMALL_SHARED_MEMORY = 2**30
SHARED_MEMORY_PER_PROCESS = 16 * 2**20  # NCCL's, without peer-to-peer access


def check_ram(subject: Subject) -> Finding:
    """Compare the RAM with what the processes and the snapshot of a checkpoint need."""
    available = subject.available_gib
    if subject.run is None:
        needed = subject.num_processes * _process_gib(subject)
        text = (f"{available:,.1f} GiB available; training needs {needed:,.1f} or more: name a run"
                " to have it counted")
        return ok(text) if available >= needed else warning(text, "end other programs")
    snapshot, needed = _snapshot_gib(subject), _needed_gib(subject)
    text = (f"{available:,.1f} GiB available; the run needs about {gib(needed * 2**30)},"
            f" {gib(snapshot * 2**30)} of them for the copy that checkpoints are written from"
            " (the dataset is memory-mapped)")
    if available >= needed:
        return ok(text)
    advice = "end other programs, or take a machine with more RAM"
    if not subject.gpus:
        advice += "; on a CPU a smaller microbatch_size or fewer processes need less"
    return problem(text, advice) if available < needed / 2 else warning(text, advice)


def _snapshot_gib(subject: Subject) -> float:
    """Return the GiB of the copy that rank 0 writes checkpoints from."""
    run = subject.run
    return (pinned_bytes(run) if subject.gpus else bytes_of_checkpoint(run)) / 2**30


def _needed_gib(subject: Subject) -> float:
    tensors = 0 if subject.gpus else training_gib(subject)
    return _snapshot_gib(subject) + subject.num_processes * (_process_gib(subject) + tensors)


def _process_gib(subject: Subject) -> float:
    return PROCESS_GIB if subject.gpus else CPU_PROCESS_GIB


def training_gib(subject: Subject) -> float:
    """Return the GiB of a process's tensors at the peak of a step, as `lab plan` estimates."""
    train = subject.run.train
    on_gpu = bool(subject.gpus)
    gpu = find_gpu(subject.gpus[0].name or "") if on_gpu else None
    precision = default_precision(train, gpu) if on_gpu else train.precision or "fp32"
    setting = Setting(subject.run.model, train, precision, subject.world_size, on_gpu=on_gpu)
    return peak_memory(setting, train.microbatch_size).total / 2**30


def check_shared_memory(subject: Subject) -> Finding | None:
    """Check /dev/shm, through which NCCL's processes of one machine may exchange data."""
    if subject.num_processes < 2 or not SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{usage.free / 2**30:,.2f} of {usage.total / 2**30:,.2f} GiB free in {SHARED_MEMORY}"
    advice = "start the container with --shm-size=8g or --ipc=host"
    if usage.free < subject.num_processes * SHARED_MEMORY_PER_PROCESS:
        return problem(text, advice)
    return ok(text) if usage.free >= SMALL_SHARED_MEMORY else warning(text, advice)


def check_open_files(subject: Subject) -> Finding:
    """Check the limit that `ulimit -n` shows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    text = f"a process may open {limit:,}"
    return ok(text) if limit >= FEW_OPEN_FILES else warning(
        text, f"raise the limit before training: ulimit -n {2 * FEW_OPEN_FILES}")


def check_cores(subject: Subject) -> Finding:
    """Check that each process of a GPU has CPU cores."""
    cores = num_usable_cores()
    if not subject.gpus:
        return ok(f"{cores:g}")
    share = cores / subject.num_processes
    text = f"{cores:g}, {share:.3g} for each GPU's process"
    return ok(text) if share >= CORES_PER_PROCESS else warning(
        text, f"data, checkpoints and charts may slow training down; {CORES_PER_PROCESS} for each"
              " GPU are enough")


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


def check_compiler(subject: Subject) -> Finding | None:
    """Check for what Triton compiles its launchers with: a C compiler and Python's headers."""
    if not subject.gpus or (subject.run and subject.run.train.compile is False):
        return None
    compiler, missing = find_compiler(on_gpu=True)
    if compiler:
        return ok(compiler)
    return problem(f"{missing}: the training step cannot be compiled",
                   "install gcc, libc6-dev and python3-dev, as ./setup_lambda.sh does, or set"
                   ' "compile": false')


def check_runs_disk(subject: Subject) -> Finding:
    place = subject.runs_dir / subject.run_name if subject.run_name else subject.runs_dir
    return _check_disk(place, advice=LATE["disk of runs"])


def check_datasets_disk(subject: Subject) -> Finding | None:
    place = existing(subject.datasets_dir)
    if place.stat().st_dev == existing(subject.runs_dir).stat().st_dev:
        return None  # the disk of the runs, which is measured
    return _check_disk(place, advice=LATE["disk of datasets"])


def existing(place: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    place = place.absolute()
    return next(path for path in (place, *place.parents) if path.is_dir())


def _check_disk(place: Path, *, advice: str) -> Finding:
    place = existing(place)
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:,.1f} GB free in {_shown(place)}"
    if not os.access(place, os.W_OK | os.X_OK):
        return problem(f"{text}, which cannot be written to", advice)
    try:
        speed = write_speed(place, free)
    except OSError as error:
        return problem(f"{text}; writing fails: {error.strerror or error}", advice)
    if speed is None:
        return warning(f"{text}: too little to measure its speed", f"make room, or {advice}")
    text += f", writes {speed / 1e6:,.0f} MB/s"
    if is_container_layer(place):
        return warning(f"{text}; in the container's own layer, which is lost with the container",
                       f"mount a volume there, or {advice}")
    return ok(text) if speed >= SLOW_DISK else warning(
        text, f"checkpoints take long to write; {advice}")


def is_container_layer(place: Path) -> bool:
    """Return whether a directory lies in the writable layer of a container, and in no volume."""
    types = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    mounts = (types[str(path)] for path in (place, *place.parents) if str(path) in types)
    return next(mounts, "") == "overlay"


def _shown(place: Path) -> str:
    """Return a path as people write it: from the working directory on, if it is in there."""
    here = Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else str(place)


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


CHECKS = {"host name": check_host_name, "compiler": check_compiler, "CPU cores": check_cores,
          "RAM": check_ram, "shared memory": check_shared_memory, "open files": check_open_files,
          "disk of runs": check_runs_disk, "disk of datasets": check_datasets_disk}
LATE = {"disk of runs": "name another place with --runs-dir",  # a disk that hangs is a problem
        "disk of datasets": "name another place with --datasets-dir"}
