"""Stand-ins for what a machine has: a network, a file system, GPUs and a clock."""

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pynvml

ODD_FILES = "TEST_ODD_FILES"  # environment variable: the directory on an odd file system
EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")
LOCAL = ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::", None)
_log: list[Path] = []  # of the context that is active


@contextmanager
def refused_network(log: Path) -> Iterator[None]:
    """Refuse all but the loopback in this process, and write what was asked for to a file."""
    refuse_network(log)
    try:
        yield
    finally:
        _log.clear()


def refuse_network(log: Path) -> None:
    """Do the same until the end of the process."""
    if not _log:
        sys.addaudithook(_refuse)  # a hook can never be removed; without a log it does nothing
    _log.append(log)


def environment_of_refusal(folder: Path, log: Path) -> dict[str, str]:
    """Return the environment in which a new Python process, and all that it starts, refuse too."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "from pathlib import Path\nfrom tests.support import stand_ins\n"
        f"stand_ins.refuse_network(Path({str(log)!r}))\n"
    )
    project = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{project}"}


def _refuse(event: str, arguments: tuple) -> None:
    if not _log or event not in EVENTS:
        return
    place = (
        arguments[0]
        if event.startswith("socket.gethost") or "addrinfo" in event
        else (arguments[1])
    )
    host = place[0] if isinstance(place, tuple) else place
    # A socket of this machine: a file, or a name that begins with NUL.
    is_file = "/" in str(host) or isinstance(host, bytes) or str(host).startswith("\0")
    if not is_file and host not in (*LOCAL, socket.gethostname()):
        with _log[0].open("a") as file:
            file.write(f"{event} {place}\n")
        raise OSError(f"no network in this test: {event} {place}")


def odd_file_system(root: Path) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return patches: os refuses links, renames of directories, locks, fsync of directories there.

    Some network file systems do.
    """
    genuine = {name: getattr(os, name) for name in ("symlink", "rename", "fsync")}
    flock, place = fcntl.flock, os.path.realpath(root)

    def is_odd(path: Any) -> bool:
        path = f"/proc/self/fd/{path}" if isinstance(path, int) else os.path.dirname(path)
        return os.path.join(os.path.realpath(path), "").startswith(os.path.join(place, ""))

    def refuse(number: int = errno.EOPNOTSUPP) -> NoReturn:
        raise OSError(number, os.strerror(number))

    def symlink(source: Any, target: Any, *options: Any) -> None:
        refuse(errno.EPERM) if is_odd(target) else genuine["symlink"](source, target, *options)

    def rename(source: Any, target: Any, **options: Any) -> None:
        refuse(errno.ENOSYS) if is_odd(source) else genuine["rename"](source, target, **options)

    def fsync(descriptor: int) -> None:
        if is_odd(descriptor) and os.path.isdir(f"/proc/self/fd/{descriptor}"):
            refuse(errno.EINVAL)
        genuine["fsync"](descriptor)

    def lock(descriptor: int, operation: int) -> None:
        refuse(errno.ENOLCK) if is_odd(descriptor) else flock(descriptor, operation)

    return [
        (os, "symlink", symlink),
        (os, "rename", rename),
        (os, "fsync", fsync),
        (fcntl, "flock", lock),
    ]


def use_odd_files() -> None:
    """Refuse these calls from now on, below the directory that the environment names, if any."""
    if root := os.environ.get(ODD_FILES):
        for owner, name, replacement in odd_file_system(Path(root)):
            setattr(owner, name, replacement)


GIB = 2**30
H100 = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, total=80 * GIB),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetPowerUsage": 651_250,  # milliwatts
    "nvmlDeviceGetTotalEnergyConsumption": 9_000_500,  # millijoules
    "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
    "nvmlDeviceGetTotalEccErrors": 0,
}


class FakeNvml(ModuleType):
    """What `pynvml` does for these GPUs.

    Args:
        gpus: for each UUID what the functions of one GPU return; an exception is raised, a callable
            is called. A function that is missing is not supported; "lost" as the whole: neither is
            the handle.
        init: raised by nvmlInit.
        lacks: functions that this version of the package does not have.
    """

    NVMLError = pynvml.NVMLError

    def __init__(
        self, gpus: dict[str, Any], *, init: Exception | None = None, lacks: tuple[str, ...] = ()
    ) -> None:
        super().__init__("pynvml")
        self._gpus, self._init, self._lacks = gpus, init, lacks

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise self._init

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.nvmlDeviceGetHandleByUUID(list(self._gpus)[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self._gpus:
            raise pynvml.NVMLError_NotFound()
        if self._gpus[uuid] == "lost":
            raise pynvml.NVMLError_GpuIsLost()
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet") or name in self._lacks:
            raise AttributeError(name)

        def answer(handle: str, *_: int) -> Any:
            value = self._gpus[handle].get(name, pynvml.NVMLError_NotSupported())
            if isinstance(value, Exception):
                raise value
            return value() if callable(value) else value

        return answer


class FakeTime:
    """Replaces `time.perf_counter`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds
