"""When a launch ends: its last step, --max-steps, a signal or a budget."""

from __future__ import annotations

import torch
import torch.distributed as dist

from basics.errors import STOP_SIGNALS
from gpt import num_parameters
from processes.watchdog import Watchdog
from reporting.clock import PhaseClock
from reporting.loss_window import REPORT_INTERVAL
from reporting.speed import checkpoint_bytes
from reporting.summary import BUDGET, MAX_STEPS, SIGNAL, StopReason
from trainer.background_saver import BackgroundSaver
from trainer.budget import Pace, nearest_limit
from trainer.startup import PreparedRun, is_due

SAFETY_MARGIN = 0.25  # of the time ahead: steps may take longer than measured
LAST_CHARTS_SECONDS = 2.0  # an estimate; they are not waited for beyond the budget


class Stop:
    """Decides after which global step a launch ends. Its methods are collectives: every rank.

    Args:
        group: a gloo group, for numbers in host memory.

    Attributes:
        reason: why the launch ends before that, if it does.
    """

    def __init__(self, prepared: PreparedRun, *, clock: PhaseClock, watchdog: Watchdog,
                 group: dist.ProcessGroup, saver: BackgroundSaver) -> None:
        self._prepared, self._config = prepared, prepared.run.train
        self._clock, self._watchdog, self._group, self._saver = clock, watchdog, group, saver
        self._checkpoint_bytes = checkpoint_bytes(
            prepared.run.model, self._config, num_parameters(prepared.run.model))
        self._num_steps = prepared.plan.num_steps
        self.reason = StopReason(MAX_STEPS, MAX_STEPS) if prepared.options.max_steps else None

    @property
    def is_over(self) -> bool:
        """Whether all steps of the launch are done before it begins. Not a collective.

        Earlier launches may have trained them all, or this one, before torchrun's restart.
        """
        return self._prepared.first_step > self._last_step()

    def after(self, global_step: int, *, is_report_due: bool) -> bool:
        """Return whether the launch ends with this step. Budgets are checked at reports."""
        is_spent, checks_budget = False, is_report_due or self.is_save_due(global_step)
        if checks_budget and global_step < self._last_step():
            is_spent = self._watchdog.process.is_main and self._is_spent_after(global_step)
        return self.is_asked(is_spent=is_spent) or global_step >= self._last_step()

    def is_asked(self, *, is_spent: bool = False) -> bool:
        """Return whether a signal to any process, or rank 0's budget, ends the launch here.

        Args:
            is_spent: whether the budget is, on rank 0.
        """
        shared = torch.tensor([self._watchdog.stop_signal, int(is_spent)])
        with self._watchdog.suspended():
            self._share_largest(shared)
        number, is_spent = shared.tolist()
        if number:
            self.reason = StopReason(SIGNAL, STOP_SIGNALS[number])
            self._watchdog.note_stop(number)  # it may not have heard of it yet
        elif is_spent:
            self.reason = StopReason(BUDGET, nearest_limit(self._config, self._clock)[1])
        return bool(number or is_spent)

    def _share_largest(self, numbers: torch.Tensor) -> None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)

    def is_validation_due(self, global_step: int) -> bool:
        """Return whether a validation is due after this step. Not a collective."""
        return self._config.validates and self._is_due(global_step,
                                                       self._config.validation_interval)

    def is_save_due(self, global_step: int) -> bool:
        """Return whether the run's intervals ask for a checkpoint here. Not a collective."""
        return (self.is_validation_due(global_step)
                or self._is_due(global_step, self._config.checkpoint_interval))

    def counts_train_loss(self, global_step: int) -> bool:
        """Return whether `best` goes by this step's training loss. Not a collective."""
        return not self._config.validates and self.is_save_due(global_step)

    def _is_due(self, global_step: int, interval: int | None) -> bool:
        return is_due(global_step, interval, num_steps=self._num_steps)

    def _last_step(self) -> int:
        options, began_at = self._prepared.options, self._prepared.first_step
        if options.began_at is not None:
            began_at = options.began_at
        return min(self._num_steps, began_at + (options.max_steps or self._num_steps)) - 1

    def _is_spent_after(self, global_step: int) -> bool:
        """Return whether the steps up to the next report would exceed the budget. Rank 0."""
        pace = Pace.measured(self._clock, self._config, plan=self._prepared.plan,
                             num_steps=global_step - self._prepared.first_step,
                             checkpoint_bytes=self._checkpoint_bytes)
        last_step = self._last_step()
        ahead = range(global_step + 1, min(global_step + REPORT_INTERVAL, last_step) + 1)
        due = [global_step, *ahead]  # this step's validation and checkpoint come after its report
        num_saves = 1 + sum(self.is_save_due(step) for step in due if step != last_step)
        # A launch ends with a save, whose write may have to wait for the one before.
        seconds = (len(ahead) * pace.step + num_saves * pace.save
                   + sum(map(self.is_validation_due, due)) * pace.validation
                   + 2 * self._saver.longest_write_seconds + LAST_CHARTS_SECONDS)
        return seconds * (1 + SAFETY_MARGIN) > nearest_limit(self._config, self._clock)[0]
