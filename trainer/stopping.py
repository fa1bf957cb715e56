"""When a launch ends: its last step, --max-steps, a signal or a budget."""

from __future__ import annotations

from dataclasses import replace

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
from trainer.budget import Budget, Pace
from trainer.schedule import is_in_late_decay
from trainer.startup import PreparedRun, is_due

LAST_CHARTS_SECONDS = 2.0  # an estimate; they are not waited for beyond the budget


class Stop:
    """Decides after which global step a launch ends. Its methods are collectives: every rank.

    Args:
        group: a gloo group, for numbers in host memory.

    Attributes:
        num_steps: the length of the schedule, which `fit_budget` may change.
        reason: why the launch ends before that, if it does.
    """

    def __init__(self, prepared: PreparedRun, *, clock: PhaseClock, watchdog: Watchdog,
                 group: dist.ProcessGroup, saver: BackgroundSaver) -> None:
        self._prepared, self._config = prepared, prepared.run.train
        self._clock, self._watchdog, self._group, self._saver = clock, watchdog, group, saver
        self._budget = Budget(self._config, clock)
        self._checkpoint_bytes = checkpoint_bytes(
            prepared.run.model, self._config, num_parameters(prepared.run.model))
        self._fits_next = self._config.fit_budget  # fit the schedule at the next report
        self.num_steps = prepared.num_steps
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
        if checks_budget and self._budget.is_limited and global_step < self._last_step():
            is_spent = self._watchdog.process.is_main and self._check_budget(global_step)
        if self.is_asked(is_spent=is_spent):
            return True
        if self.is_save_due(global_step):
            self._fits_next = self._config.fit_budget  # the cost of a save is known by then
        return global_step >= self._last_step()

    def is_asked(self, *, is_spent: bool = False) -> bool:
        """Return whether a signal to any process, or rank 0's budget, ends the launch here.

        Args:
            is_spent: whether the budget is, on rank 0, which also shares the schedule's length.
        """
        is_main = self._watchdog.process.is_main
        shared = torch.tensor([self._watchdog.stop_signal, int(is_spent),
                               self.num_steps if is_main else 0])
        with self._watchdog.suspended():
            self._share_largest(shared)
        number, is_spent, self.num_steps = shared.tolist()
        if number:
            self.reason = StopReason(SIGNAL, STOP_SIGNALS[number])
            self._watchdog.note_stop(number)  # it may not have heard of it yet
        elif is_spent:
            self.reason = StopReason(BUDGET, self._budget.nearest_limit())
        return bool(number or is_spent)

    def _share_largest(self, numbers: torch.Tensor) -> None:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)

    def _check_budget(self, global_step: int) -> bool:
        """Fit the schedule into the budget; return whether that will be spent. Rank 0."""
        if self._fits_next and self._watchdog.process.device.type == "cuda":
            torch.cuda.synchronize()  # the pace must include steps that are still queued
        pace = self.pace(global_step - self._prepared.first_step)
        if self._config.fit_budget:
            self.num_steps = self._fitting_steps(global_step, pace)
        return self._is_spent_after(global_step, pace)

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
        return is_due(global_step, interval, num_steps=self.num_steps)

    def _last_step(self) -> int:
        options, began_at = self._prepared.options, self._prepared.first_step
        if options.began_at is not None:
            began_at = options.began_at
        return min(self.num_steps, began_at + (options.max_steps or self.num_steps)) - 1

    def pace(self, num_steps: int) -> Pace:
        """Return the measured pace of this launch's last `num_steps`."""
        pace = Pace.measured(self._clock, self._config, num_steps=num_steps,
                             plan=self._prepared.plan,
                             checkpoint_bytes=self._checkpoint_bytes)
        # The last write may have to wait for the one before.
        end = 2 * self._saver.longest_write_seconds + LAST_CHARTS_SECONDS
        return replace(pace, last_write=end)

    def _fitting_steps(self, global_step: int, pace: Pace) -> int:
        """Return the number of steps that fit into the budget, once this can be judged."""
        is_judged = global_step - self._prepared.first_step + 1 >= 2 * REPORT_INTERVAL
        if not (self._fits_next and is_judged):
            return self.num_steps
        self._fits_next = False
        affordable = global_step + 1 + self._budget.affordable_steps(pace)
        return min(self._longest_schedule(global_step), affordable)

    def _longest_schedule(self, global_step: int) -> int:
        """Return the most steps that a fitted schedule may have; only fewer near its end."""
        ends = is_in_late_decay(self._config, global_step, num_steps=self.num_steps)
        return self.num_steps if ends else self._prepared.plan.num_steps

    def _is_spent_after(self, global_step: int, pace: Pace) -> bool:
        """Return whether the steps up to the next report would exceed the budget."""
        last_step = self._last_step()
        ahead = range(global_step + 1, min(global_step + REPORT_INTERVAL, last_step) + 1)
        due = [global_step, *ahead]  # this step's validation and checkpoint come after its report
        num_saves = sum(self.is_save_due(step) for step in due if step != last_step)
        return not self._budget.affords(pace.seconds(
            len(ahead), num_validations=sum(map(self.is_validation_due, due)),
            num_saves=num_saves + 1) + pace.last_write)  # a launch ends with a save
