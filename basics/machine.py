"""Facts about the machine that need no torch."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # of a container: its own limits


def num_cpu_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_ram_gib() -> float:
    """Return the RAM that is free or can be freed, within the limit of a container."""
    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])
        available = min(available, limit - used + cached)
    except (OSError, ValueError, KeyError):  # no container, or no limit ("max")
        pass
    return available / 2**30


def num_usable_cores() -> float:
    """Return the CPU cores that this process may use, within the quota of a container."""
    cores = float(num_cpu_cores())
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return cores


def seconds_since_process_start() -> float:
    """Return the age of this process."""
    try:  # psutil counts from a boot time that is rounded to whole seconds
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time() - psutil.Process().create_time()


def machine_up_seconds() -> float:
    """Return how long this machine has been up, or this container."""
    try:
        return time.time() - psutil.Process(1).create_time()
    except psutil.Error:  # the system hides the processes of others
        return time.time() - psutil.boot_time()


def process_namespace() -> str:
    """Identify the process table in which the process ids that we see are valid.

    Machines and containers may share a host name, so it has the boot id and pid namespace too.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):  # not on macOS
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)
