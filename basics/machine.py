"""Facts of the machine and of the code, and work that may never end on a machine in trouble."""

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")  # of a container: its own limits
PROJECT_DIR = Path(__file__).parents[1]
# By name: a wheel's root has the modules of other packages, too.
SOURCES = (
    *(
        f"{module}.py"
        for module in (
            "checkpointing",
            "ddp_train",
            "gpt",
            "optim",
            "prepare_dataset",
            "run_config",
        )
    ),
    *(
        f"{folder}/**/*.py"
        for folder in (
            "basics",
            "lab",
            "ops",
            "preparation",
            "processes",
            "reporting",
            "settings",
            "tokens",
            "trainer",
        )
    ),
)
GIT_SECONDS = 10.0


def num_cpu_cores() -> int:
    return len(os.sched_getaffinity(0))


def available_ram_gib() -> float:
    """Return the RAM that is free or can be freed, within the limit of a container."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        available = min(available, limit - used + cached)
    return available / 2**30


def seconds_since_process_start() -> float:
    # psutil counts from a boot time that is rounded to whole seconds
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def machine_up_seconds() -> float:
    """Return how long this machine has been up, or this container."""
    try:
        return time.time() - psutil.Process(1).create_time()
    except psutil.Error:  # the system hides the processes of others
        return time.time() - psutil.boot_time()


def boot_id() -> str:
    """Return what the kernel draws anew at each boot; empty if it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def code_digest() -> str:
    """Return a digest of the product's files, 12 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for pattern in SOURCES for path in PROJECT_DIR.glob(pattern)):
        digest.update(str(path.relative_to(PROJECT_DIR)).encode() + path.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """Return the commit, or without a repository the version, and a digest of the files."""
    found = []
    with suppress(PackageNotFoundError):  # used without being installed
        found = [version("ddp-train")]
    if (PROJECT_DIR / ".git").exists():  # else git would look for one in the directories above
        with suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run(
                ["git", "rev-parse", "--short=12", "HEAD"],
                cwd=PROJECT_DIR,
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                check=True,
            ).stdout.split()
    return "+".join([*found, code_digest()])


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result or raise its error.

    Raises: TimeoutError: it has not ended in time; its thread may stay to the process's end.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="time limit", daemon=True).start()
    return future.result(timeout=seconds)
