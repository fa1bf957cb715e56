"""How long the processes of a run wait for each other."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

VARIABLE = "DDP_TRAIN_TEST_DEADLINES"


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Tests shorten some of them: DDP_TRAIN_TEST_DEADLINES='{"stop": 2}'."""

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

    def after_signal(self, *, is_main: bool) -> float:
        """Return how long a process may go on after a stop signal."""
        return self.stop if is_main else self.others_stop

    @classmethod
    def read(cls) -> Deadlines:
        """Return the deadlines, with the changes that the environment variable asks for."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))
