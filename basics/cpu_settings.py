"""Settings of the C libraries: OpenMP's threads that wait, glibc's malloc. Needs no torch."""

import contextlib
import ctypes
import os

# A thread that waits at the end of a parallel region computes in a loop, so that it can go on at
# once. By default OpenMP lets it do so for milliseconds, which other processes then lack: beside
# two busy ones, two threads on two cores trained at a tenth of their speed. After this many rounds,
# some microseconds, it sleeps (benchmarks/busy_machine.py).
SPIN_COUNT = "2500"
CHOSEN_BY_USER = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}
# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8


def limit_spinning() -> None:
    """Limit how long OpenMP's threads spin, unless the environment says how. Before torch."""
    if not CHOSEN_BY_USER & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system: the next step reuses it.

    Large blocks would be returned, and the system clears them again for each step, which takes a
    third of the step time of a small model on a CPU.
    """
    _set_malloc_options({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})


def map_every_tensor() -> None:
    """Make glibc return freed memory at once, and keep one heap for all threads.

    Otherwise chance decides how much memory it holds: a microbatch would fit in one trial and not
    in another.
    """
    _set_malloc_options({M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 2**16})


def _set_malloc_options(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        c_library = ctypes.CDLL(None)
        for parameter, value in options.items():
            c_library.mallopt(parameter, value)
