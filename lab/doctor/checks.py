"""The ten checks of `lab doctor`. Each one takes a reading, and judges it by the reading alone."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from basics.errors import UserError, describe
from basics.files import existing
from basics.gpu_readings import GpuReading
from basics.machine import PROJECT_DIR, available_ram_gib, num_cpu_cores, within
from basics.text import counted, gb, gib
from lab.plan import estimate
from lab.plan.memory import Setting, peak_memory
from preparation.ensure_dataset import STDLIB_DATASET, is_complete, no_dataset, splits_of
from reporting.gpus import find_gpu
from reporting.speed import usable_gib
from run_config import Run
from settings.data import SPLITS, token_file_name
from tokens.batch_plan import BatchPlan, divided, plan_batches
from tokens.token_file import TokenFile
from tokens.tokenizer import TOKENIZER_FILE

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
NO_ANSWER = "the driver does not answer"
WRONG_SUM = "wrong sums"
OTHER_MACHINE = "restart the machine, or take another one"
OTHER_PLACE = "name another place with --runs-dir or --datasets-dir"
INSTALL_TORCH = "install a PyTorch that is built for this GPU: https://pytorch.org"
BUSY_MEMORY_SHARE = 0.1  # of a GPU in use; an idle one's driver takes less
BUSY_PERCENT = 30  # of the time, the same
SLOW_BUS = 4e9  # bytes a second; PCIe without peer-to-peer access has more
TEST_BYTES = 32 * 2**20  # written to measure a disk
SLOW_DISK = 50e6  # bytes a second: the 2 GB of a checkpoint of GPT-2 take 40 seconds
PROCESS_GIB = 3.0  # of host memory, estimated: PyTorch with CUDA
CPU_PROCESS_GIB = 0.5  # without
MUCH_TOO_LARGE = 1.25  # times the memory there is: the estimate is not that far off
OWN_GIB = 1.0  # of a GPU, which CUDA and NCCL take beside a process's tensors
START_SECONDS = 120.0  # for torchrun and the imports of its processes, which limit the rest
ASK_SECONDS = 8.0  # for an answer of the hub
TOKEN_FILES = (*map(token_file_name, SPLITS), TOKENIZER_FILE)
WRONG_CLOCK = 60.0  # seconds; the hub tells whole ones
HUB_FILE = "openai-community/gpt2/resolve/main/model.safetensors"  # of 548 MB
DOWNLOADED_BYTES = 8 * 2**20  # of it, to measure the network
DOWNLOAD_SECONDS = 5.0  # at most
SLOW_NETWORK = 10e6  # bytes a second: the 20 GB of 10 billion tokens take half an hour


class Judgement(NamedTuple):
    verdict: str
    advice: str = ""


FINE = Judgement(OK)
warning, problem = (partial(Judgement, verdict) for verdict in (WARNING, PROBLEM))


class Finding(NamedTuple):
    """A line of the report."""

    name: str
    verdict: str
    text: str
    advice: str


@dataclass(frozen=True)
class TorchFacts:
    """What PyTorch says: `cause` is why it cannot use the GPUs, and `remedy` what helps."""

    version: str = "?"
    cuda: str | None = None  # the version that it is built for
    num_gpus: int = 0
    cause: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Subject:
    """A machine, and perhaps a run on it: what several checks need to know."""

    runs_dir: Path
    datasets_dir: Path
    run_name: str | None = None
    time_limit: float = 40.0  # seconds, for one check
    run: Run | None = None
    refusal: UserError | None = None  # why the run's files cannot be used
    nvml_failure: str | None = None
    all_gpus: tuple[GpuReading, ...] = ()
    gpus: tuple[GpuReading, ...] = ()  # that CUDA_VISIBLE_DEVICES does not hide
    torch: TorchFacts = TorchFacts()
    trained_by: int | None = None  # the process of this machine that trains the run

    @property
    def num_processes(self) -> int:
        return max(1, self.torch.num_gpus)


# --- driver


@dataclass(frozen=True)
class Driver:
    """The driver of the GPUs, and what PyTorch says of it."""

    version: str | None
    failure: str | None  # why NVML cannot be read
    torch: TorchFacts

    def __str__(self) -> str:
        none = f"none ({self.failure or 'it sees no GPU'})"
        built_for = f"CUDA {self.torch.cuda}" if self.torch.cuda else "CPUs"
        text = f"{self.version or none}; PyTorch {self.torch.version} for {built_for}"
        return f"{text} cannot be used: {self.torch.cause}" if self.torch.cause else text


def read_torch() -> TorchFacts:
    """Ask PyTorch for the GPUs; nothing is put on them."""
    try:
        import torch

        from basics.device import count_gpus, cuda_problem

        return TorchFacts(torch.__version__, torch.version.cuda, count_gpus(), *cuda_problem())
    except Exception as error:  # such as a library that is missing
        again = "install it again: uv sync --reinstall-package torch"
        return TorchFacts(cause=describe(error), remedy=again)


def read_driver(subject: Subject) -> Driver:
    version = subject.all_gpus[0].driver_version if subject.all_gpus else None
    return Driver(version, subject.nvml_failure, subject.torch)


def judge_driver(driver: Driver) -> Judgement:
    """Return a problem if PyTorch cannot use it, a warning if there is none."""
    if driver.torch.cause:
        return problem(driver.torch.remedy)
    if driver.failure == NO_ANSWER:
        return problem(OTHER_MACHINE)
    if not driver.version:
        return warning(
            "training on a CPU is slow; if the machine has NVIDIA GPUs, install their driver,"
            " or start the container with --gpus all"
        )
    return FINE if driver.torch.cuda else problem(INSTALL_TORCH)


# --- GPUs


@dataclass(frozen=True)
class Gpus:
    gpus: tuple[GpuReading, ...]

    def __str__(self) -> str:
        kinds = Counter(
            f"{gpu.name} ({gpu.memory_total_gib or 0:,.1f} GiB)"
            if gpu.name
            else "a GPU that does not answer"
            for gpu in self.gpus
        )
        parts = [", ".join(f"{count} x {kind}" for kind, count in kinds.items())]
        parts += [
            f"GPU {number} has {gpu.uncorrected_ecc_errors:,} uncorrected memory errors"
            for number, gpu in enumerate(self.gpus)
            if gpu.uncorrected_ecc_errors
        ]
        return "; ".join(filter(None, [*parts, in_use(self.gpus)]))


def visible_gpus(gpus: Sequence[GpuReading], variable: str | None) -> list[GpuReading]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; all if it is not set."""
    if variable is None:
        return list(gpus)
    entries = [entry.strip() for entry in variable.split(",")]
    return [
        gpu
        for entry in entries
        for number, gpu in enumerate(gpus)
        if entry == str(number) or entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry)
    ]


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


