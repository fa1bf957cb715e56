"""When a launch ends: after its last step, or earlier for a signal or an observer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from basics.errors import STOP_SIGNALS
from reporting.summary import MAX_STEPS, SIGNAL, StopReason
from trainer.launch import Launch
from trainer.observer import Observer


class Stop:
    """Decides after which global step a launch ends, on all ranks the same.

    Attributes:
        has_ended: whether a call has decided that the launch ends.
        reason: why the launch ends before the run, if it does; of an observer on rank 0 alone.
    """

    def __init__(self, launch: Launch, observers: Sequence[Observer]) -> None:
        self._launch, self._observers, self._last_step = launch, observers, launch.last_step
        self.has_ended = False
        self.reason = StopReason(MAX_STEPS, MAX_STEPS) if launch.options.max_steps else None

    def after(self, global_step: int) -> bool:
        """Return whether the launch ends with this step. A collective: every rank."""
        self.agree()
        self.has_ended |= global_step >= self._last_step
        return self.has_ended

    def agree(self) -> bool:
        """Return whether the launch ends: also for a signal to any process, or an observer.

        A collective: every rank.
        """
        watchdog = self._launch.watchdog
        wanted = next((each.stop_reason for each in self._observers if each.stop_reason), None)
        # A signal may have reached only some ranks: all must end after the same step.
        shared = torch.tensor([watchdog.stop_signal, int(wanted is not None)])
        with watchdog.suspended():
            dist.all_reduce(shared, dist.ReduceOp.MAX, self._launch.group)
        number, is_wanted = shared.tolist()
        if number:
            self.reason = StopReason(SIGNAL, STOP_SIGNALS[number])
            watchdog.note_stop(number)  # it may not have heard of it yet
        elif wanted:
            self.reason = wanted
        self.has_ended |= bool(number or is_wanted)
        return self.has_ended
