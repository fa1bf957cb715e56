"""Fault injection for tests: named places in the code where a process can be made to fail.

The environment variable DDP_TRAIN_FAILPOINT holds "place:fault", several separated by semicolons.
":rank=R", ":hit=N" and ":attempt=A" limit a fault to one rank, to the N-th time that the place is
reached, or to one of torchrun's restarts: "save.manifest:kill:rank=0:hit=2". Each fault that is
triggered appends a line to the file that DDP_TRAIN_FAILPOINT_MARKS names: place, fault, rank,
process id, time.
"""

import errno
import os
import signal
import sys
import time
from collections import Counter

VARIABLE = "DDP_TRAIN_FAILPOINT"
MARKS = "DDP_TRAIN_FAILPOINT_MARKS"
_hits: Counter[str] = Counter()


def failpoint(place: str) -> bool:
    """Fail if a fault is set for this place; return whether the caller is to make it ("nan")."""
    faults = os.environ.get(VARIABLE)
    return faults is not None and any([_fail(place, *one.split(":")) for one in faults.split(";")])


def _fail(place: str, wanted_place: str, fault: str, *conditions: str) -> bool:
    wanted = dict(condition.split("=") for condition in conditions)
    found = {
        "rank": os.environ.get("RANK", "0"),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    }
    if place != wanted_place or any(wanted.get(key, now) != now for key, now in found.items()):
        return False
    key = ":".join((place, fault, *conditions))
    _hits[key] += 1
    if wanted.get("hit", str(_hits[key])) != str(_hits[key]):
        return False
    if MARKS in os.environ:
        with open(os.environ[MARKS], "a") as marks:
            marks.write(f"{place} {fault} {found['rank']} {os.getpid()} {time.time()}\n")
    match fault:
        case "kill" | "signal":
            os.kill(os.getpid(), int(wanted.get("number", signal.SIGKILL)))
        case "hang" | "slow":
            time.sleep(float(wanted.get("seconds", 3600)))
        case "exit":
            os._exit(0)
        case "raise":
            raise RuntimeError(f"failpoint {place}")
        case "oom":
            import torch

            raise torch.OutOfMemoryError(f"failpoint {place}")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "nan":
            return True
        case _:
            sys.exit(f"{VARIABLE}: unknown fault: {fault}")
    return False