def read_gpus_of(subject: Subject) -> Gpus | None:
    return Gpus(subject.gpus) if subject.gpus else None


def judge_gpus(reading: Gpus) -> Judgement:
    """Return the worst: a lost GPU, memory errors, other programs, two kinds of GPUs."""
    names = {gpu.name for gpu in reading.gpus}
    if None in names:
        return problem(f"{OTHER_MACHINE}: that GPU is lost")
    if any(gpu.uncorrected_ecc_errors for gpu in reading.gpus):
        return warning(f"{OTHER_MACHINE}: such an error ends a training")
    if in_use(reading.gpus):
        return warning("run this again when they are idle; nvidia-smi names the programs")
    if len(names) > 1:
        return warning("all wait for the slowest in each step; hide it with CUDA_VISIBLE_DEVICES")
    return FINE


# --- PyTorch


@dataclass(frozen=True)
class Seen:
    """Numbers of GPUs: that PyTorch sees, that are not hidden, and of the machine."""

    by_torch: int
    visible: int
    all: int

    def __str__(self) -> str:
        hidden = self.all - self.visible
        text = f"sees {self.by_torch} of {counted(self.all, 'GPU')}"
        return f"{text}; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else text


def read_seen(subject: Subject) -> Seen | None:
    """Compare only where the driver tells of GPUs, and PyTorch has answered."""
    if not subject.all_gpus or subject.torch.cause:
        return None
    return Seen(subject.torch.num_gpus, len(subject.gpus), len(subject.all_gpus))


