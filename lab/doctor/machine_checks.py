"""What all checks have in common, and the checks of a machine: its GPUs, memory and disks."""

import itertools
import os
import shutil
import socket
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from basics.errors import UserError, describe
from basics.files import cache_dir, existing
from basics.gpu_readings import GpuReading, read_gpus
from basics.machine import within
from run_config import Run

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
OTHER_CONFIG = "see docs/configuration.md"
OTHER_MACHINE = "restart the machine, or take another one"
INSTALL_TORCH = "install a PyTorch that is built for this GPU: https://pytorch.org"
CHECK_SECONDS = 12.0  # for one check; the disks' and the hub's take a few
OTHER_PLACE = "name another place with --runs-dir or --datasets-dir"
NO_ANSWER = "the driver does not answer"
MAX_PARTS = 7  # of a GPU (MIG)
BUSY_MEMORY_SHARE = 0.1  # of a GPU in use; an idle one's driver takes less
BUSY_PERCENT = 30  # of the time, the same
TEST_BYTES = 32 * 2**20  # written to measure a disk
SLOW_DISK = 50e6  # bytes a second: the 2 GB of a checkpoint of GPT-2 take 40 seconds
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = 2**30
SHARED_MEMORY_PER_PROCESS = 16 * 2**20  # NCCL's, without peer-to-peer access


class Finding(NamedTuple):
    """A verdict, what was found, and what to do about it."""

    verdict: str
    text: str
    advice: str = ""


ok, warning, problem = (partial(Finding, verdict) for verdict in (OK, WARNING, PROBLEM))
Checks = dict[str, Finding]  # by the name of what was checked
Facts = dict[str, Any]  # what a part of the load tests reports


@dataclass(frozen=True)
class Subject:
    """A machine, and perhaps a run on it."""

    runs_dir: Path
    datasets_dir: Path
    run_name: str | None = None
    time_limit: float = 40.0  # seconds, for the load tests
    run: Run | None = None  # None also if its configs are wrong
    all_gpus: tuple[GpuReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()  # that CUDA_VISIBLE_DEVICES does not hide
    nvml_failure: str | None = None
    num_processes: int = 1  # on this machine
    world_size: int = 1  # on all nodes
    available_gib: float = 0.0  # of RAM
    busy: str = ""  # what uses the GPUs, or trains the run
    is_training: bool = False  # a process of this machine trains the run


def ok_if(is_fine: bool, text: str, advice: str, *, is_fatal: bool = False) -> Finding:
    """Return an ok, or else with advice a warning, or a problem where training would fail."""
    return ok(text) if is_fine else Finding(PROBLEM if is_fatal else WARNING, text, advice)


def unknown(reason: str, advice: str = "") -> Finding:
    return warning(f"could not be checked: {reason}", advice)


def refused(error: UserError) -> Finding:
    text, _, remedy = str(error).partition("; ")
    return problem(text, remedy or OTHER_CONFIG)


def make_checks(
    functions: Mapping[str, Callable[[Subject], Finding | None]], subject: Subject
) -> Checks:
    """Make checks one after the other; one that fails or hangs stops no other.

    A function returns None where there is nothing to check. An error that training would end with,
    and what never answers, such as a disk, are problems.
    """
    checks = {}
    for name, function in functions.items():
        try:
            found = within(CHECK_SECONDS, partial(function, subject))
        except UserError as error:
            found = refused(error)
        except TimeoutError:
            found = problem(
                f"no answer within {CHECK_SECONDS:g} s", f"if a disk is in trouble, {OTHER_PLACE}"
            )
        except Exception as error:  # whatever it is, the other checks go on
            found = unknown(describe(error))
        if found is not None:
            checks[name] = found
    return checks


def visible_gpus(gpus: Sequence[GpuReading], variable: str | None) -> list[GpuReading]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; all if it is not set.

    Of GPUs that are divided (MIG), CUDA shows a process one part alone: it has its own readings.
    """
    found = list(gpus)
    if variable is not None:
        entries = [entry.strip() for entry in variable.split(",")]
        if parts := [entry for entry in entries if entry.startswith("MIG-")]:
            return read_gpus(parts[:1])
        found = [
            gpu
            for entry in entries
            for number, gpu in enumerate(gpus)
            if entry == str(number)
            or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))
        ]
    for gpu, index in itertools.product(found, range(MAX_PARTS)):
        import pynvml  # here: most machines without a GPU never need it

        with suppress(pynvml.NVMLError):  # there is no such part, or the GPU cannot be divided
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid or "")
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            return read_gpus([pynvml.nvmlDeviceGetUUID(part)])
    return found


def in_use(gpus: Sequence[GpuReading]) -> str:
    """Say which GPUs other programs use; empty if none. A GPU that tells nothing is not in use."""
    found = []
    for number, gpu in enumerate(gpus):
        percent = gpu.use_percent or 0
        used = gpu.memory_used_gib or 0
        much = BUSY_MEMORY_SHARE * (gpu.memory_total_gib or 1e9)
        if percent >= BUSY_PERCENT or used >= much:
            found.append(f"GPU {number} ({used:,.1f} GiB, {percent:.0f}%)")
    return f"in use: {', '.join(found)}" if found else ""


def compare_gpus(subject: Subject, facts: Facts) -> Finding:
    """Compare the GPUs that the driver sees with PyTorch's `torch_facts`, empty if unknown."""
    seen = len(subject.gpus)
    by_torch = facts.get("num_gpus")
    version = facts.get("version")
    cause, remedy = facts.get("problem") or ("", "")
    if cause:
        return problem(f"PyTorch {version} cannot use them: {cause}", remedy)
    if subject.nvml_failure == NO_ANSWER:
        return problem(NO_ANSWER, OTHER_MACHINE)
    if not subject.all_gpus:
        what = "training runs on the CPU, slowly"
        if by_torch:
            what = f"PyTorch sees {by_torch}, which are not tested"
        return warning(
            f"none ({subject.nvml_failure or 'the driver sees none'}): {what}",
            "if the machine has NVIDIA GPUs, install their driver,"
            " or start the container with --gpus all",
        )
    names = Counter(gpu.name or "a GPU that does not answer" for gpu in subject.gpus)
    text = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    text += f"; driver {subject.all_gpus[0].driver_version}"
    if None in [gpu.name for gpu in subject.gpus]:
        return problem(text, f"{OTHER_MACHINE}: that GPU is lost")
    if by_torch not in (None, seen):
        return problem(
            f"{text}; PyTorch {version} sees {by_torch}",
            f"{INSTALL_TORCH}; restart the machine if"
            " its driver was renewed; check CUDA_VISIBLE_DEVICES and the container's --gpus",
        )
    if (hidden := len(subject.all_gpus) - seen) > 0:
        return warning(
            f"{text}; {hidden} of {len(subject.all_gpus)} are hidden by CUDA_VISIBLE_DEVICES",
            "unset it to train on all of them",
        )
    return ok_if(
        len(names) < 2,
        text,
        "all wait for the slowest in each step; hide it with CUDA_VISIBLE_DEVICES",
    )


def check_use(subject: Subject) -> Finding | None:
    if not subject.busy:
        return None
    return warning(
        f"{subject.busy}: the tests that load the machine are left out",
        "run this again when it is idle",
    )


def check_ecc(subject: Subject) -> Finding | None:
    """Warn of GPUs whose memory has lost data since the driver was loaded."""
    wrong = [
        f"GPU {number}: {gpu.uncorrected_ecc_errors:,} uncorrected errors"
        for number, gpu in enumerate(subject.gpus)
        if gpu.uncorrected_ecc_errors
    ]
    if not wrong:
        return None
    return warning("; ".join(wrong), f"{OTHER_MACHINE}: such an error ends a training")


def check_compiler(subject: Subject) -> Finding | None:
    """Check that Triton can compile its launchers in C, where a run's step is compiled on GPUs."""
    if not subject.gpus or (subject.run and subject.run.config.compile is False):
        return None
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if compiler and header.is_file():
        return ok(compiler)
    return problem(
        f"no {header if compiler else ' or '.join(names)}: the training step cannot be compiled",
        "install gcc, libc6-dev and python3-dev, as ./setup_lambda.sh does, or set"
        ' "compile": false',
    )


def check_caches(subject: Subject) -> Finding | None:
    """Check that compiled code can be kept, and run from where it is."""
    try:
        place = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir("inductor"))
    except UserError as error:
        return problem(str(error))
    if os.statvfs(existing(place)).f_flag & os.ST_NOEXEC:
        return warning(
            f"{place} is mounted noexec: compiled code cannot run from there",
            "set TORCHINDUCTOR_CACHE_DIR to a directory on another disk",
        )
    return ok(str(place))


