"""The signals that end the processes of a run, and how long they wait for each other. No torch."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from basics.errors import STOP_SIGNALS
from basics.failpoints import failpoint

PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
ASK_SECONDS = 2.0  # for torchrun's store to answer
DEADLINES = "DDP_TRAIN_TEST_DEADLINES"  # environment variable of tests: '{"stop": 2}'


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Tests shorten some of them."""

    tick: float = 0.25  # between two checks of the watchdog
    heartbeat: float = 5.0  # between two heartbeats
    repeated_signal: float = 1.0  # torchrun forwards signals: ignore repeats within this time
    # The grace: from a stop signal to the exit at the latest. Rank 0 may have a checkpoint to
    # finish. The others stay until it has exited: torchrun ends all when the first one exits.
    stop: float = 13.0
    after_command: float = 3.0  # of the grace, for charts, tracker; --after-checkpoint has the rest
    others_stop: float = 19.0
    failure_grace: float = 7.0  # for the others to save, after a rank has failed
    last_write: float = 5.0  # for a checkpoint in flight, when a rank fails or must exit
    charts: float = 60.0  # for the last charts, at the end of a run
    tracker: float = 60.0  # for the tracker, at the end of a run; after a signal `after_command`
    after_checkpoint: float = 900.0  # for the last --after-checkpoint, at the end of a launch
    orphans: float = 30.0  # for a run's lock: processes that have lost their torchrun may save
    lost: float = 600.0  # for heartbeats of other machines, until hang_timeout_seconds is known
    first_step: float = 3600.0  # of compiling, without a heartbeat; max-autotune takes minutes
    store: float = 20.0  # for an answer of torchrun's store; after that it counts as down

    @classmethod
    def read(cls) -> Deadlines:
        """Return the deadlines, with the changes that the environment variable asks for."""
        return cls(**json.loads(os.environ.get(DEADLINES, "{}")))


def end_with_parent(parent: int | None = None) -> None:
    """Have the system send SIGTERM to this process when its parent dies. Linux only.

    Args:
        parent: its process id, if known from before: where it is gone, the signal comes now.
    """
    if sys.platform == "linux":
        parent = parent or os.getppid()
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def end_with_torchrun() -> None:
    """End this process, which torchrun has started, when torchrun dies, or if it is dead already.

    One that asks only after torchrun's death gets no signal, and its new parent tells nothing: in a
    container torchrun itself may have the id 1. But torchrun holds its store's socket to its end.
    """
    failpoint("worker")
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(OSError, LookupError, ValueError, OverflowError):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection(address, timeout=ASK_SECONDS).close()
        except ConnectionRefusedError:
            sys.exit(128 + signal.SIGTERM)


def stop_signals() -> list[int]:
    """Return the stop signals that this process handles: under nohup it ignores SIGHUP."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def torchrun_signals() -> str:
    """Return torchrun's option with the signals that it passes on; others would only end it."""
    return f"--signals-to-handle={','.join(STOP_SIGNALS[n] for n in stop_signals())},SIGQUIT"