def judge_seen(seen: Seen) -> Judgement:
    if seen.by_torch != seen.visible:
        return problem(
            f"{INSTALL_TORCH}; restart the machine if its driver was renewed; check"
            " CUDA_VISIBLE_DEVICES and the container's --gpus"
        )
    return FINE if seen.by_torch == seen.all else warning("unset it to train on all of them")


# --- all-reduce


@dataclass(frozen=True)
class AllReduce:
    """The exchange between all GPUs, its failure, or why it was left out."""

    num_processes: int = 1
    backend: str = ""
    bytes_per_second: float = 0.0  # bus bandwidth
    failure: str = ""
    left_out: str = ""  # why

    def __str__(self) -> str:
        if self.left_out:
            return f"left out: {self.left_out}"
        if self.failure:
            return self.failure
        processes = counted(self.num_processes, "process", "processes")
        if self.num_processes == 1:
            return f"right sums by {processes}, {self.backend}"
        return f"{gb(self.bytes_per_second)}/s bus bandwidth, {processes}, {self.backend}"


def read_all_reduce(subject: Subject) -> AllReduce:
    """Run `lab.doctor.all_reduce` under torchrun, on two processes where there is no GPU."""
    if subject.trained_by:
        return AllReduce(
            left_out=f"{subject.run_name} is being trained by process {subject.trained_by}"
        )
    if busy := in_use(subject.gpus):
        return AllReduce(left_out=busy)
    number = subject.torch.num_gpus or min(2, num_cpu_cores())
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PET_")}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(PROJECT_DIR), os.environ.get("PYTHONPATH")))
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--local-addr=127.0.0.1", f"--log-dir={os.devnull}"),
        *(f"--nproc-per-node={number}", "-m", "lab.doctor.all_reduce", f"{subject.time_limit:g}"),
    ]
    # A file: the end of a pipe would not come while a process waits for a dead driver.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            status = process.wait(START_SECONDS + subject.time_limit)
        except subprocess.TimeoutExpired:
            return AllReduce(failure="torchrun has not ended")
        finally:
            process.kill()  # its processes end with it
            process.wait()
        output.seek(0)
        lines = [line for line in output if line.startswith("{")]
    if not lines:
        return AllReduce(failure=f"ended with exit status {status}")
    return AllReduce(**json.loads(lines[0]))


def judge_all_reduce(reading: AllReduce) -> Judgement:
    """Return a problem if training would fail or be wrong, a warning if it is slow."""
    if reading.left_out:
        return warning("run this again when the GPUs are idle")
    if WRONG_SUM in reading.failure:
        return problem("the machine is defective: take another one")
    if "no kernel image" in reading.failure:
        return problem(INSTALL_TORCH)
    if reading.failure:
        return problem(
            "NCCL_DEBUG=INFO uv run torchrun --standalone --nproc_per_node=gpu"
            " -m lab.doctor.all_reduce 60 shows what fails; or take another machine"
        )
    is_slow = reading.num_processes > 1 and reading.bytes_per_second < SLOW_BUS
    if is_slow and reading.backend == "nccl":
        return warning(
            "each step waits long for the gradients: raise gradient accumulation (a larger"
            ' global_batch_size), set "all_reduce_dtype": "bf16", or take a machine with NVLink'
        )
    return FINE


# --- disk


@dataclass(frozen=True)
class Disk:
    """The disk of the runs, and what the checkpoints of a run need."""

    place: str
    free_bytes: float
    bytes_per_second: float
    checkpoint_bytes: float = 0  # of a run: one checkpoint
    needed_bytes: float = 0  # and all that will be there at a time

    def __str__(self) -> str:
        text = f"{gb(self.free_bytes)} free in {self.place}, writes {gb(self.bytes_per_second)}/s"
        if not self.needed_bytes:
            return text
        return f"{text}; checkpoints of {gb(self.checkpoint_bytes)} need {gb(self.needed_bytes)}"


def read_disk(subject: Subject) -> Disk:
    """Write a file that has no name. Raises: UserError: it cannot be written."""
    place = existing(subject.runs_dir / (subject.run_name or ""))
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    content = os.urandom(TEST_BYTES)
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            speed = TEST_BYTES / (time.perf_counter() - began)
    except OSError as error:
        raise UserError(f"{shown}: cannot be written: {error.strerror}; {OTHER_PLACE}") from None
    free = shutil.disk_usage(place).free
    if subject.run is None:
        return Disk(str(shown), free, speed)
    size = estimate.bytes_of_checkpoint(subject.run)
    number = max(1, num_checkpoints_to_come(subject, subject.run))
    return Disk(str(shown), free, speed, size, number * size)