def check_shared_memory(subject: Subject) -> Finding | None:
    """Check the memory through which NCCL may exchange data between processes."""
    if subject.num_processes == 1 or not SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return ok_if(
        usage.free >= SMALL_SHARED_MEMORY,
        f"{usage.free / 2**30:,.2f} of {usage.total / 2**30:,.2f} GiB free in {SHARED_MEMORY}",
        "start the container with --shm-size=8g or --ipc=host",
        is_fatal=usage.free < subject.num_processes * SHARED_MEMORY_PER_PROCESS,
    )


def check_host_name(_: Subject) -> Finding | None:
    """Check that this machine's name has an address, by which torchrun's processes find it."""
    if "RANK" in os.environ:
        return None  # a torchrun has started this process: it does without, or has an address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return problem(
            f"{name} has no address: torchrun waits for it for 5 minutes, and fails",
            f'add "ADDRESS {name}" to /etc/hosts, with the address that others reach',
        )
    return ok(name)


def check_runs_disk(subject: Subject) -> Finding:
    return check_disk(subject.runs_dir / (subject.run_name or ""))


def check_datasets_disk(subject: Subject) -> Finding | None:
    """Check the disk of the datasets, if it is another one."""
    place = existing(subject.datasets_dir)
    is_other = place.stat().st_dev != existing(subject.runs_dir).stat().st_dev
    return check_disk(place) if is_other else None


def check_disk(place: Path) -> Finding:
    """Judge the room on a disk and its speed; the file that is written for that has no name."""
    place = existing(place)
    here = Path.cwd()
    shown = place.relative_to(here) if place.is_relative_to(here) else place
    text = f"{shutil.disk_usage(place).free / 1e9:,.1f} GB free in {shown}"
    content = os.urandom(TEST_BYTES)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            speed = TEST_BYTES / (time.perf_counter() - began)
    except OSError as error:
        return problem(f"{text}; writing fails: {error.strerror or error}", OTHER_PLACE)
    text += f", writes {speed / 1e6:,.0f} MB/s"
    types = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    mounts = (types[str(path)] for path in (place, *place.parents) if str(path) in types)
    if next(mounts, "") == "overlay":
        return warning(
            f"{text}; in the container's own layer, which is lost with the container",
            f"mount a volume there, or {OTHER_PLACE}",
        )
    return ok_if(speed >= SLOW_DISK, text, f"checkpoints take long to write; {OTHER_PLACE}")


CHECKS = {
    "use": check_use,
    "ECC memory": check_ecc,
    "compiler": check_compiler,
    "compiled code": check_caches,
    "shared memory": check_shared_memory,
    "host name": check_host_name,
    "disk of runs": check_runs_disk,
    "disk of datasets": check_datasets_disk,
}
