"""How long threads of a CPU wait for each other by computing. Call it before torch is imported."""

from __future__ import annotations

import os

# A thread that waits at the end of a parallel region computes in a loop, so that it can go on at
# once. By default OpenMP lets it do so for milliseconds, which other processes then lack: beside
# two busy ones, two threads on two cores trained at a tenth of their speed. After this many rounds,
# some microseconds, it sleeps (benchmarks/README.md has the figures).
SPIN_COUNT = "2500"
CHOSEN_BY_USER = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}


def limit_spinning() -> None:
    """Limit how long OpenMP's threads spin, unless the environment says how."""
    if not CHOSEN_BY_USER & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