def num_checkpoints_to_come(subject: Subject, run: Run) -> int:
    """Return how many more checkpoints there will be at a time; 0 if that is not known."""
    config = run.config
    has_length = config.min_train_tokens != -1 or config.keep_checkpoints is not None
    if not has_length and not is_complete(subject.datasets_dir / config.dataset):
        return 0
    present = [
        path for path in run.checkpoints_dir.glob("*") if path.is_dir() and not path.is_symlink()
    ]
    with suppress(UserError):  # the row of the run's memory tells it
        return estimate.most_checkpoints(run, plan_of(subject, run)) - len(present)
    return 0


def judge_disk(disk: Disk) -> Judgement:
    """Return a problem without room for one checkpoint, a warning without it for all."""
    make_room = "make room, set keep_checkpoints, or name another place with --runs-dir"
    if disk.free_bytes < disk.checkpoint_bytes:
        return problem(make_room)
    if disk.free_bytes < disk.needed_bytes:
        return warning(make_room)
    if disk.bytes_per_second < SLOW_DISK:
        return warning(f"checkpoints take long to write; {OTHER_PLACE}")
    return FINE


# --- host memory


@dataclass(frozen=True)
class HostMemory:
    available_gib: float
    needed_gib: float

    def __str__(self) -> str:
        needed = gib(self.needed_gib * 2**30)
        return f"{self.available_gib:,.1f} GiB available; training needs about {needed}"


def read_host_memory(subject: Subject) -> HostMemory:
    """Estimate what the processes and the snapshot of a checkpoint need."""
    on_gpu = subject.torch.num_gpus > 0
    process_gib = PROCESS_GIB if on_gpu else CPU_PROCESS_GIB
    snapshot = 0
    if subject.run and on_gpu:
        snapshot = estimate.pinned_bytes(subject.run)
    elif subject.run:
        process_gib += training_gib(subject, subject.run)
        snapshot = estimate.bytes_of_checkpoint(subject.run)
    needed = subject.num_processes * process_gib + snapshot / 2**30
    return HostMemory(available_ram_gib(), needed)


def judge_host_memory(memory: HostMemory) -> Judgement:
    advice = "end other programs, or take a machine with more memory"
    if memory.available_gib < memory.needed_gib / 2:
        return problem(advice)
    return FINE if memory.available_gib >= memory.needed_gib else warning(advice)


# --- run's memory


@dataclass(frozen=True)
class RunMemory:
    """A run's batch plan, and the memory of a GPU beside what a process needs."""

    plan: BatchPlan
    needed_gib: float  # of a process, estimated
    usable_gib: float | None = None  # of the smallest GPU; None on a CPU
    free_gib: float | None = None  # of the fullest GPU; None while the run itself is trained

    def __str__(self) -> str:
        text = (
            f"microbatch {self.plan.microbatch_size:,} x accumulation"
            f" {self.plan.gradient_accumulation_steps:,} x"
            f" {counted(self.plan.world_size, 'process', 'processes')}:"
            f" about {gib(self.needed_gib * 2**30)} each (estimate)"
        )
        if self.usable_gib is not None:
            text += f" of {self.usable_gib:,.1f} GiB of a GPU"
        return text if self.is_free else f"{text}, where only {self.free_gib:,.1f} GiB are free"

    @property
    def is_free(self) -> bool:
        return self.free_gib is None or self.free_gib - OWN_GIB >= self.needed_gib


def plan_of(subject: Subject, run: Run) -> BatchPlan:
    """Divide the run's tokens among its processes. Raises: UserError."""
    path = subject.datasets_dir / run.config.dataset / token_file_name("train")
    num_tokens = TokenFile(path).num_tokens if path.is_file() else estimate.UNLIMITED_TOKENS
    return plan_batches(run, world_size=subject.num_processes, file_tokens=num_tokens)


