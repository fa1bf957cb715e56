"""How commands begin, and the settings of the C libraries. Imports little."""

import ctypes
import importlib.util
import io
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from basics.errors import STOP_SIGNALS, print_error

INTERRUPTED = "Interrupted"  # what is printed after Ctrl-C
# A thread that waits at the end of a parallel region computes in a loop, so that it can go on at
# once. By default OpenMP lets it do so for milliseconds, which other processes then lack: beside
# two busy ones, two threads on two cores trained at a tenth of their speed. After this many rounds,
# some microseconds, it sleeps (benchmarks/README.md).
SPIN_COUNT = "2500"
OLDEST_PYTHON = (3, 11)
CHOSEN_BY_USER = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}
# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8


def begin_command() -> None:
    """Let Ctrl-C end the process in one line, nothing that is printed fail, and no thread spin.

    Called first: importing takes seconds, and torch reads OpenMP's limit. A terminal or log that is
    not UTF-8 gets "\\u2192" for what it cannot show.
    """
    open_closed_outputs()
    if not CHOSEN_BY_USER & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    # torchrun passes signals on to its processes, and says what has happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL if "RANK" in os.environ else _end)
    if "RANK" in os.environ and may_restart():
        _end_torchrun_after_signals()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    check_installation()
    from basics.files import give_libraries_a_cache  # not above: an old Python gets its line first

    give_libraries_a_cache()


def open_closed_outputs() -> None:
    """Open the standard streams that are closed, as cron and daemons do, to /dev/null.

    Otherwise they are None, and the next files that are opened would get what a child prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the lowest number first
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)  # for the processes that are started
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))


def check_installation() -> None:
    """End in one line, with status 2, with an old Python or without the packages."""
    problem = ""
    if sys.version_info < OLDEST_PYTHON:
        problem = f"this is Python {sys.version.split()[0]}; Python 3.11 or newer is needed"
    elif missing := [name for name in ("click", "torch") if importlib.util.find_spec(name) is None]:
        problem = f"{sys.executable}: the packages are not installed ({', '.join(missing)})"
    if problem:
        print_error(
            f"Error: {problem}; put `uv run` before the command, or install with: pip install ."
        )
        sys.exit(2)


def say_torch_loads() -> None:
    """Say what the next seconds are for, if torch is not imported yet: 30 s on a new machine."""
    if "torch" not in sys.modules:
        print_error("loading PyTorch")


def may_restart() -> bool:
    """Return whether a torchrun started this process that has --max-restarts."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _end_torchrun_after_signals() -> None:
    """Until the watchdog starts, let a stop signal end torchrun too, which would start all again.

    By a thread: a handler in Python would wait until the main thread is back from C++ code.
    """
    import socket
    import threading

    torchrun = os.getppid()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: None)
    threading.Thread(
        target=lambda: _end_with_torchrun(torchrun, reader.recv(1)[0]), daemon=True
    ).start()


def _end_with_torchrun(torchrun: int, number: int) -> NoReturn:
    """End this process, and its torchrun if that did not send the signal itself, to restart all.

    It does so when one of its processes has ended, or when one on another node has, which cannot be
    seen here: on several nodes torchrun is left alone.
    """
    try:
        own_command = Path("/proc/self/cmdline").read_bytes()  # that of the others, too
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        alive = [
            child
            for child in children
            if Path(f"/proc/{child}/cmdline").read_bytes() == own_command
        ]
        on_one_node = os.environ.get("GROUP_WORLD_SIZE") == "1"
        if (
            on_one_node
            and os.environ.get("LOCAL_WORLD_SIZE") == str(len(alive))
            and os.getppid() == torchrun
        ):
            os.kill(torchrun, signal.SIGTERM)
    except OSError:  # one has ended meanwhile, or this system has no such files
        pass
    finally:
        os._exit(128 + number)


def _end(*_: object) -> NoReturn:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(128 + signal.SIGINT)


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system: the next step reuses it.

    The system would clear large blocks again for each step, a third of the step time of a small
    model on a CPU.
    """
    _set_malloc_options({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


def map_every_tensor() -> None:
    """Make glibc return freed memory at once, and keep one heap for all threads.

    Otherwise chance decides how much it holds: a microbatch would fit in one trial, not in another.
    """
    _set_malloc_options({M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 2**16})


def _set_malloc_options(options: dict[int, int]) -> None:
    for parameter, value in options.items():
        ctypes.CDLL(None).mallopt(parameter, value)