def training_gib(subject: Subject, run: Run) -> float:
    """Return the GiB of a process's tensors at the peak of a step, as `lab plan` estimates."""
    on_gpu = subject.torch.num_gpus > 0
    precision = run.config.precision or "fp32"
    if on_gpu:
        name = subject.gpus[0].name if subject.gpus else None
        precision = estimate.default_precision(run.config, find_gpu(name or ""))
    setting = Setting(run.model, run.config, precision, subject.num_processes, on_gpu=on_gpu)
    return peak_memory(setting, run.config.microbatch_size).total / 2**30


def read_run_memory(subject: Subject) -> RunMemory | None:
    """Estimate a process's memory. Raises: UserError: the run's files or batch are wrong."""
    if subject.refusal:
        raise subject.refusal
    if subject.run is None:
        return None
    run = divided(subject.run, world_size=subject.num_processes)
    plan = plan_of(subject, run)
    needed = training_gib(subject, run)
    gpus = [gpu for gpu in subject.gpus if gpu.memory_total_gib]
    if not gpus:
        return RunMemory(plan, needed)
    usable = usable_gib(min(gpu.memory_total_gib for gpu in gpus))
    free = min(gpu.memory_total_gib - (gpu.memory_used_gib or 0.0) for gpu in gpus)
    return RunMemory(plan, needed, usable, None if subject.trained_by else free)


def judge_run_memory(memory: RunMemory) -> Judgement:
    if memory.usable_gib is not None and memory.needed_gib > memory.usable_gib:
        is_fatal = memory.needed_gib > MUCH_TOO_LARGE * memory.usable_gib
        return Judgement(
            PROBLEM if is_fatal else WARNING,
            "lower microbatch_size, or set head_chunks 8 or activation_checkpointing;"
            " ddp_train.py --find-max-microbatch measures what fits",
        )
    if not memory.is_free:
        return problem(
            "find the programs that use it with nvidia-smi, and end them: a run that was killed"
            " may have left some"
        )
    return FINE


# --- dataset


@dataclass(frozen=True)
class Dataset:
    """Where a run's dataset is, and what its download needs."""

    state: str
    download_bytes: int = 0
    free_bytes: int = 0

    def __str__(self) -> str:
        if not self.download_bytes:
            return self.state
        return (
            f"{self.state}: {gb(self.download_bytes)} are downloaded when training starts,"
            f" {gb(self.free_bytes)} are free"
        )


def read_dataset(subject: Subject) -> Dataset | None:
    """Find the dataset: here, made here, or on the hub. Raises: UserError: it is nowhere."""
    if subject.run is None:
        return None
    config = subject.run.config
    name = config.dataset
    place = subject.datasets_dir / name
    if is_complete(place, splits_of(config)):
        train, *_ = (TokenFile(place / token_file_name(split)) for split in splits_of(config))
        return Dataset(f"{place} has {train.num_tokens:,} training tokens")
    if name == STDLIB_DATASET:
        return Dataset(f"{place} is made from Python's own files when training starts")
    if "/" not in name:
        raise no_dataset(place, splits_of(config))
    from huggingface_hub import HfApi

    from preparation.hub import ask_hub

    info = ask_hub(
        name,
        lambda: HfApi().dataset_info(name, files_metadata=True, timeout=ASK_SECONDS),
        pauses=(),
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if missing := [file for file in TOKEN_FILES[:2] if file not in sizes]:
        raise UserError(
            f"{name} on the hub has no {missing[0]};"
            " name a dataset of token files, or make one with prepare_dataset.py"
        )
    return Dataset(
        f"{name} is on the hub",
        sum(sizes.get(file, 0) for file in TOKEN_FILES),
        shutil.disk_usage(existing(subject.datasets_dir)).free,
    )


def judge_dataset(dataset: Dataset) -> Judgement:
    if dataset.download_bytes and dataset.free_bytes <= dataset.download_bytes:
        return problem("make room, or name another place with --datasets-dir")
    return FINE


# --- clock


@dataclass(frozen=True)
class Clock:
    seconds_ahead: float  # of the hub's

    def __str__(self) -> str:
        where = "ahead of" if self.seconds_ahead > 0 else "behind"
        return f"{abs(self.seconds_ahead):,.0f} s {where} the hub's"


def read_clock(subject: Subject) -> Clock | None:
    """Compare the clock with the hub's; None if it does not answer: the next row tells it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        answer = get_session().head(constants.ENDPOINT, timeout=ASK_SECONDS)
        told = parsedate_to_datetime(answer.headers["Date"])
    except Exception:  # whatever the network or a proxy does
        return None
    return Clock((datetime.now(UTC) - told).total_seconds())


def judge_clock(clock: Clock) -> Judgement:
    if abs(clock.seconds_ahead) < WRONG_CLOCK:
        return FINE
    return warning(
        "set it, in a container on its host (timedatectl set-ntp true): HTTPS fails with a wrong"
        " date, and checkpoints and bills get wrong times"
    )


# --- network


@dataclass(frozen=True)
class Network:
    """How the hub answers."""

    host: str
    answer_seconds: float = 0.0
    bytes_per_second: float = 0.0  # 0 if the hub has not sent the file
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"{self.host} does not answer: {self.failure}"
        text = f"{self.host} answers in {self.answer_seconds:,.1f} s"
        if not self.bytes_per_second:
            return text
        return f"{text}, sends {gb(self.bytes_per_second)}/s"


def read_network(subject: Subject) -> Network:
    """Download the beginning of a file that is on the hub for years."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    host = urlsplit(constants.ENDPOINT).hostname or ""
    part = {"Range": f"bytes=0-{DOWNLOADED_BYTES - 1}"}
    began = time.perf_counter()
    try:
        with get_session().stream(
            "GET", f"{constants.ENDPOINT}/{HUB_FILE}", headers=part, timeout=ASK_SECONDS
        ) as answer:
            answered = time.perf_counter()
            size = 0
            for chunk in answer.iter_raw():
                size += len(chunk)
                if size >= DOWNLOADED_BYTES or time.perf_counter() - answered > DOWNLOAD_SECONDS:
                    break
            seconds = time.perf_counter() - answered
            is_sent = answer.status_code in (200, 206)
    except Exception as error:  # whatever the network or a proxy does
        return Network(host, failure=describe(error))
    return Network(host, answered - began, size / seconds if is_sent else 0.0)


def judge_network(network: Network) -> Judgement:
    if network.failure:
        return warning("check the network; training needs it only for what is downloaded")
    if 0 < network.bytes_per_second < SLOW_NETWORK:
        return warning(
            "a dataset of 10 billion tokens has 20 GB: fetch it with --prefetch on a cheaper"
            " machine that shares the disk, or take another machine"
        )
    return FINE


# --- all of them


class Check(NamedTuple):
    """A reading and its judgement: only the first looks at the machine."""

    name: str
    read: Callable[[Subject], Any]  # the reading, whose str is shown; None: nothing to say
    judge: Callable[[Any], Judgement]
    limits_itself: bool = False


CHECKS = [
    Check("driver", read_driver, judge_driver),
    Check("GPUs", read_gpus_of, judge_gpus),
    Check("PyTorch", read_seen, judge_seen),
    Check("all-reduce", read_all_reduce, judge_all_reduce, limits_itself=True),
    Check("disk", read_disk, judge_disk),
    Check("host memory", read_host_memory, judge_host_memory),
    Check("run's memory", read_run_memory, judge_run_memory),
    Check("dataset", read_dataset, judge_dataset),
    Check("clock", read_clock, judge_clock),
    Check("network", read_network, judge_network),
]


def make_checks(subject: Subject, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Make checks one after the other; one that fails or hangs stops no other.

    An error that training would end with, and what never answers, such as a disk, are problems.
    """
    rows = []
    for check in checks:
        try:
            read = partial(check.read, subject)
            reading = read() if check.limits_itself else within(subject.time_limit, read)
            if reading is not None:
                verdict, advice = check.judge(reading)
                rows.append(Finding(check.name, verdict, str(reading), advice))
        except UserError as error:
            text, _, remedy = str(error).partition("; ")
            rows.append(Finding(check.name, PROBLEM, text, remedy or "see docs/configuration.md"))
        except TimeoutError:
            text = f"no answer within {subject.time_limit:g} s"
            rows.append(
                Finding(check.name, PROBLEM, text, f"if a disk is in trouble, {OTHER_PLACE}")
            )
        except Exception as error:  # whatever it is, the other checks go on
            rows.append(
                Finding(check.name, WARNING, f"could not be checked: {describe(error)}", "")
            )
    return rows
